"""Claim: the fleet does not plan again what the command has planned."""

import pytest

from privmix.fleet.fleet import FleetSettings
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings
from tests.services.fleet.plans import SETTINGS


def test_only_another_number_of_parts_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, fewer = SETTINGS.plan(3), SETTINGS.plan(2)
    asked: list[int] = []

    def plan(self: PMixedSettings, parts: int, kept: object) -> PMixed:
        asked.append(parts)
        return fewer

    monkeypatch.setattr(PMixedSettings, "plan", plan)
    settings = FleetSettings("namespace", (), SETTINGS, None, (), planned=planned)
    assert settings.protocol(3) is planned
    assert asked == []
    assert settings.protocol(2) is fewer
    assert asked == [2]
