"""Claim: shadow ensembles are trained once, kept, and attacked; what was not trained is not made up."""

from pathlib import Path

import pytest

from services.audit.report.sections import Subject, membership_section
from services.audit.worlds.shadow_ensembles import Size, ask, train_shadows
from services.errors import InputError
from services.privacy.protocols.ensemble import Ensemble
from services.privacy.protocols.submix import SubMix
from tests.displays import Recorder


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_shadow_ensembles_are_trained_kept_and_attacked(tmp_path: Path) -> None:
    size, first, halved, again = Size(users=6, shadows=3, parts=1), Recorder(), Recorder(), Recorder()
    train_shadows(tmp_path, size, display=first)
    with pytest.raises(InputError, match="half-parts"):
        ask(tmp_path, size, 32).models(0, SubMix(1, 2.0, 0.1))
    train_shadows(tmp_path, size, halves=True, display=halved)
    train_shadows(tmp_path, size, display=again)
    assert (len(first.shown), len(halved.shown), len(again.shown)) == (3, 6, 0)
    with pytest.raises(InputError, match=r"shadows: .* was begun with 3, not 4"):
        train_shadows(tmp_path, Size(users=6, shadows=4, parts=1))
    shadows = ask(tmp_path, size, 32)
    assert shadows.included.shape == (3, 6)
    assert [*shadows.models(1, Ensemble(1)), *shadows.models(1, SubMix(1, 2.0, 0.1))] == [3, 4, 5]
    section = membership_section(shadows, [], 1e-5, 1, lambda _: None)
    assert [row["mechanism"] for row in section.rows] == ["ensemble, without privacy"]
    subject = Subject("again", Ensemble(1), 64, 2.0)
    section = membership_section(shadows, [subject], 1e-5, 1, lambda _: None)
    assert [row["mechanism"] for row in section.rows][1:] == ["ensemble, 64 of its tokens", "again, epsilon 2"]
