"""Registers every protocol under its name in configuration and commands. A new protocol is a file and a line here."""

from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from services.privacy.settings import Settings

DEFAULT = "pmixed"
_SETTINGS = {
    "pmixed": "pmixed:PMixedSettings",
    "adapmixed": "adapmixed:AdaPMixedSettings",
    "submix": "submix:SubMixSettings",
    "exponential": "exponential:ExponentialSettings",
    "individual": "individual:IndividualSettings",
    "gnmax": "gnmax:GNMaxSettings",
    "subsample-aggregate": "subsample_aggregate:SubsampleAggregateSettings",
    "dp-sgd": "dp_sgd:DpSgdSettings",
    "public": "public:PublicSettings",
    "finetuned": "finetuned:FinetunedSettings",
    "ensemble": "ensemble:EnsembleSettings",
}
PROTOCOLS: Mapping[str, type[Settings]] = {
    name: resolve_name(f"{__name__}.{where}") for name, where in _SETTINGS.items()
}


def audited(parts: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each protocol and variant that certifies the cost of a token of ``parts`` parts, with its parameters.

    Leaves out protocols that read no part, and those whose cost is that of a training, which no token shows.
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
    """Returns the protocol's name in settings, or in the mapping from which settings are created."""
    if isinstance(choice, Mapping):
        return choice.get("protocol", DEFAULT)
    return getattr(choice, "protocol", None)
