"""Claim: the extraction attack gets planted secrets from models without privacy, and privacy protects them."""

import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from privmix.foundation.errors import InputError
from privmix.laboratory.audit import canaries, extraction, testbed
from privmix.laboratory.audit.bounds import correct_guesses
from privmix.laboratory.audit.canaries import CORPUS, Canary, plant, read
from privmix.laboratory.audit.local_models import ModelOutput, read_outputs
from privmix.laboratory.audit.sizes import PlantedSize
from privmix.laboratory.audit.testbed import evaluate_testbed, train_testbed
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.ensemble import EnsembleSettings
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.public import PublicSettings
from privmix.privacy.settings import Settings
from privmix.training.corpus import Corpus

DIGITS, KEPT = 6, 12
CONFIDENT = 6.0


def outputs_on(canary: Canary, parts: int, knows: int | None) -> ModelOutput:
    """Returns the outputs of models with uniform distributions, except the model ``knows``, which knows the secret."""
    wanted = torch.tensor([int(digit) for digit in canary.secret])
    models = torch.zeros(parts, len(wanted), KEPT)
    if knows is not None:
        models[knows, torch.arange(len(wanted)), wanted] = CONFIDENT
    return ModelOutput(torch.zeros(len(wanted), KEPT).log_softmax(1), models.log_softmax(2), wanted)


CANARY = Canary("caller", "My number is ", "314159", True)


def attack(settings: Settings, outputs: ModelOutput, parts: int, attempts: int = 5) -> extraction.Extraction:
    models = {CANARY: range(parts)}
    protocol = settings.plan(parts)
    return extraction.attack("m", settings, protocol, {CANARY: outputs}, models, attempts=attempts, draws=8)


def test_the_hit_rate_is_the_chance_of_the_whole_secret() -> None:
    result = attack(EnsembleSettings(), outputs_on(CANARY, 1, 0), 1)
    digit = math.exp(CONFIDENT) / (math.exp(CONFIDENT) + KEPT - 1)
    assert result.hit_rate == pytest.approx(1 - (1 - digit**DIGITS) ** 5, rel=1e-3)
    assert result.hits == pytest.approx(digit**DIGITS, rel=1e-3)
    assert result.log_chance == pytest.approx(DIGITS * math.log(digit), rel=1e-3)


def test_the_public_model_has_the_hit_rate_of_random_guesses() -> None:
    result = attack(PublicSettings(), outputs_on(CANARY, 1, 0), 1)
    assert result.hit_rate == pytest.approx(5 * KEPT**-DIGITS, rel=1e-3)
    assert result.epsilon == 0


def test_the_hit_rate_falls_with_epsilon() -> None:
    outputs = outputs_on(CANARY, 4, 1)
    rates = [attack(PMixedSettings(epsilon=epsilon, tokens=16), outputs, 4).hit_rate for epsilon in (1.0, 8.0, 64.0)]
    assert rates[0] < rates[1] < rates[2] < attack(EnsembleSettings(), outputs, 4).hit_rate


@pytest.mark.parametrize("name", [name for name, settings in PROTOCOLS.items() if not settings.one_model])
def test_every_protocol_has_a_chance_between_never_and_always(name: str) -> None:
    """Of parts that all know the secret, none makes it less likely than a guess."""
    chosen = PROTOCOLS[name]
    settings = chosen.model_validate({"epsilon": 1e4, "tokens": 64} if chosen.derived else {})
    protocol = settings.plan(2)
    models = [0] * protocol.models
    chance = extraction.log_chance(settings, protocol, outputs_on(CANARY, 1, 0), models, 4)
    assert chance <= 0
    assert name == "public" or chance > DIGITS * math.log(1 / KEPT)


def test_chances_are_averaged_over_the_draws_of_parts() -> None:
    """One of two parts is drawn for each token, and one of the two knows the secret."""
    settings = ExponentialSettings(epsilon=None, tokens=64, radius=6.0, sample=1)
    outputs = outputs_on(CANARY, 2, 0)

    def chance(models: list[int], draws: int) -> float:
        return math.exp(extraction.log_chance(settings, settings.plan(2), outputs, models, draws) / DIGITS)

    assert chance([0, 1], 500) == pytest.approx((chance([0, 0], 1) + chance([1, 1], 1)) / 2, abs=0.1)


