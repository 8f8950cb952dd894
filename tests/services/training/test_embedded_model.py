"""Claim: the embedded model is converted whole or not at all, and is the one in the package."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.training import public_model


@pytest.mark.slow
def test_conversion_killed_half_way_is_made_again(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVMIX_CACHE", str(tmp_path))
    convert = subprocess.Popen(
        [sys.executable, "-c", "from privmix.training.public_model import resolve; resolve()"], start_new_session=True
    )
    while not list(tmp_path.glob(".unfinished-*/*")):
        assert convert.poll() is None, "the conversion ended before the kill"
    convert.send_signal(signal.SIGKILL)
    convert.wait()
    assert not (tmp_path / base.name).exists()
    path = public_model.resolve()
    assert public_model.revision(path) == public_model.revision(base)
    assert not list(tmp_path.glob(".unfinished-*"))


def test_the_converted_model_is_bfloat16_and_generates_text(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        following = model(**prompt).logits[0, -1].argmax()
    assert tokenizer.decode(following) == " Paris"


def test_tokenizer_splits_digits_as_the_model_was_trained(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    # Without the split at each digit, the tokenizer would separate the two spaces.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("a  12, é\n")["input_ids"]) == "a  12, é\n"
