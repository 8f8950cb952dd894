"""Implements `privmix heads`, which trains and compares small private models that are released once."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as Shown

from cluster.console import console, display
from cluster.options import JsonOption
from cluster.parameters import bad
from services.audit.report.finding import Finding
from services.heads import attacks, head, mimic, uncertainty
from services.heads import compare as comparison
from services.heads.certified import CertifiedSettings
from services.heads.data import DATASETS, Table, read_npz, read_table, save_npz
from services.heads.expm_nf import ExpMNFSettings, FitSettings
from services.heads.flows import FlowSettings
from services.heads.methods import METHODS, MethodName, demand_certified
from services.heads.report import write_report
from services.heads.text import read_texts
from services.privacy.sampling.selection import Neighbours
from services.ray_session import connected

heads = typer.Typer(
    name="heads",
    help="Train a small model on a table with a binary target, privately, and compare the ways to do it.",
    no_args_is_help=True,
)

Dataset = Annotated[
    str,
    typer.Option(help=f"{', '.join(DATASETS)}; a .csv, .parquet, .jsonl or .npz file; Hugging Face datasets."),
]
Target = Annotated[str | None, typer.Option(help="The column with the binary target, for your own table.")]
UserField = Annotated[
    str | None, typer.Option(help="The column with a row's user. Default: each row is a separate record.")
]
Bounds = Annotated[
    Path | None,
    typer.Option(help='JSON with public [low, high] of every feature, {"age": [0, 120]}; certified methods need it.'),
]


@heads.command()
def compare(
    dataset: Dataset = "rand",
    target: Target = None,
    user_field: UserField = None,
    bounds: Bounds = None,
    output: Annotated[
        Path, typer.Option(help="The directory for results and report. An interrupted comparison continues there.")
    ] = Path("run/heads"),
    epsilon: Annotated[list[float] | None, typer.Option(help="An epsilon; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of the final round, for each method and epsilon.")] = 10,
    quick: Annotated[
        bool, typer.Option("--quick", help="No search, four epsilons, three seeds: under three minutes.")
    ] = False,
    as_json: JsonOption = False,
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
    page = write_report(found, directory)
    if as_json:
        typer.echo(json.dumps(found.record()))
    else:
        _show(found)
        typer.echo(f"report: {page}")


@heads.command()
def train(
    output: Annotated[Path, typer.Option(help="The head's new directory.")],
    dataset: Dataset = "rand",
    target: Target = None,
    user_field: UserField = None,
    bounds: Bounds = None,
    method: Annotated[MethodName, typer.Option(help="The training method.")] = "expm-certified",
    epsilon: Annotated[float, typer.Option(help="The epsilon of the method.")] = 1.0,
    unproven: Annotated[
        bool, typer.Option("--unproven", help="Allow a method without a proven guarantee; the head's manifest says so.")
    ] = False,
    neighbours: Annotated[
        Neighbours, typer.Option(help="expm-certified: the adjacency, a user replaced or added.")
    ] = "replace",
    ledger: Annotated[str | None, typer.Option(help="The ledger to charge once, a SQLite file or URL.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="The epsilon of a new ledger, for all heads of this table.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train one head on all rows of a table with the setting chosen in advance, and charge its ledger once."""
    if not unproven:
        demand_certified(method)
    table = open_table(dataset, target, user_field, bounds)
    found = head.train(table, method, epsilon, output, ledger=ledger, budget=budget, neighbours=neighbours)
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        typer.echo(f"{output}: {METHODS[method].label}; guarantee: {found.guarantee}")


@heads.command()
def predict(
    directory: Annotated[Path, typer.Argument(help="A head's directory.")],
    dataset: Dataset = "rand",
    target: Target = None,
    user_field: UserField = None,
    bounds: Bounds = None,
) -> None:
    """Print one prediction in [0, 1] on each line for the rows of a table. Predictions cost nothing more."""
    for value in head.predict(directory, open_table(dataset, target, user_field, bounds)):
        typer.echo(f"{value:.6f}")


