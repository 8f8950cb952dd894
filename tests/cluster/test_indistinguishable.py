"""Claim: on a running service, a token's log-likelihood ratio with and without a part is within the bound.

An ensemble of one part answers over HTTP until its budget is exhausted; then the public model answers, which is the
ensemble without the part. With top_k 2, the distribution of an answer is one number, which counts estimate.
"""

from collections import Counter
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from shutil import copytree

import httpx
import pytest
from scipy.stats import beta
from transformers import AutoTokenizer

from privmix.engine.engine import PUBLIC, EngineSettings, Request, create
from privmix.privacy.accounting import planning
from privmix.privacy.mollifiers.shaping import SamplingOptions, shape
from privmix.privacy.protocols.pmixed import PMixed, RatioEvent
from privmix.training.manifest import Manifest
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, running

RADIUS = 1.0
"""The claimed radius: the largest log-likelihood ratio of a token between any one part and none."""
SAMPLES = 4096
BATCH = {"n": 8, "prompts": 16}
TEMPERATURE = 0.3
CONFIDENCE = 1 - 1e-6
"""The confidence of each of the four bounds. A sound service fails this test once in hundreds of thousands of runs."""
WORDS = ("The", "My", "In the end", "Once", "He said", "We are", "This is", "There was", "Please", "The weather is")
PROMPTS = [f"{first} {second}" for first in WORDS for second in ("very", "one of", "to", "a", "not", "and")]


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def prompt(ensemble: Path, public_model: Path) -> str:
    """The prompt with the largest difference between the broken and the sound service for this number of answers."""
    manifest = Manifest.load(ensemble)
    adapters = {part.name: ensemble / part.path for part in manifest.parts}
    engine = create(EngineSettings(public_model, "transformers", "float32", 64, adapters=adapters))
    tokenizer = AutoTokenizer.from_pretrained(public_model)
    names = (PUBLIC, *adapters)
    rows = engine.next_token([Request(text, tuple(tokenizer(text)["input_ids"]), names) for text in PROMPTS])
    answers = shape(rows[::2], rows[1::2], [(0,)] * len(PROMPTS), SamplingOptions(TEMPERATURE, top_k=2))
    weights = PMixed(1, 1.0, 2 * RADIUS).distribution(answers).weights.double()
    kept = answers.public > 0
    present = (weights / weights.sum(dim=1, keepdim=True))[kept].view(-1, 2)
    evidence = [
        largest_loss(expected(ours), expected(theirs))
        for ours, theirs in zip(present.tolist(), answers.public[kept].view(-1, 2).tolist(), strict=True)
    ]
    assert max(evidence) > RADIUS + 0.4, "no prompt distinguishes the broken service from the sound one"
    return PROMPTS[evidence.index(max(evidence))]


def expected(chances: Sequence[float]) -> Counter[str]:
    return Counter({text: round(SAMPLES * chance) for text, chance in zip("ab", chances, strict=True)})


def sample(service: RunningService, prompt: str) -> tuple[Counter[str], Counter[str]]:
    """Counts first tokens of answers: with the ensemble, while the budget lasts, and then without it."""
    present, absent = Counter[str](), Counter[str]()
    body = {
        "model": "privmix",
        "prompt": [prompt] * BATCH["prompts"],
        "n": BATCH["n"],
        "max_tokens": 1,
        "temperature": TEMPERATURE,
        "top_k": 2,
    }
    while absent.total() < SAMPLES:
        answer = httpx.post(f"{service.base_url}/v1/completions", json=body, timeout=300).raise_for_status().json()
        texts = [choice["text"] for choice in answer["choices"]]
        match answer.get("privmix", {}).get("answered_by"):
            case None:
                present.update(texts)
            case "public":
                absent.update(texts)
    return present, absent


def largest_loss(present: Counter[str], absent: Counter[str]) -> float:
    """Bounds the largest log-likelihood ratio between the two from below, with Clopper-Pearson on both sides."""
    assert len({*present, *absent}) == 2, "top_k is 2"
    losses = [
        log(_bounds(ours[text], ours.total())[0] / _bounds(theirs[text], theirs.total())[1])
        for ours, theirs in ((present, absent), (absent, present))
        for text in {*present, *absent}
        if ours[text]
    ]
    return max(losses)


def _bounds(count: int, total: int) -> tuple[float, float]:
    low = beta.ppf(1 - CONFIDENCE, count, total - count + 1) if count else 0.0
    high = beta.ppf(CONFIDENCE, count + 1, total - count) if count < total else 1.0
    return float(low), float(high)


@pytest.fixture(scope="module")
def answered(
    ensemble: Path, prompt: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Counter[str], Counter[str]]:
    """The answers of a service with a mollifier at twice `RADIUS` and a budget for the counted tokens."""
    folder = tmp_path_factory.mktemp("served")
    epsilon = planning.cost(RatioEvent(1, 1.0, 2 * RADIUS), SAMPLES, 1e-5).epsilon_rdp
    privacy = {"q": 1.0, "radius": 2 * RADIUS, "epsilon": epsilon * (1 + 1e-9), "tokens": SAMPLES}
    budget = {"ledger": "ledger.db", "lease_tokens": 64, "when_exhausted": "public"}
    engine = {"dtype": "float32", "context_length": 512, "cache_gib": 1}
    config = configure(folder, copytree(ensemble, folder / "ensemble"), privacy=privacy, budget=budget, engine=engine)
    with running(config) as service:
        return sample(service, prompt)


@pytest.mark.slow
def test_no_token_exceeds_the_claim(answered: tuple[Counter[str], Counter[str]]) -> None:
    assert answered[0].total() >= SAMPLES - BATCH["n"] * BATCH["prompts"]
    assert largest_loss(*answered) <= 2 * RADIUS


@pytest.mark.slow
def test_a_mollifier_at_twice_the_claimed_radius_is_detected(answered: tuple[Counter[str], Counter[str]]) -> None:
    assert largest_loss(*answered) > RADIUS


def test_the_check_itself_is_correct() -> None:
    fair = expected((0.5, 0.5))
    assert largest_loss(fair, fair) < 0
    assert largest_loss(expected((0.5 * exp(-RADIUS), 1 - 0.5 * exp(-RADIUS))), fair) < RADIUS
    assert largest_loss(expected((0.5 * exp(-2 * RADIUS), 1 - 0.5 * exp(-2 * RADIUS))), fair) > RADIUS
