"""Describes ensembles to gateways, as a deployment does."""

from pathlib import Path
from typing import Any

from privmix.budget import actor as budget
from privmix.coordinator.settings import StepSettings
from privmix.fleet import fleet
from privmix.gateway.settings import ServedEnsemble


def served(*names: str, model: Path, **changes: Any) -> ServedEnsemble:
    """Returns an ensemble with one coordinator, whose limits are the defaults of the configuration."""
    limits = StepSettings()
    values = {
        "names": names,
        "namespace": names[0],
        "model": model,
        "context_length": 512,
        "coordinators": ("coordinator",),
        "budget": budget.NAME,
        "fleet": fleet.NAME,
        "capacity": limits.max_live,
        "max_waiting": limits.max_waiting,
        "recovery_s": limits.recovery_s,
        "stall_timeout_s": limits.recovery_s + 2 * limits.step_timeout_s,
    }
    return ServedEnsemble(**{**values, **changes})
