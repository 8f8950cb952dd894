"""Claim: stored rows equal the models' own, can be loaded again, and are never confused with another model's."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from privmix.engine.engine import AdapterFiles
from privmix.engine.reader_attention import record
from privmix.engine.switching import using
from privmix.foundation.errors import InputError
from privmix.laboratory.evaluation.rows import EnsembleRows, RowReader, is_whole, read, row_file
from privmix.laboratory.evaluation.scoring import Scorer
from privmix.laboratory.evaluation.tasks import score_adapters, score_base
from privmix.laboratory.evaluation.text import Block, EvaluationText
from tests.ensembles import write_adapters
from tests.services.laboratory.evaluation.hidden_states import write_rows
from tests.support.random_models import random_model
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, public_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return public_model if request.param == "smollm2" else write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_adapters(tmp_path_factory.mktemp("adapters"), ("first", "second"), model)


@pytest.fixture(scope="module")
def blocks(tokens: tuple[int, ...]) -> list[Block]:
    """Blocks of three lengths, so that all except the longest are padded."""
    return [Block(part, tuple(range(1, len(part)))) for part in (tokens[:40], tokens[40:52], tokens[52:75])]


def scored(scorer: Scorer, blocks: list[Block], *adapters: AdapterFiles) -> list[dict[int, torch.Tensor]]:
    """Returns the log-probabilities of each adapter (or the base model) at the targets of each block, [targets, V]."""
    rows_of: list[dict[int, torch.Tensor]] = [{} for _ in adapters or [None]]
    for which, index, hidden in scorer.hidden_states(blocks, adapters):
        rows_of[which][index] = scorer.head.log_probabilities(hidden)
    return rows_of


@torch.inference_mode()
def test_rows_of_all_positions_equal_each_models_own(
    model: Path, adapters: dict[str, Path], blocks: list[Block]
) -> None:
    scorer = Scorer(model, "float32")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    direct = {"base": [base(input_ids=torch.tensor([block.tokens])).logits[0, :-1] for block in blocks]}
    for name in ("first", "second"):
        adapted = PeftModel.from_pretrained(base, adapters[name])
        direct[name] = [adapted(input_ids=torch.tensor([block.tokens])).logits[0, :-1] for block in blocks]
        base = adapted.unload()
    # Several adapters at once, then one, then none: each result is independent of the earlier ones.
    plain = {name: AdapterFiles(adapters[name], "lora") for name in ("first", "second")}
    rows_of = dict(zip(plain, scored(scorer, blocks, *plain.values()), strict=True))
    for name, rows in (*rows_of.items(), ("second", scored(scorer, blocks, plain["second"])[0])):
        assert_same(rows, direct[name], blocks)
    assert_same(scored(scorer, blocks)[0], direct["base"], blocks)


def assert_same(rows_of: dict[int, torch.Tensor], direct: list[torch.Tensor], blocks: list[Block]) -> None:
    for index, block in enumerate(blocks):
        expected = direct[index].log_softmax(-1)
        assert torch.allclose(rows_of[index], expected, atol=1e-4)
        truth = torch.tensor(block.tokens[1:])[:, None]
        own, theirs = (math.exp(-rows.gather(1, truth).mean()) for rows in (rows_of[index], expected))
        assert own == pytest.approx(theirs, rel=1e-5)


@torch.inference_mode()
def test_readers_are_scored_on_the_public_cache_of_each_block(
    model: Path, adapters: dict[str, Path], blocks: list[Block]
) -> None:
    first, second = adapters["first"], adapters["second"]
    files = AdapterFiles(first, "reader"), AdapterFiles(second, "lora"), AdapterFiles(second, "reader")
    rows_of = scored(Scorer(model, "float32"), blocks, *files)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(base, first, "first")
    adapted.load_adapter(second, "second")
    for which, name in ((0, "first"), (2, "second")):
        for index, block in enumerate(blocks):
            tokens = torch.tensor([block.tokens])
            cache = record(adapted, tokens)
            with using(adapted, name):
                logits = adapted(input_ids=tokens, past_key_values=cache.reader(len(block.tokens))).logits[0, :-1]
            assert torch.allclose(rows_of[which][index], logits.log_softmax(-1), atol=1e-4)
    assert (rows_of[1][0] - rows_of[2][0]).abs().max() > 0.1


def test_logits_of_a_narrow_model_are_not_rounded(public_model: Path, blocks: list[Block]) -> None:
    model = AutoModelForCausalLM.from_pretrained(public_model, dtype=torch.bfloat16).eval()
    rows_of = scored(Scorer(public_model, "bfloat16"), blocks[:1])[0][0]
    with torch.inference_mode():
        inputs = torch.tensor([blocks[0].tokens])
        hidden = model.model(inputs).last_hidden_state[0, :-1].float()
        whole_logits = (hidden @ model.get_output_embeddings().weight.float().T).log_softmax(-1)
        rounded = model(inputs).logits[0, :-1].float().log_softmax(-1)
    assert float((rows_of - whole_logits).abs().max()) < 1e-3
    assert float((rounded - whole_logits).abs().max()) > 1e-2, "rounded logits would fail this test"
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16", "the precision of other products does not change"  # type: ignore[attr-defined]


def test_stored_hidden_states_give_the_scorers_distributions(
    model: Path, adapters: dict[str, Path], blocks: list[Block], tmp_path: Path
) -> None:
    files = EnsembleRows(tmp_path / "head.safetensors", tmp_path / "public.npy", (tmp_path / "first.npy",))
    text = EvaluationText(tuple(blocks), (np.arange(sum(len(block.targets) for block in blocks)),))
    reader = AdapterFiles(adapters["first"], "reader")
    score_base(model, text, "auto", files.public, files.head)
    score_adapters(model, text, "auto", [reader], [files.models[0]])
    public, first = RowReader.open(files)(text.runs[0])
    scorer = Scorer(model)
    for rows, rows_of in ((public, scored(scorer, blocks)[0]), (first, scored(scorer, blocks, reader)[0])):
        assert torch.equal(rows, torch.cat([rows_of[index] for index in range(len(blocks))]))
    size = files.models[0].stat().st_size
    assert size < 4 * text.positions * scorer.head.size + 200, "the files contain only the hidden states"


def test_a_model_that_changes_its_logits_afterwards_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    model = random_model("gemma2", **sizes, num_attention_heads=2, num_key_value_heads=1)
    assert model.config.final_logit_softcapping
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="changes its logits after the output layer"):
        Scorer(tmp_path, "float32")


def test_rows_of_another_origin_have_another_file_name() -> None:
    own: tuple[Any, ...] = ("b" * 64, "a" * 64, "reader", "t" * 64, "float32")
    others = [(*own[:index], "0", *own[index + 1 :]) for index in range(len(own))]
    assert len({row_file(*inputs) for inputs in (own, *others, (own[0], None, None, *own[3:]))}) == 7


def test_an_incomplete_file_is_ignored(tmp_path: Path) -> None:
    path = write_rows(tmp_path, positions=20, models=1).files.models[0]
    assert is_whole(path, 20)
    assert not is_whole(path, 21)
    assert not is_whole(tmp_path / "none.npy", 20)
    content = path.read_bytes()
    for damaged in (content[:1000], content[:-2], b"", b"PK" + content[2:]):
        path.write_bytes(damaged)
        assert not is_whole(path, 20)
    path.write_bytes(content)
    assert read(path).shape == (20, 96)
