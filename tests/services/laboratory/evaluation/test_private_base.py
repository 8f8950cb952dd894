"""Claim: a table counts a private base as what it is: p0 of its parts, charged once, and never the public model."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.laboratory.evaluation.ensembles import ComparedEnsembles
from privmix.laboratory.evaluation.evaluate import evaluate
from privmix.laboratory.evaluation.options import EvaluationOptions
from privmix.laboratory.evaluation.results import Result
from privmix.laboratory.evaluation.text import EvaluationText, held_out_text
from privmix.laboratory.evaluation.trial import CONTEXTS
from privmix.privacy.accounting import planning
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.training.corpus import Corpus
from privmix.training.private_base import merged
from tests.inline import run_inline
from tests.support.training import small_documents, train_base, train_parts, write_corpus
from tests.tiny import write_tiny_model

TOKENS = 48
OPTIONS = EvaluationOptions(
    sweep="epsilon", values=("4", "8"), tokens=TOKENS, protocols=("exponential",), run_tokens=24, runs=2, context=48,
    precision="float32",
)  # fmt: skip


def mean_losses(model: Path, text: EvaluationText) -> list[float]:
    """Returns -log p of each true token by transformers alone, in the order of the positions."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses: list[float] = []
    for block in text.blocks:
        with torch.inference_mode():
            logs = loaded(torch.tensor([block.tokens])).logits[0].log_softmax(-1)
        losses += [float(-logs[target - 1, block.tokens[target]]) for target in block.targets]
    return losses


def test_a_table_of_a_private_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_inline(monkeypatch)
    tiny = write_tiny_model(tmp_path / "tiny")
    corpus = write_corpus(tmp_path / "corpus.jsonl", small_documents())
    base, alone, above = (tmp_path / name for name in ("base", "alone", "above"))
    train_base(corpus, base, tiny, epsilon=5, learning_rate=5e-2)
    train_parts(corpus, alone, tiny)
    train_parts(corpus, above, base)
    loaded = ComparedEnsembles.load([above, alone], None, ())
    assert (loaded.main.directory, loaded.base) == (alone, tiny)
    by_itself = ComparedEnsembles.load([above], None, [base])
    assert by_itself.base == tiny
    found = evaluate(Corpus(corpus), tmp_path / "table", loaded, OPTIONS)
    at_four, at_eight = ({each.name: each for each in table.results} for table in found.tables)

    refused = at_four["Exponential mechanism, on a base of epsilon 5"]
    assert refused.problem is not None
    assert "besides the private base" in refused.problem
    assert "DP-SGD, as a base of epsilon 5" not in at_four, "it costs more than the table's budget"

    text = held_out_text(Corpus(corpus), AutoTokenizer.from_pretrained(tiny), context=48, tokens=24, runs=2)
    chosen = np.concatenate(text.runs)
    public, private_base = (np.array(mean_losses(model, text))[chosen] for model in (tiny, merged(base)))
    assert max(public.max(), private_base.max()) < 36 * math.log(2), "both can release every token"
    shown = at_eight["DP-SGD, as a base of epsilon 5"]
    assert shown.perplexity is not None
    assert math.log(shown.perplexity.mean) == pytest.approx(private_base.mean(), abs=1e-4)
    assert at_eight["Public model"].perplexity is not None
    assert math.log(at_eight["Public model"].perplexity.mean) == pytest.approx(public.mean(), abs=1e-4)
    check_gains(shown, (public - private_base), text.contexts[chosen])
    event = loaded.on_bases[0].base_training
    assert event is not None
    assert shown.reached.pld == pytest.approx(5.0, abs=1e-3)
    assert shown.status == "certified"
    assert "user" in shown.sentence

    row = at_eight["Exponential mechanism, on a base of epsilon 5"]
    settings = ExponentialSettings(epsilon=8, tokens=TOKENS).on_base(event.event)
    token = settings.plan(2).event
    cost = planning.cost(token, TOKENS, 1e-5, before={event.event: 1})
    assert row.reached.rdp == pytest.approx(cost.epsilon_rdp, abs=1e-6)
    assert row.reached.rdp is not None
    assert row.reached.rdp == pytest.approx(8.0, abs=1e-3)
    assert "The training of the private base, epsilon 5 alone, is part of it." in row.sentence
    assert at_eight["Exponential mechanism"].reached.rdp == pytest.approx(8.0, abs=1e-3)


def check_gains(shown: Result, gains: np.ndarray, contexts: np.ndarray) -> None:
    """Compares with sums by hand over each range of contexts."""
    by_range = {(gain.first, gain.last): gain for gain in shown.gains}
    for first, last in CONTEXTS:
        within = (first <= contexts) & (contexts <= last)
        assert ((first, last) in by_range) == within.any()
        if within.any():
            gain = by_range[first, last]
            assert gain.gain is not None
            assert gain.positions == within.sum()
            assert gain.gain.mean == pytest.approx(gains[within].mean(), abs=1e-4)
