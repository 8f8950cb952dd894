"""Trains heads: small private models that are released once and answer any number of queries at no further cost.

The package contains ExpM+NF (Bridges, Tombs, Stanley 2024) as published, baselines, attacks and a certified variant.
"""

from typing import Literal

MethodName = Literal["non-private", "dp-sgd", "expm-nf", "expm-certified"]

DATASET_NAMES = ("rand", "breast-cancer")
"""The names of the built-in tables, which `data.DATASETS` loads."""
