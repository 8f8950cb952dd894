"""Claim: the baseline of a job is a public model's, also of an ensemble on a private base."""

from pathlib import Path

import pytest

from privmix.foundation.errors import InputError
from privmix.generation.baseline import baseline_model
from privmix.training.public_model import resolve, revision
from tests.tiny import write_tiny_base, write_tiny_model


def test_it_is_the_named_model_or_the_one_of_the_ensemble(tmp_path: Path) -> None:
    for name in ("named", "own"):
        write_tiny_model(tmp_path / name)
    named, own = (str(tmp_path / name) for name in ("named", "own"))
    assert baseline_model(named, own) == tmp_path / "named"
    assert baseline_model(None, own) == tmp_path / "own"
    assert baseline_model(None, None) == resolve()


def test_below_a_private_base_it_is_the_public_model_that_the_base_was_made_from(tmp_path: Path) -> None:
    base = str(write_tiny_base(tmp_path / "base", revision(resolve())))
    assert baseline_model(None, base) == resolve()


def test_a_private_base_is_no_public_model(tmp_path: Path) -> None:
    base = str(write_tiny_base(tmp_path / "base", revision(resolve())))
    with pytest.raises(InputError, match=r"public-model: .*/base was trained on private text"):
        baseline_model(base, None)
    other = str(write_tiny_base(tmp_path / "other", "3" * 64))
    with pytest.raises(InputError, match="name the public model that it came from"):
        baseline_model(None, other)
