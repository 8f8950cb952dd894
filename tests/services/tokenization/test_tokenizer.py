"""Claim: a tokenizer is the one that `AutoTokenizer` loads, and one whose tokens depend on more is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from privmix.foundation.errors import InputError
from privmix.tokenization.tokenizer import check_alone, load_tokenizer

TEXT = "  The clinic opens at 09:30 \N{EM DASH} and closes at five.<|im_end|>\n"


def copy(model: Path, folder: Path, kind: str, **described: Any) -> Path:
    """Copies the tokenizer of a model to a model of this kind."""
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(model / name, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    values = json.loads((model / "tokenizer_config.json").read_bytes()) | described
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("kind", "described"),
    [
        ("llama", {}),
        ("llama", {"tokenizer_class": "GPT2Tokenizer"}),
        ("qwen2", {}),  # transformers replaces its class
    ],
    ids=["plain", "other class", "replaced class"],
)
def test_it_is_the_one_that_transformers_chooses(
    public_model: Path, tmp_path: Path, kind: str, described: dict[str, Any]
) -> None:
    model = copy(public_model, tmp_path / "model", kind, **described)
    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert (ours.chat_template, ours.special_tokens_map) == (theirs.chat_template, theirs.special_tokens_map)


@pytest.mark.parametrize(
    "random",
    [models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.1), models.Unigram([("a", -1.0)], alpha=0.5)],
)
def test_random_tokens_are_refused_by_their_field(random: Any) -> None:
    field = "dropout" if isinstance(random, models.BPE) else "alpha"
    with pytest.raises(InputError, match=rf"tokenizer\.json, model\.{field}: makes tokens random"):
        check_alone(Tokenizer(random))


@pytest.mark.parametrize("kept", [{}, {"pad": True}, {"count": True}], ids=["honest", "reads the longest", "counts"])
def test_tokens_that_depend_on_more_than_the_text_are_refused(kept: dict[str, bool]) -> None:
    """The planted faults of a tokenizer that no field shows."""

    class Encodes:
        model = None
        calls = 0

        def encode_batch(self, texts: list[str]) -> list[Any]:
            self.calls += 1
            more = max(map(len, texts)) if kept.get("pad") else self.calls if kept.get("count") else 0
            return [SimpleNamespace(ids=[len(text), more]) for text in texts]

    if not kept:
        check_alone(Encodes())  # type: ignore[arg-type]
        return
    with pytest.raises(InputError, match="encodes a text differently alone and beside others"):
        check_alone(Encodes())  # type: ignore[arg-type]
