"""What must hold of a ledger and of what clients saw, whatever died in between."""

from collections.abc import Iterable
from pathlib import Path

from services.budget.reader import read
from services.budget.statement import statement
from tests.cluster.clients import Transcript


def broken(ledger: str | Path, transcripts: Iterable[Transcript], parts: Iterable[int]) -> list[str]:
    """The invariants that do not hold, in words; none is the good case.

    Args:
        parts: the numbers of parts that the service had, one after another.

    Raises:
        LedgerError: the chain is not whole, or a writer that had been replaced wrote to it (`LedgerState.apply`).
    """
    balance = read(ledger)
    received = sum(transcript.tokens for transcript in transcripts)
    charged = sum(balance.charged.values())
    drawn_from = {event.parts for event in balance.charged}  # type: ignore[attr-defined]
    spent, promised = statement(balance).epsilon_bound, balance.terms.epsilon
    found = []
    if charged < received:
        found.append(f"{received} tokens were received and {charged} charged")
    if promised is None or spent is None or spent > promised:
        found.append(f"tokens left after the budget's end: epsilon is {spent} of {promised}")
    if not drawn_from <= set(parts):
        found.append(f"tokens were drawn from {sorted(drawn_from)} parts, of {sorted(parts)}")
    return found
