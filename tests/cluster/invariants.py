"""Checks the invariants of a ledger and its clients after any fault."""

from collections.abc import Iterable
from pathlib import Path

from services.budget.reader import read
from services.budget.statement import statement
from tests.cluster.clients import Transcript


def broken(ledger: str | Path, transcripts: Iterable[Transcript], parts: Iterable[int]) -> list[str]:
    """Describes the violated invariants; the list is empty if all hold.

    Args:
        parts: the numbers of parts that the service had over time.

    Raises:
        LedgerError: the chain is damaged, or a replaced writer wrote to it (`LedgerState.apply`).
    """
    balance = read(ledger)
    received = sum(transcript.tokens for transcript in transcripts)
    charged = sum(balance.charged.values())
    drawn_from = {event.parts for event in balance.charged}  # type: ignore[attr-defined]
    spent, promised = statement(balance).epsilon_bound, balance.terms.epsilon
    violations = []
    if charged < received:
        violations.append(f"{received} tokens were received and {charged} charged")
    if promised is None or spent is None or spent > promised:
        violations.append(f"tokens left after the budget's end: epsilon is {spent} of {promised}")
    if not drawn_from <= set(parts):
        violations.append(f"tokens were drawn from {sorted(drawn_from)} parts, of {sorted(parts)}")
    return violations
