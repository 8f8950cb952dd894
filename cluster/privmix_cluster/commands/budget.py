"""Implements `privmix budget`, which reads the budget, its spent part and its remaining part from the ledger."""

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from privmix_cluster.options import JsonOption
from privmix_cluster.tables import show_table

if TYPE_CHECKING:
    from privmix.budget.statement import Charge, LedgerStatement


def budget(
    ledger: Annotated[
        str | None,
        typer.Option(
            help="The ledger: a SQLite file or a database URL. Default: PRIVMIX_BUDGET__LEDGER, the content of the "
            "file that PRIVMIX_BUDGET__LEDGER_FILE names, or ledger.db."
        ),
    ] = None,
    operator: Annotated[
        bool,
        typer.Option(
            "--operator",
            help="Also show the epsilons that depend on the private text. Not for clients.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the privacy budget, the spent part and the remaining part. Works with and without a running service."""
    from privmix.budget.reading import read
    from privmix.budget.statement import statement
    from privmix_cluster.secret_files import variable

    private = statement(read(ledger or variable("PRIVMIX_BUDGET__LEDGER") or "ledger.db"))
    stated = private if operator else private.ledger()
    if as_json:
        print(json.dumps(stated.model_dump(mode="json"), indent=2))
    else:
        _show(stated)


def _show(stated: "LedgerStatement") -> None:
    console = Console()
    console.print(_totals(stated))
    if stated.charges:
        show_table("Tokens by event", [_charge(charge) for charge in stated.charges])
    console.print(stated.guarantee, style="dim")
    if stated.exhausted and not stated.stopped:
        console.print("Exhausted: the rest of the budget is smaller than the cost of one token.")
    if stated.stopped:
        console.print("Stopped: a part's measured losses used up the budget; no more private tokens are released.")


def _totals(stated: "LedgerStatement") -> Table:
    from privmix.budget.statement import OperatorStatement
    from privmix.privacy import accounting

    table = Table(
        title=f"Privacy budget of ensemble {escape(stated.ensemble)}", show_header=False, title_justify="left"
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    promised = "nothing" if stated.epsilon is None else accounting.stated(stated.epsilon)
    limits = "what the budget limits" if stated.enforced == "bound" else "of the bounds"
    table.add_row("promised", promised, f"epsilon at delta {stated.delta:g}; {escape(stated.adjacency)}")
    table.add_row("spent", _number(stated.epsilon_spent), "an estimate, at the best order")
    counter, order = stated.counter, f"at the fixed order {stated.order:g}"
    how = order if counter is None else f"of {counter.tokens} tokens by exact composition"
    table.add_row("", _number(stated.epsilon_bound), f"{how}, {limits}")
    table.add_row("left", _number_left(stated.epsilon_left), "")
    if isinstance(stated, OperatorStatement):
        enforced = "; the budget limits this number" if stated.enforced == "measured" else ""
        table.add_row("measured", _number(stated.epsilon_measured), f"eps(D) at order {stated.order:g}{enforced}")
        table.add_row("", _number_left(stated.epsilon_measured_left), "left; both numbers are private")
    table.add_row("tokens charged", str(stated.tokens_charged), f"including {stated.tokens_held} in open leases")
    left = "-" if stated.tokens_left is None else str(stated.tokens_left)
    if stated.base is not None:
        table.add_row("private base", _number(stated.epsilon_base), "part of what is spent")
    table.add_row("tokens left", left, "at the cost of the last charged event")
    table.add_row("ledger", str(stated.rows), f"rows, epoch {stated.epoch}, last hash {stated.head[:16]}")
    return table


def _charge(charge: "Charge") -> dict[str, object]:
    parameters = ", ".join(f"{name} {value}" for name, value in charge.event.items() if name != "kind")
    kind = charge.event["kind"]
    return {"event": kind, "parameters": parameters, "guarantee": charge.status, "tokens": charge.tokens}


def _number(epsilon: float | None) -> str:
    from privmix.budget.sentence import DIGITS
    from privmix.privacy import accounting

    return "-" if epsilon is None else accounting.shown(epsilon, DIGITS)


def _number_left(epsilon: float | None) -> str:
    """Formats an epsilon that is left, rounded down."""
    from privmix.budget.sentence import DIGITS
    from privmix.privacy import accounting

    return "-" if epsilon is None else f"{-accounting.round_up(-epsilon, DIGITS):.{DIGITS}f}"