def test_submix_is_attacked_through_its_models_of_half_parts() -> None:
    """Models: two of parts, one of the whole corpus, four of half-parts. Only two of half-parts know the secret."""
    answers = outputs_on(CANARY, 7, None)
    for half in (3, 4):
        answers.models[half] = outputs_on(CANARY, 1, 0).models[0]
    trained = testbed.Testbed(2, {CANARY: answers}, {CANARY: 0})
    subjects = [(name, PROTOCOLS[name].model_validate({"epsilon": 64.0, "tokens": 8})) for name in ("submix", "pmixed")]
    rows = {row.mechanism: row for row in extraction.attack_all(trained, subjects, attempts=10, draws=1)}
    assert rows["submix"].log_chance > rows["public model"].log_chance + 1
    assert rows["submix"].guarantee == "operational"
    assert rows["pmixed"].log_chance == pytest.approx(rows["public model"].log_chance, rel=1e-4)
    without = testbed.Testbed(2, {CANARY: ModelOutput(answers.public, answers.models[:3], answers.wanted)}, {CANARY: 0})
    with pytest.raises(InputError, match="audit extraction --protocol submix"):
        list(extraction.attack_all(without, subjects, attempts=10, draws=1))


def test_the_end_of_the_budget_ends_the_attack_if_the_cost_depends_on_the_text() -> None:
    """AdaPMixed as published leaks like the ensemble without privacy until its budget ends."""
    outputs = outputs_on(CANARY, 2, 0)

    def chance(epsilon: float) -> float:
        settings = PROTOCOLS["adapmixed"].model_validate({"mollifier": "renyi", "epsilon": epsilon, "tokens": 64})
        return extraction.log_chance(settings, settings.plan(2), outputs, range(2), 1)

    none, some, all_ = map(chance, (0.5, 6.0, 1000.0))
    assert none == pytest.approx(DIGITS * math.log(1 / KEPT), rel=1e-4), "the public model answers"
    assert none < some < all_


def test_an_attack_without_effect_is_too_weak() -> None:
    known = outputs_on(CANARY, 3, 0)
    everybody = ModelOutput(known.public, known.models[:1].expand(3, -1, -1), known.wanted)
    for outputs, strong in ((outputs_on(CANARY, 3, None), False), (everybody, True)):
        trained = testbed.Testbed(2, {CANARY: outputs}, {CANARY: 0})
        assert extraction.is_strong(list(extraction.attack_all(trained, [], attempts=10, draws=1))) == strong


def test_a_corpus_without_a_secret_is_refused() -> None:
    absent = Canary("caller", "My number is ", "314159", False)
    with pytest.raises(InputError, match="planted: the coins included no secret"):
        list(
            extraction.attack_all(
                testbed.Testbed(2, {absent: outputs_on(absent, 3, None)}, {absent: 0}), [], attempts=1, draws=1
            )
        )


def test_an_included_secret_is_in_the_corpus_with_the_stated_number_of_copies(tmp_path: Path) -> None:
    canaries = plant(tmp_path, users=10, planted=12, repetitions=3)
    texts = [document.text for document in Corpus(tmp_path / CORPUS)]
    assert len(canaries) == 12
    assert len({canary.secret for canary in canaries}) == 12
    for canary in canaries:
        assert sum(canary.secret in text for text in texts) == (3 if canary.included else 0)
    assert plant(tmp_path, users=10, planted=12, repetitions=3) == canaries == read(tmp_path)
    short = plant(tmp_path / "short", users=10, planted=12, repetitions=3, digits=2)
    assert {len(canary.secret) for canary in short} == {2}


def test_coins_are_guessed_from_both_ends() -> None:
    coins, scores = [True, False, True, False, True, False], np.array([9.0, -9.0, 8.0, -8.0, 0.0, 1.0])
    assert correct_guesses(coins, scores, 4) == 4
    assert correct_guesses(coins, scores, 6) == 4
    assert correct_guesses(coins, -scores, 4) == 0


@pytest.mark.slow
def test_models_answer_as_in_one_plain_forward_pass(public_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (found,) = read_outputs(public_model, [], [(CANARY.prompt, CANARY.secret)], 40)
    row, ids = found.public, AutoTokenizer.from_pretrained(public_model)(CANARY.prompt + CANARY.secret)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(public_model, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(1)
    for place in range(DIGITS):
        expected = logits[len(ids) - DIGITS - 1 + place].topk(40).values
        torch.testing.assert_close(row[place][:39], expected[:39], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_trained_model_outputs_a_secret_and_a_private_protocol_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chance decides: the secrets, the coins and the partition are the same in each run."""
    drawn = random.Random(0)
    monkeypatch.setattr(canaries, "secrets", SimpleNamespace(choice=drawn.choice, SystemRandom=lambda: drawn))
    (tmp_path / testbed.SALT).write_bytes(bytes(32))
    planted = train_testbed(tmp_path, PlantedSize(users=1, planted=3, repetitions=40, parts=2))
    assert any(canary.included for canary in planted)
    trained = evaluate_testbed(tmp_path, planted, 64)
    subjects = [("pmixed", PMixedSettings(epsilon=2.0, tokens=1024))]
    rows = {row.mechanism: row for row in extraction.attack_all(trained, subjects, attempts=10, draws=1)}
    assert rows["one model of the whole corpus"].hit_rate > extraction.LEAKS
    assert rows["the part that has the secret"].log_chance > rows["pmixed"].log_chance
    assert rows["pmixed"].hit_rate < 0.01
