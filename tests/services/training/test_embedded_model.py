"""Claim: the embedded model is converted once, and a damaged conversion is detected and repeated."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from privmix.training import embedded_model, public_model


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_byte(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / base.name))


def test_whole_conversion_is_intact(copy: Path) -> None:
    assert embedded_model.is_intact(copy)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", truncate),
        ("model.safetensors", flip_a_byte),
        ("tokenizer.json", Path.unlink),
        ("chat_template.jinja", flip_a_byte),
        (embedded_model.LISTING, Path.unlink),
        (embedded_model.LISTING, truncate),
    ],
)
def test_every_damage_is_detected(copy: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(copy / name)
    assert not embedded_model.is_intact(copy)


def test_an_unconverted_file_is_detected(copy: Path) -> None:
    (copy / "added_tokens.json").write_text("{}")
    assert not embedded_model.is_intact(copy)


@pytest.mark.slow
def test_damaged_conversion_is_made_again_the_same(
    copy: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVMIX_CACHE", str(tmp_path))
    flip_a_byte(copy / "model.safetensors")
    assert public_model.resolve() == copy
    assert public_model.revision(copy) == public_model.revision(base)
    assert public_model.tokenizer_hash(copy) == public_model.tokenizer_hash(base)


@pytest.mark.slow
def test_conversion_killed_half_way_is_made_again(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVMIX_CACHE", str(tmp_path))
    convert = subprocess.Popen(
        [sys.executable, "-c", "from privmix.training.public_model import resolve; resolve()"],
        start_new_session=True,
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


def test_chat_template_and_generation_settings_are_kept(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert GenerationConfig.from_pretrained(base).eos_token_id == tokenizer.eos_token_id
