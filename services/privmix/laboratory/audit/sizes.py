"""Defines the sizes of the worlds that attacks train, without importing what trains them."""

from pydantic import Field

from privmix.foundation.options import Options


class PlantedSize(Options):
    """The size of the testbed."""

    users: int = Field(48, ge=1, description="Ordinary people of the demo corpus.")
    planted: int = Field(16, ge=2, description="People with a secret, each included by a fair coin.")
    repetitions: int = Field(24, ge=1, description="How often the text of an included person is in the corpus.")
    parts: int = Field(4, ge=1, description="N, the number of parts.")
    digits: int = Field(6, ge=1, le=6, description="The length of a secret.")


class AdjacentSize(Options):
    """The size of two ensembles, and of the planted text. Other users repeat their word less often."""

    parts: int = Field(3, ge=2, description="N, the number of parts of either ensemble.")
    repetitions: int = Field(128, ge=8, description="How often the attacked user says the planted word.")
