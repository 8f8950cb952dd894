"""Claim: shadow ensembles are trained once, kept and attacked; an audit refuses to use models that are not trained."""

from pathlib import Path

import pytest

from privmix.foundation.errors import InputError
from privmix.laboratory.audit.report.sections import Subject, membership_section
from privmix.laboratory.audit.worlds.shadow_ensembles import evaluate_shadows, train_shadows
from privmix.laboratory.audit.worlds.sizes import ShadowSize
from privmix.privacy.protocols.ensemble import Ensemble
from privmix.privacy.protocols.submix import SubMix
from tests.displays import Recorder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shadow_ensembles_are_trained_kept_and_attacked(tmp_path: Path) -> None:
    """No chance decides: it checks what is trained, kept and named, and no number that an attack finds."""
    size, first, halved, repeated = ShadowSize(users=6, shadows=3, parts=1), Recorder(), Recorder(), Recorder()
    train_shadows(tmp_path, size, display=first)
    with pytest.raises(InputError, match="half-parts"):
        evaluate_shadows(tmp_path, size, 32).models(0, SubMix(1, 2.0, 0.1))
    train_shadows(tmp_path, size, halves=True, display=halved)
    train_shadows(tmp_path, size, display=repeated)
    assert (len(first.shown), len(halved.shown), len(repeated.shown)) == (3, 6, 0)
    with pytest.raises(InputError, match=r"shadows: .* was created with 3, not 4"):
        train_shadows(tmp_path, ShadowSize(users=6, shadows=4, parts=1))
    shadows = evaluate_shadows(tmp_path, size, 32)
    assert shadows.included.shape == (3, 6)
    assert [*shadows.models(1, Ensemble(1)), *shadows.models(1, SubMix(1, 2.0, 0.1))] == [3, 4, 5]
    section = membership_section(shadows, [], 1, lambda _: None)
    assert [row["mechanism"] for row in section.rows] == ["ensemble, without privacy"]
    subject = Subject("subject", Ensemble(1), 64, 2.0)
    section = membership_section(shadows, [subject], 1, lambda _: None)
    assert [row["mechanism"] for row in section.rows][1:] == ["ensemble, 64 of its tokens", "subject, epsilon 2"]
