"""Registers every protocol under its name in configuration and commands. A new protocol is a file and a line here."""

from collections.abc import Mapping
from pkgutil import resolve_name

from privmix.privacy.settings import Settings

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


def name_of(choice: object) -> object:
    """Returns the protocol's name in settings, or in the mapping from which settings are created."""
    if isinstance(choice, Mapping):
        return choice.get("protocol", DEFAULT)
    return getattr(choice, "protocol", None)
