"""Every protocol by its name."""

from collections.abc import Mapping

from services.privacy.adapmixed import AdaPMixedSettings
from services.privacy.dp_sgd import DpSgdSettings
from services.privacy.exponential import ExponentialSettings
from services.privacy.gnmax import GNMaxSettings
from services.privacy.pmixed import PMixedSettings
from services.privacy.references import EnsembleSettings, FinetunedSettings, PublicSettings
from services.privacy.settings import Settings
from services.privacy.submix import SubMixSettings
from services.privacy.subsample_aggregate import SubsampleAggregateSettings

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


def name_of(choice: object) -> object:
    """The protocol that settings, or the mapping they are made from, are for."""
    if isinstance(choice, Mapping):
        return choice.get("protocol", DEFAULT)
    return getattr(choice, "protocol", None)
