"""Implements `privmix heads`, which trains and compares small private models that are released once."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privmix.laboratory.heads import DATASET_NAMES, MethodName
from privmix_cluster.console import display
from privmix_cluster.option_groups import grouped
from privmix_cluster.options import JsonOption
from privmix_cluster.parameters import bad
from privmix_cluster.tables import show_table

if TYPE_CHECKING:
    from privmix.laboratory.heads.table import Table

heads = typer.Typer(
    name="heads",
    help="Train a small model on a table with a binary target, privately, and compare the ways to do it.",
    no_args_is_help=True,
)

_ATTACKS = ["neighbours", "one-run", "membership"]

Dataset = Annotated[
    str,
    typer.Option(help=f"The table: {', '.join(DATASET_NAMES)}, or a .csv, .parquet, .jsonl or .npz file."),
]


@dataclass(frozen=True)
class TableOptions:
    """The table to read."""

    dataset: Dataset = "rand"
    target: Annotated[str | None, typer.Option(help="The column with the binary target, for your own table.")] = None
    user_field: Annotated[
        str | None, typer.Option(help="The column with a row's user. Default: each row is a separate record.")
    ] = None
    bounds: Annotated[
        Path | None,
        typer.Option(
            help='A JSON file with public bounds of all features, {"age": [0, 120]}; certified methods need it.'
        ),
    ] = None
    population: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="About how many rows (users, with --user-field) your own table has, as is publicly known; for dp-sgd.",
        ),
    ] = None

    def table(self) -> "Table":
        """Loads a built-in data set by its name, or the user's own table."""
        from privmix.laboratory.heads.data import DATASETS, read_table
        from privmix.laboratory.heads.table import read_npz

        if self.dataset in DATASETS:
            for option in ("target", "user_field", "bounds", "population"):
                if getattr(self, option) is not None:
                    raise bad(option, f"describes your own table, but {self.dataset} is built in; leave it out")
            return DATASETS[self.dataset]()
        if self.dataset.endswith(".npz"):
            return replace(read_npz(Path(self.dataset)), population=self.population)
        if self.target is None:
            raise bad("target", f"is missing; name the column of {self.dataset} to predict")
        read = read_table(self.dataset, target=self.target, user=self.user_field, bounds=self.bounds)
        return replace(read, population=self.population)


@heads.command()
@grouped
def compare(
    given: TableOptions,
    epsilon: Annotated[list[float], typer.Option(help="An epsilon; may be repeated.")] = [0.001, 0.1, 1, 10],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="The number of trainings for each method and epsilon.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Compare all methods at several epsilons on the same split of a table, with the settings chosen in advance."""
    from privmix.laboratory.heads.compare import compare as compare_methods
    from privmix.laboratory.heads.methods import METHODS

    if any(not 0 < value <= 100 for value in epsilon):
        raise bad("epsilon", "must be above 0 and at most 100")
    with display() as shown:
        result = compare_methods(given.table(), shown, epsilon, seeds=seeds)
    if as_json:
        typer.echo(json.dumps(result))
        return
    rows = [
        {
            "method": METHODS[cell["method"]].label,
            "epsilon": cell["epsilon"],
            "AUC": cell["auc"],
            "5 % - 95 %": f"{cell['quantiles'][0]:.3f} - {cell['quantiles'][-1]:.3f}",
            "seconds": cell["seconds"],
            "guarantee": result["guarantees"][cell["method"]],
        }
        for cell in result["cells"]
    ]
    show_table(f"Area under the curve: {result['dataset']}", rows)


@heads.command()
@grouped
def train(
    output: Annotated[Path, typer.Option(help="The head's new directory.")],
    given: TableOptions,
    method: Annotated[MethodName, typer.Option(help="The training method.")] = "expm-certified",
    epsilon: Annotated[float, typer.Option(help="The epsilon of the method.")] = 1.0,
    unproven: Annotated[bool, typer.Option("--unproven", help="Allow a method without a proven guarantee.")] = False,
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
    manifest = head.train(given.table(), method, epsilon, output, ledger=ledger, budget=budget)
    if as_json:
        typer.echo(manifest.model_dump_json())
    else:
        typer.echo(f"{output}: {METHODS[method].label}; guarantee: {manifest.guarantee}")


@heads.command()
@grouped
def predict(
    directory: Annotated[Path, typer.Argument(help="A head's directory.")],
    given: TableOptions,
) -> None:
    """Print a prediction in [0, 1] for each row of a table, one on a line. Predictions cost no budget."""
    from privmix.laboratory.heads import head

    for value in head.predict(directory, given.table()):
        typer.echo(f"{value:.6f}")


@heads.command()
def audit(
    epsilon: Annotated[float, typer.Option(help="The epsilon of the methods.")] = 0.1,
    trials: Annotated[
        int, typer.Option(min=50, help="The number of releases from each of two neighbouring tables.")
    ] = 500,
    attack: Annotated[list[str], typer.Option(help=f"An attack: {', '.join(_ATTACKS)}; repeat for more.")] = _ATTACKS,
    dataset: Dataset = "breast-cancer",
    shadows: Annotated[
        int,
        typer.Option(min=64, help="The number of shadows for membership, which are not private."),
    ] = 1000,
    attacked: Annotated[
        int, typer.Option(min=1, help="The number of trainings that membership and one-run attack, of each method.")
    ] = 50,
    as_json: JsonOption = False,
) -> None:
    """Attack heads and bound epsilon from below; exit with 1 if a proven guarantee is broken."""
    from privmix.laboratory.heads import attacks
    from privmix.laboratory.heads.methods import METHODS

    if unknown := set(attack) - set(_ATTACKS):
        raise bad("attack", f"there is no attack {', '.join(sorted(unknown))}; there are {', '.join(_ATTACKS)}")
    table = TableOptions(dataset).table()
    fit = [name for name, method in METHODS.items() if method.unfit(table) is None]
    findings = list(attacks.of_neighbours(epsilon, trials)) if "neighbours" in attack else []
    if "one-run" in attack:
        findings += [attacks.one_run(name, table, epsilon, attacked) for name in fit if METHODS[name].private]
    names = fit if "membership" in attack else ()
    membership = attacks.membership(names, table, epsilon, shadows=shadows, attacked=attacked) if names else {}
    if as_json:
        typer.echo(json.dumps({"findings": [finding.record() for finding in findings], "membership": membership}))
    else:
        show_table("Attacks on heads", [finding.row() for finding in findings])
        rows = [
            {"method": METHODS[name].label, "area": own["area"]}
            | dict(zip([f"at {rate:g}" for rate in own["false_positives"]], own["true_positives"][1], strict=True))
            for name, own in membership.items()
        ]
        show_table("Membership by LiRA: the median area, and true-positive rates at false-positive rates", rows)
    if any(finding.verdict == "broken" and finding.status == "certified" for finding in findings):
        raise typer.Exit(1)


prepare = typer.Typer(name="prepare", help="Create tables for heads from published files.", no_args_is_help=True)
heads.add_typer(prepare)


@prepare.command(name="mimic-extract")
def mimic_extract(
    file: Annotated[Path, typer.Argument(help="all_hourly_data.h5 of MIMIC-Extract.")],
    output: Annotated[Path, typer.Option(help="The directory for the tables.")] = Path("run/mimic"),
) -> None:
    """Create the paper's tables from the first 24 hours of MIMIC-Extract: mortality, and stays over three days."""
    from privmix.laboratory.heads import mimic

    for path, rows in mimic.prepare(file, output).items():
        typer.echo(f"{path}: {rows} stays")