@heads.command()
def intervals(
    dataset: Dataset = "rand",
    target: Target = None,
    user_field: UserField = None,
    bounds: Bounds = None,
    share: Annotated[float, typer.Option(help="Share of the samples' predictions in an interval.")] = 0.9,
    temper: Annotated[float, typer.Option(help="Factor of the loss in the density; more narrows the intervals.")] = 2.0,
    samples: Annotated[int, typer.Option(min=2, help="Parameter vectors drawn from the flow.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """Print mean, low and high of each row's prediction, from many samples of one flow. For public data only."""
    if not 0 < share < 1:
        raise bad("share", "must lie between 0 and 1")
    if temper <= 0:
        raise bad("temper", "must be positive")
    found = uncertainty.intervals(open_table(dataset, target, user_field, bounds), temper, share, samples)
    rows = zip(found.mean.tolist(), found.low.tolist(), found.high.tolist(), strict=True)
    if as_json:
        typer.echo(json.dumps({"share": share, "intervals": [list(row) for row in rows]}))
    else:
        for row in rows:
            typer.echo(" ".join(f"{value:.6f}" for value in row))


@heads.command()
def audit(
    epsilon: Annotated[float, typer.Option(help="The epsilon of the methods.")] = 0.1,
    trials: Annotated[int, typer.Option(min=50, help="Releases from each of two neighbouring tables.")] = 500,
    attack: Annotated[
        list[str] | None, typer.Option(help="neighbours, one-run or membership; may be repeated. Default: all.")
    ] = None,
    dataset: Dataset = "breast-cancer",
    shadows: Annotated[int, typer.Option(min=3, help="Models of half the rows, for membership.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Attack heads and bound epsilon from below; exit with 1 if a proven guarantee is broken."""
    chosen = set(attack or ("neighbours", "one-run", "membership"))
    if unknown := chosen - {"neighbours", "one-run", "membership"}:
        raise bad("attack", f"there is no attack {', '.join(sorted(unknown))}")
    table = open_table(dataset, None, None, None)
    findings: list[Finding] = []
    curves = {}
    if "neighbours" in chosen:
        narrow = ExpMNFSettings(
            flow=FlowSettings(layers=1, sigma=1e-3), fit=FitSettings(samples=16, steps=200, learning_rate=0.003)
        )
        for pair in (attacks.lever(), attacks.lever(height=1.0)):
            releases = attacks.published_releases(epsilon, narrow)
            findings.append(attacks.neighbours("expm-nf", releases, pair, epsilon, trials=trials))
            certified = attacks.certified_releases(epsilon, CertifiedSettings())
            findings.append(attacks.neighbours("expm-certified", certified, pair, epsilon, trials=20 * trials))
    for name in ("expm-nf", "dp-sgd", "expm-certified"):
        if "one-run" in chosen:
            findings.append(attacks.one_run(name, table, epsilon))
        if "membership" in chosen:
            curves[name] = attacks.summary(attacks.membership(name, table, epsilon, shadows=shadows))
    if "membership" in chosen:
        curves["non-private"] = attacks.summary(attacks.membership("non-private", table, epsilon, shadows=shadows))
    if as_json:
        typer.echo(json.dumps({"findings": [each.record() for each in findings], "membership": curves}))
    else:
        _show_audit(findings, {name: curve["area"] for name, curve in curves.items()})
    if any(each.verdict == "broken" and each.status == "certified" for each in findings):
        raise typer.Exit(1)


prepare = typer.Typer(name="prepare", help="Create tables for heads from published files.", no_args_is_help=True)
heads.add_typer(prepare)


@prepare.command(name="mimic-extract")
def mimic_extract(
    file: Annotated[Path, typer.Argument(help="all_hourly_data.h5 of MIMIC-Extract.")],
    output: Annotated[Path, typer.Option(help="Directory for mortality.npz and stay.npz.")] = Path("run/mimic"),
) -> None:
    """Create the paper's tables from MIMIC-Extract: mortality and stays over three days, from the first 24 hours."""
    for path, rows in mimic.prepare(file, output).items():
        typer.echo(f"{path}: {rows} stays")


@prepare.command(name="text")
def texts(
    file: Annotated[str, typer.Argument(help="A .jsonl, .csv or .parquet file, or Hugging Face datasets.")],
    target: Annotated[str, typer.Option(help="Column with the label, which has two values.")],
    output: Annotated[Path, typer.Option(help="The table, a file that ends with .npz.")],
    text_field: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    user_field: UserField = None,
    model: Annotated[str | None, typer.Option(help="Public model, as for `privmix train`.")] = None,
) -> None:
    """A table from labelled texts: the public model's mean hidden states are the features, and have public bounds."""
    if output.suffix != ".npz":
        raise bad("output", "must end with .npz")
    table = read_texts(file, text=text_field, target=target, user=user_field, model=model)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_npz(table, output)
    typer.echo(f"{output}: {len(table.y)} texts, {table.features} features; the unit is one {table.unit}")


def open_table(dataset: str, target: str | None, user: str | None, bounds: Path | None) -> Table:
    """Loads a built-in data set by its name, or the user's own table."""
    if dataset in DATASETS:
        for option, given in (("target", target), ("user-field", user), ("bounds", bounds)):
            if given is not None:
                raise bad(option, f"goes with a table of your own, not with {dataset}")
        return DATASETS[dataset]()
    if dataset.endswith(".npz"):
        return read_npz(Path(dataset))
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


def _show_audit(findings: list[Finding], areas: dict[str, float]) -> None:
    shown = Shown("attack", "method and table", title="Attacks on heads", title_justify="left")
    for column in ("epsilon given", "epsilon is at least", "certainly at least"):
        shown.add_column(column, justify="right")
    shown.add_column("guarantee")
    for each in findings:
        guarantee = "certified: " + each.verdict if each.status == "certified" else "none proven"
        shown.add_row(
            each.attack, each.subject, f"{each.claim:g}", f"{each.lower:.3f}", f"{each.certain:.3f}", guarantee
        )
    console().print(shown)
    for name, area in areas.items():
        console().print(f"LiRA, {METHODS[name].label}: area {area:.3f}")  # type: ignore[index]
