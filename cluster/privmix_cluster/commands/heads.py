"""Implements `privmix heads`, which trains and compares small private models that are released once."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from privmix.laboratory.heads.names import DATASET_NAMES, MethodName
from privmix_cluster.console import console, display
from privmix_cluster.options import JsonOption
from privmix_cluster.parameters import bad

if TYPE_CHECKING:
    from privmix.laboratory.audit.finding import Finding
    from privmix.laboratory.heads.compare import HeadComparison
    from privmix.laboratory.heads.table import Table

heads = typer.Typer(
    name="heads",
    help="Train a small model on a table with a binary target, privately, and compare the ways to do it.",
    no_args_is_help=True,
)

Dataset = Annotated[
    str,
    typer.Option(
        help=f"The table: {', '.join(DATASET_NAMES)}, a .csv, .parquet, .jsonl or .npz file, or a Hugging Face dataset."
    ),
]
Target = Annotated[str | None, typer.Option(help="The column with the binary target, for your own table.")]
UserField = Annotated[
    str | None, typer.Option(help="The column with a row's user. Default: each row is a separate record.")
]
Bounds = Annotated[
    Path | None,
    typer.Option(help='A JSON file with public bounds of all features, {"age": [0, 120]}; certified methods need it.'),
]
PopulationOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="About how many rows (users, with --user-field) your own table has, as is publicly known; for dp-sgd.",
    ),
]


@heads.command()
def compare(
    dataset: Dataset = "rand",
    target: Target = None,
    user_field: UserField = None,
    bounds: Bounds = None,
    population: PopulationOption = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="An epsilon; may be repeated. Default: 0.001, 0.1, 1 and 10.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="The number of trainings for each method and epsilon.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Compare all methods at several epsilons on the same split of a table, with the settings chosen in advance."""
    from privmix.laboratory.heads import compare as comparison

    if any(not 0 < value <= 100 for value in epsilon or ()):
        raise bad("epsilon", "must be above 0 and at most 100")
    table = _open_table(dataset, target, user_field, bounds, population)
    with display() as shown:
        result = comparison.compare(table, shown, epsilon or comparison.EPSILONS, seeds=seeds)
    if as_json:
        typer.echo(json.dumps(result.record()))
    else:
        _show_comparison(result)


