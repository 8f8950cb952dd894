"""Claim: text that tells who was in the corpus breaks the claim of its card, and other text does not."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import write_lines
from privmix.foundation.progress import Display
from privmix.generation.card import CARD
from privmix.generation.job import OUTPUT
from privmix.laboratory.audit.canaries import Canary
from privmix.laboratory.audit.released_text import ReleasedTexts, audit, read_released, score, train_on
from privmix.laboratory.audit.testbed import planted
from privmix.privacy.arrays import Reals

CANARIES = tuple(Canary(f"user {i}", "My number is ", f"{i:06d}", i % 2 == 0) for i in range(40))
INCLUDED = np.array([canary.included for canary in CANARIES], dtype=np.float64)
GUARANTEE = "Against an observer, (8, 1e-05)-differential privacy for any one user's text: certified (Mironov 2017)"
TEXTS = ReleasedTexts("texts", ("a text",), epsilon=0.5, delta=1e-9, status="certified")


def test_text_that_tells_every_coin_breaks_a_small_claim() -> None:
    found = audit(TEXTS, CANARIES, INCLUDED, 0.95, 40)
    assert found.details["correct"] == 40
    assert found.verdict == "broken"
    assert found.claim == 0.5 < found.certain
    assert found.details["area"] == 1


def test_text_that_tells_nothing_breaks_no_claim() -> None:
    blind: Reals = (np.arange(40) // 2 % 2).astype(np.float64)  # right for every other pair of coins
    found = audit(TEXTS, CANARIES, blind, 0.95, 40)
    assert found.details["correct"] == 20
    assert (found.verdict, found.lower, found.details["area"]) == ("holds", 0, 0.5)


def test_text_without_a_card_claims_nothing() -> None:
    found = audit(ReleasedTexts("texts", ("a text",)), CANARIES, INCLUDED, 0.95, 40)
    assert found.verdict == "no claim"


def job(directory: Path, epsilon: float | None, texts: list[str]) -> Path:
    directory.mkdir()
    write_lines(directory / OUTPUT, ({"text": text} for text in texts))
    (directory / CARD).write_text(json.dumps({"epsilon": epsilon, "delta": 1e-5, "guarantee": GUARANTEE}))
    return directory


def test_a_job_has_the_claim_of_its_card(tmp_path: Path) -> None:
    read = read_released(job(tmp_path / "job", 8.0, ["one", "two"]))
    assert read == ReleasedTexts("job", ("one", "two"), 8.0, 1e-5, "certified")
    assert read_released(job(tmp_path / "free", None, ["one"])).epsilon == math.inf


def test_a_job_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no text"):
        read_released(job(tmp_path / "job", 8.0, [" "]))


def test_a_job_without_its_card_and_a_missing_testbed_are_refused(tmp_path: Path) -> None:
    broken = job(tmp_path / "job", 8.0, ["one"])
    (broken / CARD).unlink()
    with pytest.raises(InputError, match=CARD):
        read_released(broken)
    with pytest.raises(InputError, match="privmix audit extraction"):
        planted(tmp_path)


@pytest.mark.slow
def test_a_model_of_texts_with_secrets_finds_them(tmp_path: Path) -> None:
    """The texts repeat the secrets of the included users, as a service without privacy could.

    No chance decides: the texts are fixed, and so is the seed of the training.
    """
    canaries = CANARIES[:8]
    texts = [canary.text for canary in canaries if canary.included] * 24
    trained = train_on(ReleasedTexts("leak", tuple(texts)), tmp_path, Display())
    (added,) = score([trained], canaries)
    included = np.array([canary.included for canary in canaries])
    assert added[included].min() > added[~included].max()
