"""Implements `privmix evaluate`: the perplexity of all methods on held-out text."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from privmix.laboratory.evaluation.options import QUANTITIES, EvaluationOptions
from privmix_cluster.console import display
from privmix_cluster.option_groups import grouped
from privmix_cluster.options import (
    DeltaOption,
    DrawnOption,
    JsonOption,
    SkipBadOption,
    TextFieldOption,
    UserFieldOption,
)

_DEFAULTS = EvaluationOptions()


def _without_none(sweeps: list[str]) -> list[str]:
    return [name for name in sweeps if name != "none"]


@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared, at which budgets."""

    epsilons: Annotated[
        list[float], typer.Option("--epsilon", help="The epsilon of a budget; repeat for more tables.")
    ] = field(default_factory=lambda: list(_DEFAULTS.epsilons))
    delta: DeltaOption = _DEFAULTS.delta
    tokens: Annotated[
        list[int], typer.Option(help="The number of tokens that a budget must last for; repeat for more tables.")
    ] = field(default_factory=lambda: list(_DEFAULTS.tokens))
    protocols: Annotated[
        list[str] | None,
        typer.Option("--protocol", help="A protocol to evaluate beside the references; repeat for more. Default: all."),
    ] = None
    run_tokens: Annotated[
        int | None, typer.Option(help="The number of tokens in a run. Default: the smallest of --tokens.")
    ] = _DEFAULTS.run_tokens
    drawn: DrawnOption = _DEFAULTS.drawn
    runs: Annotated[int, typer.Option(help="The number of runs. They use different text if there is enough of it.")] = (
        _DEFAULTS.runs
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


@grouped
def evaluate(
    held_out: Annotated[Path, typer.Argument(help="Held-out text: JSON Lines file, or a dataset directory.")],
    ensemble: Annotated[
        list[Path], typer.Option(help="An ensemble's directory; repeat for other sizes. The table shows the largest.")
    ],
    compared: ComparisonOptions,
    output: Annotated[
        Path, typer.Option(help="The directory for the report. An interrupted evaluation continues there.")
    ],
    finetuned: Annotated[
        Path | None, typer.Option(help="An ensemble of one part, from `privmix train --parts 1`, as a reference.")
    ] = None,
    dp_sgd: Annotated[
        list[Path] | None, typer.Option(help="A model from `privmix train-base`; repeat for other budgets.")
    ] = None,
    context: Annotated[int, typer.Option(help="The maximum number of tokens in a block of text.")] = _DEFAULTS.context,
    precision: Annotated[
        str, typer.Option(help="The precision of the models: auto, bfloat16 or float32.")
    ] = _DEFAULTS.precision,
    user_field: UserFieldOption = "user",
    text_field: TextFieldOption = "text",
    skip_bad: SkipBadOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the perplexity of all methods on held-out text at the same budget, with their actual guarantees.

    The result is measured on private models, so it is for the operator only. The exit status is 0 if the report is
    written, 2 if the input is invalid, 1 if a task failed, and 130 if the command was interrupted. Run it again to
    continue.
    """
    from privmix.laboratory.evaluation.ensembles import ComparedEnsembles
    from privmix.laboratory.evaluation.evaluate import evaluate as evaluate_methods
    from privmix.training.corpus import Corpus
    from privmix_cluster.work.evaluate import report

    started = time.monotonic()
    evaluation = evaluate_methods(
        Corpus(held_out, user_field, text_field, skip_bad),
        output,
        ComparedEnsembles.load(ensemble, finetuned, dp_sgd or []),
        compared.checked(context=context, precision=precision),
        display(as_json),
    )
    report(evaluation, output, time.monotonic() - started, as_json)
