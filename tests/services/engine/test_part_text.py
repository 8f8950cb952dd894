"""Claim: the text of a part is read before each sequence, always with the same number of tokens."""

from pathlib import Path

import numpy as np
import pytest

from privmix.engine.engine import EngineSettings, create
from privmix.engine.part_text import read_text, read_texts, text_files
from privmix.foundation.files import write_files
from tests.ensembles import write_adapters

END = 7


def write(path: Path, tokens: list[int], size: int = 128) -> Path:
    write_files(path, text_files(np.array(tokens, np.int32), size))
    return path


@pytest.mark.parametrize("count", [0, 1, 5, 127, 128, 129, 1000])
def test_every_text_has_the_same_number_of_tokens_and_ends_a_document(tmp_path: Path, count: int) -> None:
    tokens = [*range(10, 9 + count), END][:count]
    text = read_text(write(tmp_path / "text", tokens)).tolist()
    assert len(text) == 128
    assert text[-1] == (END if count else 0)
    assert text[:127] == (tokens * 128)[:127] or not count
    assert set(text) <= set(tokens or [0])


def test_texts_of_different_sizes_are_refused(tmp_path: Path) -> None:
    paths = {"a": write(tmp_path / "a", [1, END]), "b": write(tmp_path / "b", [1, END], size=256)}
    with pytest.raises(ValueError, match="must have the same number of tokens"):
        read_texts(paths)


def test_an_adapter_is_no_text(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is an adapter and not the text of a part"):
        read_texts(write_adapters(tmp_path, ("part",), tiny))


def test_texts_that_do_not_fit_are_refused(public_model: Path, tmp_path: Path) -> None:
    paths = {f"part-{number}": write(tmp_path / str(number), [number, END], size=4096) for number in range(12)}
    settings = EngineSettings(public_model, "vllm", context_length=256, cache_gib=1, part_kind="text", adapters=paths)
    with pytest.raises(ValueError, match=r"cache_gib: 12 texts of 4096 tokens .* raise cache_gib"):
        create(settings)
