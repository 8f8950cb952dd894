"""Names the built-in tables and the methods, without importing what loads and trains them."""

from typing import Literal

MethodName = Literal["non-private", "dp-sgd", "expm-nf", "expm-certified"]

DATASET_NAMES = ("rand", "breast-cancer")
"""The names of the built-in tables, which `privmix.laboratory.heads.data.DATASETS` loads."""
