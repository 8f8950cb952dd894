"""Trains heads: small private models that are released once and answer any number of queries at no further cost.

The package contains ExpM+NF (Bridges, Tombs, Stanley 2024) as published, baselines, attacks and a certified variant.
"""
