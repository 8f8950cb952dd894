"""Plans the protocol and the privacy budget of a deployment from its configuration."""

import math
from dataclasses import dataclass
from typing import Literal

from cluster.configuration import ConfigurationError, EnsembleConfiguration
from cluster.topology import parts_served
from services.budget.errors import LedgerMissing
from services.budget.filter import UNLIMITED, Filter, cost
from services.budget.privacy_budget import PrivacyBudget
from services.budget.reader import read
from services.budget.statement import promise_sentence
from services.privacy.protocol import Protocol
from services.privacy.settings import Settings
from services.training.manifest import Manifest


@dataclass(frozen=True)
class Promise:
    """Holds the initial protocol, its settings, the ledger's budget, and the behaviour when the budget is used up."""

    settings: Settings
    protocol: Protocol
    terms: PrivacyBudget
    when_exhausted: Literal["refuse", "public"]

    @property
    def sentence(self) -> str:
        """The guarantee in one sentence."""
        return sentence(self.terms, self.protocol)


def promise(configuration: EnsembleConfiguration, manifest: Manifest) -> Promise:
    """Plans the ensemble's protocol for the configured budget.

    The Rényi order of a ledger never changes: an order chosen after tokens were seen would void the guarantee.

    Raises:
        ConfigurationError: the settings are invalid or cannot meet the budget.
        LedgerError: the ledger exists but cannot be read.
    """
    order = _order_of(configuration.budget.ledger)
    try:
        settings = configuration.privacy.for_training(manifest.dp_sgd)
        protocol = settings.plan(parts_served(configuration, manifest), order)
        terms = PrivacyBudget.of(manifest.ensemble, settings, protocol, order)
        if terms.enforced == "bound" and terms.epsilon is not None and math.isinf(cost(protocol.event, terms.order)):
            raise ValueError(f"protocol: {protocol.name} has no bound at order {terms.order:g}, that of the ledger")
    except ValueError as error:
        raise ConfigurationError(f"privacy: {error}") from error
    return Promise(settings, protocol, terms, configuration.budget.when_exhausted or settings.when_exhausted)


def sentence(terms: PrivacyBudget, protocol: Protocol) -> str:
    """Returns the guarantee of this budget for the tokens of this protocol."""
    limited = terms.enforced == "bound" and terms.epsilon is not None
    tokens = Filter(terms).affordable({}, protocol.event) if limited else UNLIMITED
    return promise_sentence(terms, protocol.guarantee, None if tokens == UNLIMITED else tokens)


def _order_of(ledger: str) -> float | None:
    try:
        return read(ledger).terms.order
    except LedgerMissing:
        return None
