"""Heads: one small private model, released once, that answers any number of queries at no further cost.

ExpM+NF (Bridges, Tombs, Stanley 2024) as published, what it is compared with, attacks on it, and a certified variant.
"""
