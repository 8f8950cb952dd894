"""Claim: an audit over HTTP of services with several parts finds a kept promise kept, and a broken promise broken.

Two real services answer, of ensembles trained by `privmix audit plant` with and without one user's text. A bound errs
once in a million audits, and the tokens are so many that a broken promise is caught for certain.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.audit.attacks import black_box
from services.audit.attacks.black_box import Asked
from services.audit.worlds import adjacent
from services.audit.worlds.adjacent import Adjacent, Size
from services.privacy.accounting import planning
from services.privacy.protocols.pmixed import RatioEvent
from tests.running import configure, own_ensemble, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PARTS, RADIUS, COUNT = 3, 2.0, 4096
SERVED = RatioEvent(PARTS, 1.0, RADIUS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adjacent")


@pytest.fixture(scope="module")
def planted(directory: Path) -> Adjacent:
    return adjacent.plant(directory, Size(PARTS))


@pytest.fixture(scope="module")
def asked(directory: Path, planted: Adjacent) -> Iterator[tuple[Asked, Asked]]:
    """By two services, one after the other."""
    epsilon = planning.cost(SERVED, COUNT, 1e-5).epsilon_rdp
    privacy = {"q": 1.0, "radius": RADIUS, "epsilon": epsilon * (1 + 1e-9), "tokens": COUNT}
    answers = []
    for world in (adjacent.WITH, adjacent.WITHOUT):
        folder = directory / f"served-{world}"
        folder.mkdir()
        engine = {"dtype": "float32", "context_length": 512, "cache_gib": 1}
        config = configure(folder, own_ensemble(directory / world, folder), privacy=privacy, engine=engine)
        with running(config) as service:
            answers.append(black_box.ask(service.base_url, black_box.Question(planted.question.prompt), COUNT, None))
            assert service.privacy()["tokens_charged"] >= COUNT
    yield (answers[0], answers[1])


def test_the_user_is_learnt_by_one_part_alone(planted: Adjacent) -> None:
    present, absent = planted.shares[adjacent.WITH], planted.shares[adjacent.WITHOUT]
    assert present[-1] > 0.8 > 0.2 > absent[-1]
    assert max(*present[:-1], *absent[:-1]) < 0.1


def test_a_service_of_several_parts_keeps_its_promise(asked: tuple[Asked, Asked]) -> None:
    assert asked[0].event == asked[1].event == SERVED
    finding = black_box.audit(*asked, 0.95)
    assert finding.verdict == "holds", finding.sentence
    assert 0.4 * finding.claim < finding.lower, "the attack has no strength"


def test_a_larger_radius_than_is_claimed_is_caught(asked: tuple[Asked, Asked]) -> None:
    claimed = replace(asked[0], event=RatioEvent(PARTS, 1.0, 0.4 * RADIUS))
    assert black_box.audit(claimed, asked[1], 0.95).verdict == "broken"


def test_a_claim_of_more_parts_than_there_are_is_caught(asked: tuple[Asked, Asked]) -> None:
    """As if every token were paid for by an ensemble of 48."""
    claimed = replace(asked[0], event=RatioEvent(16 * PARTS, 1.0, RADIUS))
    assert black_box.audit(claimed, asked[1], 0.95).verdict == "broken"
