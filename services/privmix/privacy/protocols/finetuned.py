"""Implements a reference without privacy: one model fine-tuned on the whole corpus."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field

from privmix.privacy.events import Accountant, Guarantee
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.ensemble import Ensemble, EnsembleEvent, unprotected
from privmix.privacy.settings import Settings


@dataclass(frozen=True)
class FinetunedEvent(EnsembleEvent):
    """Describes a token of one model fine-tuned on the whole corpus, whose cost is unbounded."""

    kind: ClassVar[str] = "finetuned"

    @property
    def guarantee(self) -> Guarantee:
        return unprotected("a model fine-tuned on the whole corpus is sampled as it is, for comparison")


@dataclass(frozen=True)
class Finetuned(Ensemble):
    """Samples from one model fine-tuned on the whole corpus, without privacy: an ensemble of one part.

    Raises:
        ValueError: the ensemble has more than one part.
    """

    name: ClassVar[str] = "finetuned"

    def __post_init__(self) -> None:
        if self.parts != 1:
            raise ValueError(
                f"parts must be 1 for protocol finetuned, and this ensemble has {self.parts}: "
                "train one on the whole corpus with `privmix train --parts 1`"
            )

    @cached_property
    def event(self) -> FinetunedEvent:
        return FinetunedEvent()


class FinetunedSettings(Settings):
    """One model fine-tuned on the whole corpus, without privacy."""

    mechanism: ClassVar[type[Protocol]] = Finetuned
    one_model: ClassVar[bool] = True
    choose: ClassVar[str] = "the reference for what partition and privacy cost; never where the text is private"

    protocol: Literal["finetuned"] = "finetuned"
    epsilon: None = Field(None, description="none: no budget is kept")

    def plan(self, parts: int, kept: Accountant | None = None) -> Finetuned:
        return Finetuned(parts)
