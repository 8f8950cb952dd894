"""Does the work of `privmix heads`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.table import Table as RichTable

from privmix.laboratory.audit.report.finding import Finding
from privmix.laboratory.heads import compare as comparison
from privmix.laboratory.heads.data import DATASETS, read_table
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.names import MethodName
from privmix.laboratory.heads.table import Table, read_npz
from privmix.privacy.accounting import stated
from privmix_cluster.console import console
from privmix_cluster.parameters import bad


def open_table(
    dataset: str, target: str | None, user: str | None, bounds: Path | None, population: int | None = None
) -> Table:
    """Loads a built-in data set by its name, or the user's own table."""
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


def show_comparison(result: comparison.HeadComparison) -> None:
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


def show_audit(findings: list[Finding], areas: Mapping[MethodName, float]) -> None:
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
