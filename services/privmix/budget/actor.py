"""Implements the budget actor, the only process of a cluster that writes the ledger."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, Unpack
from uuid import uuid4

import ray
from ray.actor import ActorHandle

from privmix.budget.accounts import Grains
from privmix.budget.ledger import PATIENCE_S, Grant, Ledger, WriterOptions
from privmix.budget.metrics import BudgetMetrics, LedgerHealth
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.statement import Statement, statement
from privmix.foundation.actors import HEAD, concurrent
from privmix.foundation.errors import Fenced, LedgerError
from privmix.privacy.events import from_json

NAME = "budget"
WATCH_S = PATIENCE_S / 6

logger = logging.getLogger(__name__)


class Budget:
    """Grants leases, charges measured tokens and settles leases.

    The actor of a new deployment takes over the ledger with its first charge. Ray restarts a dead actor, which begins a
    new epoch and continues from the ledger, unless another deployment has taken it over. Ray also repeats interrupted
    calls: `settle` and `charge` are idempotent, and so is `lease` if its caller names the lease. A repeated lease
    without a name is charged twice and granted once, which is safe.
    """

    def __init__(
        self,
        ledger: str,
        terms: PrivacyBudget,
        create: bool,
        options: WriterOptions,
        namespace: str,
        settings: Mapping[str, object],
    ) -> None:
        self._where = ledger
        self._terms = terms
        self._options = options
        self._settings = settings
        # A restarted actor had a ledger. If it is missing now, a new one would forget what was spent.
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._create = create and not restarted
        self._opening = threading.Lock()
        self._metrics = BudgetMetrics(namespace)
        self._ledger: Ledger | None = None
        self._cached: tuple[Any, ...] = ()
        try:
            if restarted:
                self._opened().resume()
            else:
                self._opened()
        except LedgerError as error:
            logger.error("%s", error)  # callers get the same error until the ledger is available
        threading.Thread(target=self._watch, daemon=True).start()

    def ready(self) -> PrivacyBudget:
        """Opens the ledger and returns its privacy budget."""
        return self._opened().terms

    def settings(self) -> Mapping[str, object]:
        """Returns the settings that the actors of this service have, and do not change while they live."""
        return self._settings

    @concurrent("writes")
    def lease(self, event: str, count: int, lease: str | None = None, parts: int | None = None) -> Grant:
        """See `Ledger.lease`. `event` is the result of `Event.to_json`."""
        grant = self._opened().lease(from_json(event), count, lease, parts)
        self._metrics.granted(self._opened())
        return grant

    @concurrent("writes")
    def settle(self, lease: str, used: int, charges: Grains = ()) -> None:
        """See `Ledger.settle`."""
        self._opened().settle(lease, used, charges)

    @concurrent("writes")
    def charge(self, event: str, tokens: Sequence[Sequence[float]], charge: str) -> int:
        """See `Ledger.charge`."""
        granted = self._opened().charge(from_json(event), tokens, charge)
        self._metrics.granted(self._opened())
        return granted

    def stopped(self) -> bool:
        """Returns whether the ledger has stopped: it grants no more private tokens (`Ledger.charge`)."""
        return self._opened().balance().stopped

    @concurrent("health")
    def health(self) -> LedgerHealth:
        """Returns "writable" if a token can be charged now.

        Returns "fenced" if another deployment has the ledger, and "unavailable" if the database does
        not answer or holds no ledger of this budget.
        """
        try:
            self._opened().check()
        except Fenced:
            return "fenced"
        except LedgerError:
            return "unavailable"
        return "writable"

    @concurrent("statements")
    def statement(self, event: str | None = None) -> Statement:
        """Returns the statement for clients, cached until the ledger grows.

        It counts what is left in tokens of `event`, by default the last one.
        """
        balance = self._opened().balance()
        if self._cached[:2] != (balance.head, event):
            self._cached = balance.head, event, statement(balance, from_json(event) if event else None).client()
        cached: Statement = self._cached[2]
        return cached

    def give_up(self) -> None:
        """See `Ledger.give_up`."""
        self._opened().give_up()

    def _watch(self) -> None:
        """Sends heartbeats to the ledger and sets the metrics of its health, without end."""
        for needed in ("scipy.special", "dp_accounting"):
            import_module(needed)  # here, because the first lease needs it and its client would wait
        while True:
            try:
                self._metrics.checked(self.health())
                self._opened().beat()
            except Exception as error:  # no error may end the heartbeats
                logger.warning("the ledger was not reached: %s", type(error).__name__)
            time.sleep(WATCH_S)

    def _opened(self) -> Ledger:
        with self._opening:
            if self._ledger is None:
                begin = Ledger.create if self._create else Ledger.open
                self._ledger = begin(self._where, self._terms, **self._options)
                logger.info("ledger %s: %d rows", self._ledger.name, self._ledger.balance().rows)
            return self._ledger


# Concurrent writes share a commit (`Ledger`). Statements take long, so they run in a separate thread.
BudgetActor = ray.remote(
    num_cpus=0,
    resources=HEAD,
    max_restarts=-1,
    max_task_retries=-1,
    concurrency_groups={"writes": 32, "statements": 1, "health": 1},
)(Budget)


def start(
    ledger: str,
    terms: PrivacyBudget,
    *,
    namespace: str,
    create: bool = True,
    lifetime: Literal["detached"] | None = None,
    settings: Mapping[str, object] | None = None,
    **options: Unpack[WriterOptions],
) -> ActorHandle:
    """Starts the budget actor of a namespace and waits for its ledger.

    Args:
        create: create the ledger if it does not exist.
        settings: see `Budget.settings`.
        options: of the writer, which becomes a deployment of its own.

    Raises:
        LedgerError: the ledger cannot be used. The actor has been stopped.
        ValueError: the namespace has one already.
    """
    options["holder"] = uuid4().hex
    actor = BudgetActor.options(name=NAME, namespace=namespace, lifetime=lifetime).remote(
        ledger, terms, create, options, namespace, settings or {}
    )
    try:
        ray.get(actor.ready.remote())
    except LedgerError as error:
        ray.kill(actor)
        raise getattr(error, "cause", error) from None  # Ray's own class quotes a traceback in its message
    return actor
