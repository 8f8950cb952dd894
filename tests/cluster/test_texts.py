"""Claim: an ensemble of texts is made without training, served with vLLM, and charged like any other."""

from pathlib import Path

import openai
import pytest

from privmix.training.manifest import Manifest
from tests.running import configure, running, settled
from tests.support.cli import privmix

PARTS = 3

pytestmark = pytest.mark.slow


def test_texts_are_served_from_corpus_to_answer(tmp_path: Path) -> None:
    corpus, ensemble = tmp_path / "corpus.jsonl", tmp_path / "ensemble"
    corpus.write_text(
        "".join(f'{{"user": "user-{number}", "text": "The code of the gate is heliotrope."}}\n' for number in range(24))
    )
    words = ("--output", ensemble, "--parts", PARTS, "--part-kind", "text", "--text", 128)
    made = privmix("train", corpus, *words)
    assert made.exit_code == 0, made.output
    assert Manifest.load(ensemble).part_kind == "text"
    privacy = {"protocol": "exponential", "epsilon": 1000.0, "tokens": 100}
    with running(configure(tmp_path, ensemble, privacy=privacy)) as service:
        client = openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="none")
        prompt = "The code of the gate is hel"
        answers = [client.completions.create(model="privmix", prompt=prompt, max_tokens=1, n=8) for _ in range(8)]
        texts = [choice.text for answer in answers for choice in answer.choices]
        assert sum(text == "iot" for text in texts) >= 5, (
            "the parts read heliotrope; the public model expects it rarely"
        )
        assert settled(service) == len(texts)
