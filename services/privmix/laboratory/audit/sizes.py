"""Defines the sizes of the worlds that attacks train, without importing what trains them."""

from dataclasses import dataclass
from typing import Literal

SecretKind = Literal["digits", "sampled"]


@dataclass(frozen=True)
class PlantedSize:
    """The size of the testbed.

    Attributes:
        users: the number of ordinary users of the demo corpus.
        planted: the number of users with a secret, each included by a fair coin.
        repetitions: the number of copies of an included user's text in the corpus.
        parts: the number of parts of the ensemble.
        secrets: random digits, or texts that the public model samples at a high temperature.
    """

    users: int = 48
    planted: int = 16
    repetitions: int = 24
    parts: int = 4
    secrets: SecretKind = "digits"


@dataclass(frozen=True)
class AdjacentSize:
    """The size of the ensembles and of the planted text.

    Attributes:
        parts: N, the number of parts of either ensemble.
        repetitions: the number of times that the attacked user repeats the planted word. Other users repeat less.
    """

    parts: int = 3
    repetitions: int = 128
