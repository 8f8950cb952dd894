"""Claim: the text of a part is read before each sequence, always with the same number of tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch

from privmix.engine.engine import PUBLIC, AdapterFiles, EngineSettings, create
from privmix.engine.part_text import read_text, read_texts, text_files
from privmix.foundation.files import write_files
from privmix.laboratory.evaluation.adapted_model import AdaptedModel
from tests.ensembles import write_adapters
from tests.services.engine.masked import after_text
from tests.tiny import write_tiny_model

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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", context=256)


def test_an_adapter_is_no_text(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is an adapter and not the text of a part"):
        read_texts(write_adapters(tmp_path, ("part",), tiny))


def test_the_evaluation_reads_the_text_before_each_sequence(
    tiny: Path, tokens: tuple[int, ...], tmp_path: Path
) -> None:
    path = write(tmp_path / "text", list(tokens))
    model = AdaptedModel(tiny, torch.float32, {"text": AdapterFiles(path, "text")})
    sequences = torch.tensor([tokens[:30], tokens[30:60]])
    cache = model.record(sequences)
    for positions in (30, 1):
        rows = model.logits("text", sequences, positions, cache)
        expected = torch.stack([after_text(model.base, read_text(path), sequence) for sequence in sequences])
        torch.testing.assert_close(rows, expected[:, -positions:], atol=1e-3, rtol=1e-3)
        assert (rows - model.logits(PUBLIC, sequences, positions, cache)).abs().max() > 1


def test_texts_that_do_not_fit_are_refused(public_model: Path, tmp_path: Path) -> None:
    paths = {f"part-{number}": write(tmp_path / str(number), [number, END], size=4096) for number in range(12)}
    settings = EngineSettings(public_model, "vllm", context_length=256, cache_gib=1, part_kind="text", adapters=paths)
    with pytest.raises(ValueError, match=r"cache_gib: 12 texts of 4096 tokens .* raise cache_gib"):
        create(settings)
