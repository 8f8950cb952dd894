"""Attacks on a claim, or on the text itself; each returns findings or what it got."""
