"""Every protocol by its name."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.privacy.protocols.adapmixed import AdaPMixedSettings
from services.privacy.protocols.dp_sgd import DpSgdSettings
from services.privacy.protocols.ensemble import EnsembleSettings
from services.privacy.protocols.exponential import ExponentialSettings
from services.privacy.protocols.finetuned import FinetunedSettings
from services.privacy.protocols.gnmax import GNMaxSettings
from services.privacy.protocols.pmixed import PMixedSettings
from services.privacy.protocols.public import PublicSettings
from services.privacy.protocols.submix import SubMixSettings
from services.privacy.protocols.subsample_aggregate import SubsampleAggregateSettings
from services.privacy.settings import Settings

DEFAULT = "pmixed"
PROTOCOLS: Mapping[str, type[Settings]] = {
    settings.model_fields["protocol"].default: settings
    for settings in (
        PMixedSettings,
        AdaPMixedSettings,
        SubMixSettings,
        ExponentialSettings,
        GNMaxSettings,
        SubsampleAggregateSettings,
        DpSgdSettings,
        PublicSettings,
        FinetunedSettings,
        EnsembleSettings,
    )
}


def audited(parts: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every protocol, and each of its variants, that certifies what a token of ``parts`` parts costs.

    Without those that read no part, and those whose cost is that of a training, which no token shows.
    """
    for name, settings in PROTOCOLS.items():
        for parameters in ({}, *settings.variants):
            chosen = settings.model_validate(parameters)
            if settings.one_model:
                continue
            protocol = chosen.plan(parts)
            if protocol.guarantee.status == "certified" and protocol.rows != 0:
                yield name, parameters


def name_of(choice: object) -> object:
    """The protocol that settings, or the mapping they are made from, are for."""
    if isinstance(choice, Mapping):
        return choice.get("protocol", DEFAULT)
    return getattr(choice, "protocol", None)
