"""Claim: an audit over HTTP of services with several parts confirms a true claim and refutes a false one.

Two real services answer for the ensembles of `privmix audit plant`, trained with and without one user's text. The bound
is wrong once in a million audits, and there are enough tokens to detect a false claim reliably.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from privmix.laboratory.audit import adjacent, black_box
from privmix.laboratory.audit.adjacent import DistinguishingPrompt
from privmix.laboratory.audit.black_box import ServiceAnswers
from privmix.laboratory.audit.sizes import AdjacentSize
from privmix.privacy.accounting import planning
from privmix.privacy.protocols.pmixed import RatioEvent
from tests.running import configure, own_ensemble, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PARTS, RADIUS, COUNT = 3, 2.0, 4096
SERVED = RatioEvent(PARTS, 1.0, RADIUS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adjacent")


@pytest.fixture(scope="module")
def planted(directory: Path) -> DistinguishingPrompt:
    return adjacent.plant(directory, AdjacentSize(parts=PARTS))


@pytest.fixture(scope="module")
def answers(directory: Path, planted: DistinguishingPrompt) -> Iterator[tuple[ServiceAnswers, ServiceAnswers]]:
    """The answers of the two services, which run one after the other."""
    epsilon = planning.cost(SERVED, COUNT, 1e-5).epsilon_rdp
    privacy = {"q": 1.0, "radius": RADIUS, "epsilon": epsilon * (1 + 1e-9), "tokens": COUNT}
    collected = []
    for world in (adjacent.WITH, adjacent.WITHOUT):
        folder = directory / f"served-{world}"
        folder.mkdir()
        engine = {"dtype": "float32", "context_length": 512, "cache_gib": 1}
        config = configure(folder, own_ensemble(directory / world, folder), privacy=privacy, engine=engine)
        with running(config) as service:
            collected.append(black_box.collect_answers(service.base_url, planted.prompt, COUNT, None))
            assert service.privacy()["tokens_charged"] >= COUNT
    yield (collected[0], collected[1])


def test_the_claim_of_a_service_with_several_parts_holds(answers: tuple[ServiceAnswers, ServiceAnswers]) -> None:
    assert answers[0].event == answers[1].event == SERVED
    finding = black_box.audit(*answers, 0.95)
    assert finding.verdict == "holds", finding.record()
    assert 0.4 * finding.claim < finding.lower, "the attack has no strength"


@pytest.mark.parametrize("claimed", [RatioEvent(PARTS, 1.0, 0.4 * RADIUS), RatioEvent(16 * PARTS, 1.0, RADIUS)])
def test_a_claim_of_a_smaller_radius_or_of_more_parts_is_detected(
    answers: tuple[ServiceAnswers, ServiceAnswers], claimed: RatioEvent
) -> None:
    assert black_box.audit(replace(answers[0], event=claimed), answers[1], 0.95).verdict == "broken"
