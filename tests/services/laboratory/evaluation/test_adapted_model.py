"""Claim: rows of readers and plain adapters are correct for any number of positions, side by side in one model."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from privmix.engine.engine import PUBLIC, AdapterFiles
from privmix.engine.reader_attention import TARGETS, record
from privmix.engine.switching import using
from privmix.laboratory.evaluation.adapted_model import AdaptedModel

TOKENS = torch.randint(1000, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(r=2, target_modules=list(TARGETS))
        )
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=1.0)
        model.save_pretrained(folder / name)
    return {name: folder / name for name in ("first", "second")}


@torch.inference_mode()
def expected(tiny: Path, folder: Path, reader: bool) -> Tensor:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), folder, "one")
    cache = record(model, TOKENS).reader(TOKENS.shape[1]) if reader else None
    with using(model, "one"):
        logits: Tensor = model(input_ids=TOKENS, past_key_values=cache, use_cache=False).logits
    return logits


@pytest.mark.parametrize("positions", [1, 5, 12])
def test_readers_and_plain_adapters_side_by_side(tiny: Path, folders: dict[str, Path], positions: int) -> None:
    adapters = {f"{name} {kind}": AdapterFiles(folders[name], kind) for name in folders for kind in ("reader", "lora")}
    model = AdaptedModel(tiny, torch.float32, adapters)
    cache = model.record(TOKENS)
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.inference_mode():
        public = base(input_ids=TOKENS).logits
    computed = model.logits(PUBLIC, TOKENS, positions, cache)
    torch.testing.assert_close(computed, public[:, -positions:], atol=1e-4, rtol=1e-4)
    rows = {}
    for name, files in adapters.items():
        rows[name] = expected(tiny, files.path, files.part_kind == "reader")
        computed = model.logits(name, TOKENS, positions, cache)
        torch.testing.assert_close(computed, rows[name][:, -positions:], atol=1e-4, rtol=1e-4)
    for name in folders:
        assert (rows[f"{name} reader"] - rows[f"{name} lora"]).abs().max() > 0.1
    model.unload()
    torch.testing.assert_close(model.logits(PUBLIC, TOKENS, 12, cache), public, atol=1e-4, rtol=1e-4)
