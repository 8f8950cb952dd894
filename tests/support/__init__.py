"""Owns what several test modules share: small helpers, each in a file named after what it is about."""
