"""Attacks on a claim or on the private text. An attack returns findings or a measure of its success."""
