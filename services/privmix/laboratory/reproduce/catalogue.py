"""Reads what the papers print, and compares it with what is computed.

    item = load()["submix"].items["appendix-c3"]
    [row(number) for number in item.numbers]

A paper is a YAML file in this package. A printed number is a text, as it is printed: its digits say how closely ours
must agree. ``<= 8`` and ``>= 0.94`` are claims of a bound.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from privmix.laboratory.reproduce import quantities


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Number(_Data):
    """A printed number.

    Attributes:
        of: what it is.
        by: the function of `quantities` that computes ours, from `given`.
        why: why ours differs, where it does.
        slow: whether ours takes more than some seconds.
    """

    of: str
    printed: str | None = None
    by: str
    given: Mapping[str, Any] = {}
    why: str | None = None
    slow: bool = False

    def row(self) -> dict[str, Any]:
        """Computes our number; returns it beside the printed one. `agrees` is None if nothing is printed."""
        ours: float = getattr(quantities, self.by)(**self.given)
        agreeing = None if self.printed is None else agrees(self.printed, ours)
        shown = ours if math.isfinite(ours) else "unbounded"
        why = None if agreeing else self.why
        return {"of": self.of, "printed": self.printed, "ours": shown, "agrees": agreeing, "why": why}


class Item(_Data):
    """A table, a figure or a theorem.

    Attributes:
        numbers: what needs no corpus.
        parts: the sizes of the ensembles that are trained and evaluated.
        references: whether fine-tuning and DP-SGD are evaluated too.
        evaluate: the options of `privmix evaluate` besides the paper's.
        printed: what the paper prints of methods, by their labels.
        column: what that is: the perplexity, the measured epsilon, or the share of the gain of fine-tuning.
        commands: what repeats it without a corpus, as `privmix` takes it.
        needs: what else is missing, or differs.
    """

    about: str
    numbers: tuple[Number, ...] = ()
    parts: tuple[int, ...] = ()
    references: bool = False
    evaluate: str = ""
    printed: Mapping[str, str] = {}
    column: str = "perplexity"
    commands: tuple[str, ...] = ()
    needs: str | None = None


class Paper(_Data):
    """A paper, whose title the page of the laboratory has.

    Attributes:
        corpus: what to bring, and where it is had.
        train, base, evaluate: the options of `privmix train`, `train-base` and `evaluate` for all items.
    """

    corpus: str = ""
    train: str = ""
    base: str = ""
    evaluate: str = ""
    items: Mapping[str, Item]

    def steps(self, item: Item, train: Path, held_out: Path, output: Path, quick: str | None) -> Iterator[list[str]]:
        """Yields the commands that repeat an item, as arguments of `privmix`.

        Args:
            quick: options of a small training in the place of the paper's. The largest ensemble has eight parts, and
                DP-SGD is left out, which would take longest.
        """
        yield from (shlex.split(command.format(output=output)) for command in item.commands)
        recipe = shlex.split(self.train if quick is None else quick)
        recipe += ["--halves"] * (quick is not None and "--halves" in self.train)
        evaluated = ["evaluate", str(held_out), "--output", str(output / "evaluation"), *shlex.split(self.evaluate)]
        for parts in item.parts:
            size = parts if quick is None else max(2, 8 * parts // max(item.parts))
            trained = str(output / f"parts-{parts}")
            yield ["train", str(train), "--parts", str(size), "--output", trained, *recipe]
            evaluated += ["--ensemble", trained]
        if item.references:
            tuned, private = str(output / "finetuned"), str(output / "dp-sgd")
            yield ["train", str(train), "--parts", "1", "--output", tuned, *recipe]
            evaluated += ["--finetuned", tuned]
        if item.references and quick is None:
            yield ["train-base", str(train), "--output", private, *shlex.split(self.base)]
            evaluated += ["--dp-sgd", private]
        if item.parts:
            small = [] if quick is None else ["--context", "128", "--run-tokens", "128", "--runs", "2"]
            yield [*evaluated, *shlex.split(item.evaluate), *small]


@lru_cache(maxsize=1)
def load() -> Mapping[str, Paper]:
    """Returns the papers by name."""
    found = sorted(file.name for file in files(__package__).iterdir() if file.name.endswith(".yaml"))
    texts = ((name, files(__package__).joinpath(name).read_text(encoding="utf-8")) for name in found)
    return {name.removesuffix(".yaml"): Paper.model_validate(yaml.safe_load(text)) for name, text in texts}


def agrees(printed: str, ours: float) -> bool:
    """Returns whether a number is the printed one when it is rounded to its digits, or keeps to a printed bound."""
    match printed.split():
        case ["<=", bound]:
            return ours <= float(bound)
        case [">=", bound]:
            return ours >= float(bound)
        case ["unbounded"]:
            return math.isinf(ours)
        case _:
            return math.isfinite(ours) and Decimal(ours).quantize(Decimal(printed), ROUND_HALF_UP) == Decimal(printed)
