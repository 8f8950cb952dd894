"""The budget actor: the one process of a cluster that writes the ledger."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

import ray
from ray.actor import ActorHandle

from services import tracing
from services.budget.errors import Fenced, LedgerError, LedgerMoved
from services.budget.ledger import PATIENCE_S, Grant, Ledger
from services.budget.metrics import BudgetMetrics, LedgerHealth
from services.budget.privacy_budget import PrivacyBudget
from services.budget.records import from_json
from services.budget.statement import OperatorStatement, Statement, statement

NAME = "budget"
WATCH_S = PATIENCE_S / 6

_log = logging.getLogger(__name__)


# Writes that wait at the same time share a commit (`Ledger`); statements have a thread of their own.
@ray.remote(
    num_cpus=0, max_restarts=-1, max_task_retries=-1, concurrency_groups={"writes": 32, "statements": 1, "health": 1}
)
class Budget:
    """Grants leases and takes them back.

    The actor of a new deployment takes the ledger over with its first charge, when clients reach it. Ray restarts the
    actor for ever; it then takes a new epoch and goes on from the ledger, unless another deployment has it. Ray also
    sends calls again that were under way: `settle` may be repeated by nature, `lease` when its caller names the lease.
    A lease without a name that is sent again is charged twice and granted once: an error on the safe side, seen as
    tokens `held`.
    """

    def __init__(
        self,
        ledger: str,
        terms: PrivacyBudget,
        create: bool = True,
        identity: str | None = None,
        holder: str | None = None,
    ) -> None:
        self._where = ledger
        self._terms = terms
        self._identity = identity
        self._holder = holder
        # One that was restarted had a ledger; where that is gone, an empty one would forget what was spent.
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._create = create and not restarted
        self._opening = threading.Lock()
        self._metrics = BudgetMetrics()
        self._ledger: Ledger | None = None
        self._composed: tuple[Any, ...] = ()
        try:
            if restarted:
                self._opened().resume()
            else:
                self._opened()
        except LedgerError as error:
            _log.error("%s", error)  # callers will meet it too, or find the ledger available again
        threading.Thread(target=self._watch, daemon=True).start()

    def ready(self) -> PrivacyBudget:
        """The terms kept here, once the ledger is open."""
        return self._opened().terms

    @ray.method(concurrency_group="writes")  # type: ignore[untyped-decorator]
    def lease(self, event: str, count: int, lease: str | None = None, trace: str | None = None) -> Grant:
        """See `Ledger.lease`; `event` is `Event.to_json`'s text, `trace` a W3C traceparent."""
        with tracing.span("budget.lease", trace) as span:
            tracing.say(span, {"privmix.tokens": count})
            grant = self._opened().lease(from_json(event), count, lease)
            self._metrics.granted(self._opened())
            return grant

    @ray.method(concurrency_group="writes")  # type: ignore[untyped-decorator]
    def settle(self, lease: str, used: int) -> None:
        """See `Ledger.settle`."""
        self._opened().settle(lease, used)

    @ray.method(concurrency_group="writes")  # type: ignore[untyped-decorator]
    def charge(self, event: str, tokens: Sequence[Sequence[float]], charge: str, trace: str | None = None) -> int:
        """See `Ledger.charge`."""
        with tracing.span("budget.charge", trace) as span:
            tracing.say(span, {"privmix.tokens": len(tokens)})
            granted = self._opened().charge(from_json(event), tokens, charge)
            self._metrics.granted(self._opened())
            return granted

    def stopped(self) -> bool:
        """Whether nothing private is released any more (`Ledger.charge`)."""
        return self._opened().balance().stopped

    @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
    def health(self) -> LedgerHealth:
        """Whether a token could be charged now: "writable", or why not.

        "fenced": another deployment has the ledger, or it was moved. "unavailable": the
        database does not answer, or what it holds is no ledger of this budget.
        """
        try:
            self._opened().check()
        except (Fenced, LedgerMoved):
            return "fenced"
        except LedgerError:
            return "unavailable"
        return "writable"

    @ray.method(concurrency_group="statements")  # type: ignore[untyped-decorator]
    def statement(self, event: str | None = None) -> Statement:
        """What clients may know; what is left is counted in tokens of `event`, by default the one leased last."""
        return self._stated(event).client()

    @ray.method(concurrency_group="statements")  # type: ignore[untyped-decorator]
    def operator_statement(self, event: str | None = None) -> OperatorStatement:
        """Everything there is to know."""
        return self._stated(event)

    def release(self) -> None:
        """See `Ledger.release`."""
        self._opened().release()

    def _watch(self) -> None:
        """Tell other deployments for ever that this one lives, and check the ledger, for the alerts."""
        while True:
            try:
                self._metrics.checked(self.health())
                self._opened().beat()
            except Exception as error:  # whatever fails, the next beat is tried
                _log.warning("the ledger was not reached: %s", type(error).__name__)
            time.sleep(WATCH_S)

    def _stated(self, event: str | None) -> OperatorStatement:
        """The statement, composed once for each last row."""
        balance = self._opened().balance()
        if self._composed[:2] != (balance.head, event):
            self._composed = balance.head, event, statement(balance, from_json(event) if event else None)
        composed: OperatorStatement = self._composed[2]
        return composed

    def _opened(self) -> Ledger:
        with self._opening:
            if self._ledger is None:
                self._ledger = Ledger(
                    self._where, self._terms, create=self._create, identity=self._identity, holder=self._holder
                )
                _log.info("ledger %s: %d rows", self._ledger.name, self._ledger.balance().rows)
            return self._ledger


def start(
    ledger: str,
    terms: PrivacyBudget,
    *,
    namespace: str,
    name: str = NAME,
    create: bool = True,
    identity: str | None = None,
    lifetime: Literal["detached"] | None = None,
) -> ActorHandle:
    """Starts the budget actor under a name (coordinators find it with `ray.get_actor`) and waits for its ledger.

    Args:
        create: make the ledger where there is none.
        identity: the id of the ledger that must be there; None accepts any.

    Raises:
        LedgerError: the ledger cannot be used; no actor is left behind.
        ValueError: the name is taken in this namespace.
    """
    actor = Budget.options(name=name, namespace=namespace, lifetime=lifetime).remote(  # type: ignore[attr-defined]
        ledger, terms, create, identity, uuid4().hex
    )
    try:
        ray.get(actor.ready.remote())
    except LedgerError as error:
        ray.kill(actor)
        raise getattr(error, "cause", error) from None  # Ray's own class quotes a traceback in its message
    return actor
