"""`privmix heads`: one small private model, released once, that answers any number of queries."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as Shown

from cluster.console import console, display
from cluster.parameters import bad
from services.heads import compare as comparison
from services.heads.data import DATASETS, Table, read_table
from services.heads.methods import METHODS
from services.training.tasks import connected

heads = typer.Typer(
    name="heads",
    help="Train a small model on a table with a binary target, privately, and compare the ways to do it.",
    no_args_is_help=True,
)

Dataset = Annotated[
    str,
    typer.Option(help=f"{', '.join(DATASETS)}; a .csv or .parquet file; Hugging Face datasets by directory or id."),
]
Target = Annotated[str | None, typer.Option(help="Column with the binary target, of a table of your own.")]
UserField = Annotated[str | None, typer.Option(help="Column with a row's user; without it every row is its own.")]
Bounds = Annotated[
    Path | None,
    typer.Option(help='JSON with public [low, high] of every feature, {"age": [0, 120]}; certified methods need it.'),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@heads.command()
def compare(
    dataset: Dataset = "rand",
    target: Target = None,
    user_field: UserField = None,
    bounds: Bounds = None,
    output: Annotated[Path, typer.Option(help="Where results and the report go; a comparison goes on there.")] = Path(
        "run/heads"
    ),
    epsilon: Annotated[list[float] | None, typer.Option(help="An epsilon; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of the final round, for each method and epsilon.")] = 10,
    quick: Annotated[
        bool, typer.Option("--quick", help="No search, four epsilons, three seeds: under three minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare all methods on the same split of a table, over epsilon."""
    table = open_table(dataset, target, user_field, bounds)
    epsilons = tuple(epsilon or (comparison.QUICK_EPSILONS if quick else comparison.EPSILONS))
    if any(not 0 < each <= 100 for each in epsilons):
        raise bad("epsilon", "must lie above 0 and at most at 100")
    plan = comparison.Plan(epsilons, seeds=3 if quick else seeds, search=not quick)
    directory = output / table.name
    with display(as_json) as shown:
        if quick:
            found = comparison.compare(table, plan, directory, comparison.in_process(shown), shown)
        else:
            with connected():
                found = comparison.compare(table, plan, directory, comparison.on_cluster(shown), shown)
    if as_json:
        typer.echo(json.dumps(found.record()))
    else:
        _show(found)


def open_table(dataset: str, target: str | None, user: str | None, bounds: Path | None) -> Table:
    """A data set by its name, or a table of the user's own."""
    if dataset in DATASETS:
        for option, given in (("target", target), ("user-field", user), ("bounds", bounds)):
            if given is not None:
                raise bad(option, f"goes with a table of your own, not with {dataset}")
        return DATASETS[dataset]()
    if target is None:
        raise bad("target", f"names the column of {dataset} that is to be learnt")
    return read_table(dataset, target=target, user=user, bounds=bounds)


def _show(found: comparison.Comparison) -> None:
    shown = Shown("method", "epsilon", "setting", title=f"Area under the curve: {found.dataset}", title_justify="left")
    for column in ("AUC", "5 % - 95 %", "seconds"):
        shown.add_column(column, justify="right")
    shown.add_column("guarantee")
    shown.add_column("what the search costs")
    for cell in found.cells:
        shown.add_row(
            METHODS[cell.name].label,
            f"{cell.epsilon:g}" if cell.epsilon else "-",
            cell.chosen,
            f"{cell.auc:.3f}",
            f"{cell.quantiles[0]:.3f} - {cell.quantiles[-1]:.3f}",
            f"{cell.seconds:.2f}",
            METHODS[cell.name].guarantee,
            cell.search_cost,
        )
    console().print(shown)