@heads.command()
def train(
    output: Annotated[Path, typer.Option(help="The head's new directory.")],
    dataset: Dataset = "rand",
    target: Target = None,
    user_field: UserField = None,
    bounds: Bounds = None,
    population: PopulationOption = None,
    method: Annotated[MethodName, typer.Option(help="The training method.")] = "expm-certified",
    epsilon: Annotated[float, typer.Option(help="The epsilon of the method.")] = 1.0,
    unproven: Annotated[bool, typer.Option("--unproven", help="Allow a method without a proven guarantee.")] = False,
    neighbours: Annotated[
        Literal["replace", "add-remove"],
        typer.Option(help="The adjacency for expm-certified: a user is replaced, or added or removed."),
    ] = "replace",
    ledger: Annotated[
        str | None, typer.Option(help="The ledger to charge once: a SQLite file or a database URL.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="The epsilon of a new ledger, for all heads of this table.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train one head on all rows of a table with the settings chosen in advance, and charge its ledger once."""
    from privmix.laboratory.heads import head
    from privmix.laboratory.heads.methods import METHODS, demand_certified

    if not unproven:
        demand_certified(method)
    table = _open_table(dataset, target, user_field, bounds, population)
    manifest = head.train(table, method, epsilon, output, ledger=ledger, budget=budget, neighbours=neighbours)
    if as_json:
        typer.echo(manifest.model_dump_json())
    else:
        typer.echo(f"{output}: {METHODS[method].label}; guarantee: {manifest.guarantee}")


@heads.command()
def predict(
    directory: Annotated[Path, typer.Argument(help="A head's directory.")],
    dataset: Dataset = "rand",
    target: Target = None,
    user_field: UserField = None,
    bounds: Bounds = None,
) -> None:
    """Print a prediction in [0, 1] for each row of a table, one on a line. Predictions cost no budget."""
    from privmix.laboratory.heads import head

    for value in head.predict(directory, _open_table(dataset, target, user_field, bounds)):
        typer.echo(f"{value:.6f}")


@heads.command()
def audit(
    epsilon: Annotated[float, typer.Option(help="The epsilon of the methods.")] = 0.1,
    trials: Annotated[
        int, typer.Option(min=50, help="The number of releases from each of two neighbouring tables.")
    ] = 500,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="An attack: neighbours, one-run or membership; repeat for more. Default: all."),
    ] = None,
    dataset: Dataset = "breast-cancer",
    shadows: Annotated[
        int, typer.Option(min=3, help="The number of shadow models for membership, each of half the rows.")
    ] = 16,
    as_json: JsonOption = False,
) -> None:
    """Attack heads and bound epsilon from below; exit with 1 if a proven guarantee is broken."""
    from privmix.laboratory.audit.finding import Finding
    from privmix.laboratory.heads import attacks
    from privmix.laboratory.heads.certified import CertifiedSettings
    from privmix.laboratory.heads.expm_nf import ExpMNFSettings, FitSettings
    from privmix.laboratory.heads.flows import FlowSettings
    from privmix.laboratory.heads.methods import METHODS

    chosen = set(attack or ("neighbours", "one-run", "membership"))
    if unknown := chosen - {"neighbours", "one-run", "membership"}:
        raise bad("attack", f"there is no attack {', '.join(sorted(unknown))}")
    table = _open_table(dataset, None, None, None)
    findings: list[Finding] = []
    curves: dict[MethodName, Mapping[str, Any]] = {}
    if "neighbours" in chosen:
        narrow = ExpMNFSettings(
            flow=FlowSettings(layers=1, sigma=1e-3), fit=FitSettings(samples=16, steps=200, learning_rate=0.003)
        )
        for pair in (attacks.lever(), attacks.lever(height=1.0)):
            releases = attacks.published_releases(epsilon, narrow)
            findings.append(attacks.neighbours("expm-nf", releases, pair, epsilon, trials=trials))
            certified = attacks.certified_releases(epsilon, CertifiedSettings())
            findings.append(attacks.neighbours("expm-certified", certified, pair, epsilon, trials=20 * trials))
    for name, method in METHODS.items():
        if method.unfit(table) is not None:
            continue
        if "one-run" in chosen and method.private:
            findings.append(attacks.one_run(name, table, epsilon))
        if "membership" in chosen:
            curves[name] = attacks.summary(attacks.membership(name, table, epsilon, shadows=shadows))
    if as_json:
        typer.echo(json.dumps({"findings": [finding.record() for finding in findings], "membership": curves}))
    else:
        _show_audit(findings, {name: curve["area"] for name, curve in curves.items()})
    if any(finding.verdict == "broken" and finding.status == "certified" for finding in findings):
        raise typer.Exit(1)


prepare = typer.Typer(name="prepare", help="Create tables for heads from published files.", no_args_is_help=True)
heads.add_typer(prepare)


@prepare.command(name="mimic-extract")
def mimic_extract(
    file: Annotated[Path, typer.Argument(help="all_hourly_data.h5 of MIMIC-Extract.")],
    output: Annotated[Path, typer.Option(help="The directory for mortality.npz and stay.npz.")] = Path("run/mimic"),
) -> None:
    """Create the paper's tables from the first 24 hours of MIMIC-Extract: mortality, and stays over three days."""
    from privmix.laboratory.heads import mimic

    for path, rows in mimic.prepare(file, output).items():
        typer.echo(f"{path}: {rows} stays")


def _open_table(
    dataset: str, target: str | None, user: str | None, bounds: Path | None, population: int | None = None
) -> "Table":
    """Loads a built-in data set by its name, or the user's own table."""
    from dataclasses import replace

    from privmix.laboratory.heads.data import DATASETS, read_table
    from privmix.laboratory.heads.table import read_npz

    if dataset in DATASETS:
        for option, value in (("target", target), ("user-field", user), ("bounds", bounds), ("population", population)):
            if value is not None:
                raise bad(option, f"describes your own table, but {dataset} is built in; leave it out")
        return DATASETS[dataset]()
    if dataset.endswith(".npz"):
        return replace(read_npz(Path(dataset)), population=population)
    if target is None:
        raise bad("target", f"is missing; name the column of {dataset} to predict")
    return replace(read_table(dataset, target=target, user=user, bounds=bounds), population=population)


def _show_comparison(result: "HeadComparison") -> None:
    from rich.table import Table as RichTable

    from privmix.laboratory.heads.methods import METHODS
    from privmix.privacy.accounting import stated

    table = RichTable("method", "epsilon", title=f"Area under the curve: {result.dataset}", title_justify="left")
    for column in ("AUC", "5 % - 95 %", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("guarantee")
    for cell in result.cells:
        table.add_row(
            METHODS[cell.name].label,
            stated(cell.epsilon) if cell.epsilon else "-",
            f"{cell.auc:.3f}",
            f"{cell.quantiles[0]:.3f} - {cell.quantiles[-1]:.3f}",
            f"{cell.seconds:.2f}",
            result.guarantees[cell.name],
        )
    console().print(table)
    for name, reason in result.left_out.items():
        console().print(f"{METHODS[name].label} is left out: {reason}")


def _show_audit(findings: "list[Finding]", areas: Mapping[MethodName, float]) -> None:
    from rich.table import Table as RichTable

    from privmix.laboratory.heads.methods import METHODS
    from privmix.privacy.accounting import stated

    table = RichTable("attack", "method and table", title="Attacks on heads", title_justify="left")
    for column in ("claimed epsilon", "lower bound", "certain lower bound"):
        table.add_column(column, justify="right")
    table.add_column("guarantee")
    for finding in findings:
        guarantee = "certified: " + finding.verdict if finding.status == "certified" else "none proven"
        table.add_row(
            finding.attack,
            finding.subject,
            stated(finding.claim),
            f"{finding.lower:.3f}",
            f"{finding.certain:.3f}",
            guarantee,
        )
    console().print(table)
    for name, area in areas.items():
        console().print(f"LiRA, {METHODS[name].label}: area {area:.3f}")
