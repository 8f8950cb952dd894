"""Claims: rows are the models' own, kept closely enough, found again, and never taken for others'."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from services.engine.engine import AdapterFiles
from services.engine.reader_attention import record
from services.engine.switching import using
from services.evaluation.rows import Origin, Reader, read, whole
from services.evaluation.scoring import Scorer
from services.evaluation.text import Block
from tests.services.evaluation.written import write_rows

ORIGIN = Origin(base="b" * 64, adapter="a" * 64, attention="public", text="t" * 64, precision="float32")


@pytest.fixture(scope="module")
def blocks(tokens: tuple[int, ...]) -> list[Block]:
    """Of three lengths, so that all but the longest are filled up."""
    return [Block(part, tuple(range(1, len(part)))) for part in (tokens[:40], tokens[40:52], tokens[52:75])]


def scored(scorer: Scorer, blocks: list[Block], *adapters: AdapterFiles) -> list[dict[int, torch.Tensor]]:
    """Float32 [targets, V] of each adapter (or the base model) and block, put together from the pieces."""
    found = [
        {index: torch.full((len(block.targets), scorer.vocabulary), torch.nan) for index, block in enumerate(blocks)}
        for _ in adapters or [None]
    ]
    for which, index, first, rows in scorer.log_probabilities(blocks, adapters):
        found[which][index][first : first + len(rows)] = rows
    return found


@torch.inference_mode()
def test_all_positions_at_once_are_each_models_own(
    public_model: Path, adapters: dict[str, Path], blocks: list[Block]
) -> None:
    scorer = Scorer(public_model, "float32")
    base = AutoModelForCausalLM.from_pretrained(public_model, dtype=torch.float32).eval()
    direct = {"base": [base(input_ids=torch.tensor([block.tokens])).logits[0, :-1] for block in blocks]}
    for name in ("first", "second"):
        model = PeftModel.from_pretrained(base, adapters[name])
        direct[name] = [model(input_ids=torch.tensor([block.tokens])).logits[0, :-1] for block in blocks]
        base = model.unload()
    # Several at once, one after them, and none at last: nothing is left of the ones before.
    plain = {name: AdapterFiles(adapters[name], "own") for name in ("first", "second")}
    found = dict(zip(plain, scored(scorer, blocks, *plain.values()), strict=True))
    for name, rows in (*found.items(), ("second", scored(scorer, blocks, plain["second"])[0])):
        assert_same(rows, direct[name], blocks)
    assert_same(scored(scorer, blocks)[0], direct["base"], blocks)


def assert_same(found: dict[int, torch.Tensor], direct: list[torch.Tensor], blocks: list[Block]) -> None:
    for index, block in enumerate(blocks):
        expected = direct[index].log_softmax(-1)
        assert torch.allclose(found[index], expected, atol=1e-4)
        truth = torch.tensor(block.tokens[1:])[:, None]
        own, theirs = (math.exp(-rows.gather(1, truth).mean()) for rows in (found[index], expected))
        assert own == pytest.approx(theirs, rel=1e-5)


@torch.inference_mode()
def test_readers_are_scored_on_the_public_cache_of_each_block(
    public_model: Path, adapters: dict[str, Path], blocks: list[Block]
) -> None:
    first, second = adapters["first"], adapters["second"]
    asked = AdapterFiles(first, "public"), AdapterFiles(second, "own"), AdapterFiles(second, "public")
    found = scored(Scorer(public_model, "float32"), blocks, *asked)
    base = AutoModelForCausalLM.from_pretrained(public_model, dtype=torch.float32).eval()
    model = PeftModel.from_pretrained(base, first, "first")
    model.load_adapter(second, "second")
    for which, name in ((0, "first"), (2, "second")):
        for index, block in enumerate(blocks):
            tokens = torch.tensor([block.tokens])
            cache = record(model, tokens)
            with using(model, name):
                logits = model(input_ids=tokens, past_key_values=cache.reader(len(block.tokens))).logits[0, :-1]
            assert torch.allclose(found[which][index], logits.log_softmax(-1), atol=1e-4)
    assert (found[1][0] - found[2][0]).abs().max() > 0.1


def test_logits_of_a_narrow_model_are_not_rounded(public_model: Path, blocks: list[Block]) -> None:
    model = AutoModelForCausalLM.from_pretrained(public_model, dtype=torch.bfloat16).eval()
    found = scored(Scorer(public_model, "bfloat16"), blocks[:1])[0][0]
    with torch.inference_mode():
        inputs = torch.tensor([blocks[0].tokens])
        hidden = model.model(inputs).last_hidden_state[0, :-1].float()
        whole_logits = (hidden @ model.get_output_embeddings().weight.float().T).log_softmax(-1)
        rounded = model(inputs).logits[0, :-1].float().log_softmax(-1)
    assert float((found - whole_logits).abs().max()) < 1e-3
    assert float((rounded - whole_logits).abs().max()) > 1e-2, "what is rounded differs by more than this test allows"
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16", "other products stay as precise as they were"  # type: ignore[attr-defined]


def test_parts_are_kept_to_two_thousandths_of_their_log_ratio(tmp_path: Path) -> None:
    written = write_rows(tmp_path, positions=50, models=3)
    positions = np.array([7, 3, 49])
    public, parts = Reader(written.files)(positions)
    assert torch.equal(public, written.public[positions])
    truth = written.models[positions].flatten(0, 1)
    ratio = (truth - public.repeat_interleave(3, 0)).abs()
    assert bool(((parts - truth).abs() <= ratio * 2.0**-11 + 1e-6).all())
    assert ratio.max() > 2


@pytest.mark.parametrize("field", ["base", "adapter", "attention", "text", "precision"])
def test_rows_of_something_else_have_another_name(field: str) -> None:
    other = {"precision": "bfloat16", "attention": "own"}.get(field, "0" * 64)
    assert replace(ORIGIN, **{field: other}).file != ORIGIN.file  # type: ignore[arg-type]
    assert replace(ORIGIN, adapter=None).file != ORIGIN.file


def test_what_is_left_of_a_file_does_not_count(tmp_path: Path) -> None:
    path = write_rows(tmp_path, positions=20, models=1).files.models[0]
    assert whole(path, 20)
    assert not whole(path, 21)
    assert not whole(tmp_path / "none.npy", 20)
    content = path.read_bytes()
    for damaged in (content[:1000], content[:-2], b"", b"PK" + content[2:]):
        path.write_bytes(damaged)
        assert not whole(path, 20)
    path.write_bytes(content)
    assert read(path).shape == (20, 96)
