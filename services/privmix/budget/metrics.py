"""Exports the budget actor's Prometheus metrics through Ray. Clients may know these numbers too."""

from typing import Literal, get_args

from privmix.budget.ledger import Ledger
from privmix.foundation.metrics import EnsembleMetrics

LedgerHealth = Literal["writable", "fenced", "unavailable"]
STATES: tuple[str, ...] = get_args(LedgerHealth)


class BudgetMetrics:
    """Records the metrics of the budget. Hides the spent epsilon if it is measured on private data."""

    def __init__(self, namespace: str) -> None:
        metrics = EnsembleMetrics(namespace)
        self._leases = metrics.counter("privmix_leases", "Leases and charges that were granted.")
        self._promised = metrics.gauge("privmix_budget_epsilon", "The epsilon of the budget.")
        self._spent = metrics.gauge("privmix_budget_epsilon_spent", "The epsilon of the tokens so far, an estimate.")
        self._tokens = metrics.gauge("privmix_budget_tokens_left", "Tokens left, at the cost of those charged last.")
        self._state = metrics.gauge("privmix_ledger_state", "1 for the state that the ledger is in, else 0.", "state")

    def checked(self, health: LedgerHealth) -> None:
        """Records the result of a health check."""
        for state in STATES:
            self._state.set(float(state == health), {"state": state})

    def granted(self, ledger: Ledger) -> None:
        """Records a lease or a charge."""
        self._leases.inc()
        balance, terms = ledger.balance(), ledger.terms
        if terms.enforced == "bound" and terms.epsilon is not None and balance.latest is not None:
            self._promised.set(terms.epsilon)
            self._spent.set(ledger.filter.estimate(balance.charged))
            self._tokens.set(ledger.filter.affordable(balance.charged, balance.latest))
