"""Plans the protocol and the privacy budget of a deployment from its configuration."""

import math
from dataclasses import dataclass

from privmix.budget.filter import UNLIMITED, Filter, cost, counted
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.budget.sentence import promise_sentence
from privmix.foundation.errors import ConfigurationError, LedgerMissing
from privmix.privacy import accounting
from privmix.privacy.protocol import Protocol
from privmix.privacy.settings import Settings, WhenExhausted
from privmix.training.manifest import Manifest
from privmix_cluster.configuration import Configuration
from privmix_cluster.topology import parts_served


@dataclass(frozen=True)
class Promise:
    """Holds the initial protocol, its settings, the ledger's budget, and the behaviour when the budget is used up."""

    settings: Settings
    protocol: Protocol
    terms: PrivacyBudget
    when_exhausted: WhenExhausted

    @property
    def sentence(self) -> str:
        """The guarantee of the budget, for the tokens of the protocol, in one sentence."""
        limited = self.terms.enforced == "bound" and self.terms.epsilon is not None
        tokens = Filter(self.terms).affordable({}, self.protocol.event) if limited else UNLIMITED
        return promise_sentence(self.terms, self.protocol.guarantee, None if tokens == UNLIMITED else tokens)


def promise(configuration: Configuration, manifest: Manifest) -> Promise:
    """Plans the ensemble's protocol for the configured budget.

    The Rényi order and the counter of a ledger never change: chosen after tokens were seen, they would void the
    guarantee.

    Raises:
        ConfigurationError: the settings are invalid or cannot meet the budget.
        LedgerError: the ledger exists but cannot be read.
    """
    kept = _kept(configuration.budget.ledger)
    accountant = None if kept is None else kept.accountant
    try:
        base = None if manifest.private_base is None else manifest.private_base.training.event
        settings = configuration.privacy.for_training(manifest.dp_sgd).on_base(base)
        protocol = settings.plan(parts_served(configuration, manifest), accountant)
        terms = PrivacyBudget.of(
            manifest.ensemble,
            settings,
            protocol,
            accountant,
            base=base,
            imported=manifest.imported,
            partition=manifest.partition,
            parts=len(manifest.parts),
            counter=None if kept is None else kept.counter,
        )
        _check_base(terms)
        if terms.enforced == "bound" and terms.epsilon is not None and math.isinf(cost(protocol.event, terms.order)):
            raise ValueError(f"protocol: {protocol.name} has no bound at order {terms.order:g}, that of the ledger")
        terms = counted(terms, protocol.event, settings.planned) if kept is None else terms
        if terms.counter is not None:
            Filter(terms).affordable({}, protocol.event)  # raises if the ledger's counter has no price for this event
    except ValueError as error:
        raise ConfigurationError(f"privacy: {error}") from error
    return Promise(settings, protocol, terms, _when_exhausted(configuration, settings, terms))


def _check_base(terms: PrivacyBudget) -> None:
    """Raises ValueError if the private base alone costs more than the budget."""
    cost = Filter(terms).epsilon({})
    if terms.base is not None and terms.epsilon is not None and cost > terms.epsilon:
        raise ValueError(
            f"epsilon: the private base alone cost {accounting.shown(cost, 4)} at delta {terms.delta:g}, which is more "
            f"than {accounting.stated(terms.epsilon)}; raise epsilon, or train a base with less"
        )


def _when_exhausted(configuration: Configuration, settings: Settings, terms: PrivacyBudget) -> WhenExhausted:
    chosen = configuration.budget.when_exhausted
    if chosen == "base" and terms.base is None:
        raise ConfigurationError(
            "budget.when_exhausted: base answers with the private base, and this ensemble is on a public model; choose "
            "refuse or public, or train it with --base"
        )
    if chosen == "public" and terms.base is not None:
        raise ConfigurationError(
            "budget.when_exhausted: public would answer with the private base, because this ensemble was trained on "
            "it; choose base, or refuse"
        )
    return chosen or ("base" if terms.base is not None else settings.when_exhausted)


def _kept(ledger: str) -> PrivacyBudget | None:
    try:
        return read(ledger).terms
    except LedgerMissing:
        return None
