"""Declares the options that `privmix evaluate` and `privmix compare` share."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from cluster.options import DeltaOption, DrawnOption
from services.laboratory.evaluation.options import QUANTITIES, EvaluationOptions

DEFAULTS = EvaluationOptions()


def _without_none(sweeps: list[str]) -> list[str]:
    return [name for name in sweeps if name != "none"]


@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared, at which budgets."""

    epsilons: Annotated[
        list[float], typer.Option("--epsilon", help="The epsilon of a budget; repeat for more tables.")
    ] = field(default_factory=lambda: list(DEFAULTS.epsilons))
    delta: DeltaOption = DEFAULTS.delta
    tokens: Annotated[
        list[int], typer.Option(help="The number of tokens that a budget must last for; repeat for more tables.")
    ] = field(default_factory=lambda: list(DEFAULTS.tokens))
    protocols: Annotated[
        list[str] | None,
        typer.Option("--protocol", help="A protocol to evaluate beside the references; repeat for more. Default: all."),
    ] = None
    run_tokens: Annotated[
        int | None, typer.Option(help="The number of tokens in a run. Default: the smallest of --tokens.")
    ] = DEFAULTS.run_tokens
    drawn: DrawnOption = DEFAULTS.drawn
    runs: Annotated[int, typer.Option(help="The number of runs. They use different text if there is enough of it.")] = (
        DEFAULTS.runs
    )
    sweeps: Annotated[
        list[str],
        typer.Option(
            "--sweep",
            help="An ablation figure to draw, or `none`; repeat for more. Default: all.",
            callback=_without_none,
        ),
    ] = field(default_factory=lambda: list(QUANTITIES))

    def checked(self, **more: Any) -> EvaluationOptions:
        """Returns the options of an evaluation. Raises `InputError` that names the first invalid one."""
        return EvaluationOptions.checked(**asdict(self) | {"protocols": self.protocols or None} | more)
