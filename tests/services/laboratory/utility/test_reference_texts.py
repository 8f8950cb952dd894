"""Claim: `privmix evaluate reference` writes labelled texts from each batch of users, as a set for `evaluate task`."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from privmix.foundation.errors import InputError
from privmix.laboratory.utility.labelled import Labelled, TextOrigin, read
from privmix.laboratory.utility.reference_texts import METHODS, ReferenceBatch, _Rows, _Writer, batches
from privmix.laboratory.utility.references import Amin
from tests.support.cli import privmix
from tests.tiny import write_tiny_base


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"user": f"user-{number // 2}", "text": f"I call about {number} days of pain.", "reason": "ab"[number % 2]}
        for number in range(120)
    ]
    path = tmp_path_factory.mktemp("real") / "real.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write(real: Path, tiny: Path, output: Path, *options: object) -> Result:
    words = ["evaluate", "reference", "--real", real, "--output", output, "--public-model", tiny]
    words += ["--label-field", "reason", "--tokens", "6", *options]
    return privmix(*words)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_writes_a_set_for_the_task(real: Path, tiny: Path, tmp_path: Path, method: str) -> None:
    options = ("--method", method, "--references", 10, "--epsilon", 30, "--sigma", 1, "--json")
    outputs = [tmp_path / name for name in ("first", "second")]
    for output in outputs:
        done = write(real, tiny, output, *options)
        assert done.exit_code == 0, done.output
    found = read("reference", outputs[0], "text", "reason")
    assert json.loads(done.stdout)["texts"] == len((outputs[0] / "synthetic.jsonl").read_text().splitlines()) >= 4
    assert found.classes == {"a", "b"}
    assert found.origin.protocol == method
    assert (found.origin.epsilon, found.origin.delta) == (30, 1e-5)
    assert (outputs[0] / "synthetic.jsonl").read_bytes() == (outputs[1] / "synthetic.jsonl").read_bytes()


def test_a_private_base_is_refused(real: Path, tmp_path: Path) -> None:
    """The stated epsilon would lack its training."""
    refused = write(real, write_tiny_base(tmp_path / "base", "3" * 64), tmp_path / "texts", "--method", METHODS[0])
    assert refused.exit_code == 2
    assert "was trained on private text" in refused.output
    assert not (tmp_path / "texts").exists()


def test_a_user_is_in_one_batch_with_one_text(real: Path) -> None:
    corpus = read("real", real, "text", "reason")
    made = batches(corpus, 10, seed=3)
    user_of = dict(zip(corpus.texts, corpus.users, strict=True))
    label_of = dict(zip(corpus.texts, corpus.labels, strict=True))
    users = [user_of[text] for batch in made for text in batch.texts]
    assert len(users) == len(set(users)) > 6 * len(made)
    assert all(len(batch.texts) <= batch.references == 10 for batch in made)
    assert all(label_of[text] == batch.label for batch in made for text in batch.texts)
    with pytest.raises(InputError, match="no label has 4 users"):
        batches(Labelled("x", ("a", "b"), ("p", "q"), ("1", "2"), 0, TextOrigin()), 4, 0)


def corpus_of(rows: Sequence[tuple[str, str, str]]) -> Labelled:
    """Returns the texts of rows of a user, a text and a label."""
    users, texts, labels = zip(*rows, strict=True)
    return Labelled("real", texts, labels, users)


ROWS = tuple((f"user-{number}", f"text {number}", "ab"[number % 2]) for number in range(200))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "texts",
    [(), ("another",), ("one", "two"), ("another", *(f"text {number}" for number in range(40)))],
    ids=["none", "another text", "two texts", "many texts"],
)
@pytest.mark.parametrize("replaced", [0, 50, 199])
def test_a_user_changes_one_reference_of_one_batch(replaced: int, texts: tuple[str, ...], seed: int) -> None:
    """One user's texts are replaced by others with the same label. Another label changes a second batch."""
    user, _, label = ROWS[replaced]
    rows = [(user, text, label) for text in texts]
    before, after = (
        batches(corpus_of(each), 16, seed) for each in (ROWS, (*ROWS[:replaced], *rows, *ROWS[replaced + 1 :]))
    )
    assert len(before) == len(after) == 12
    changed = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert len(changed) <= 1
    for one, other in changed:
        assert one.label == other.label == label
        assert len(set(one.texts) ^ set(other.texts)) <= 2
    moved = (*ROWS[:replaced], *((user, text, "ba"[replaced % 2]) for text in texts), *ROWS[replaced + 1 :])
    both = batches(corpus_of(moved), 16, seed)
    assert sum(one != other for one, other in zip(before, both, strict=True)) <= 2


def test_which_label_counts_for_a_user_of_two_depends_on_the_labels_alone(real: Path) -> None:
    corpus = read("real", real, "text", "reason")  # each user has a text of both labels
    kept = [batch.label for batch in batches(corpus, 10, seed=0)]
    texts = corpus_of(
        [
            (user, f"new {number}", label)
            for number, (user, label) in enumerate(zip(corpus.users, corpus.labels, strict=True))
        ]
    )
    assert [batch.label for batch in batches(texts, 10, seed=0)] == kept


def test_the_card_says_what_is_replaced(real: Path, tiny: Path, tmp_path: Path) -> None:
    done = write(real, tiny, tmp_path, "--method", METHODS[0], "--references", 10, "--epsilon", 30)
    assert done.exit_code == 0, done.output
    card = json.loads((tmp_path / "card.json").read_text())
    assert "any others with the same labels" in card["guarantee"]
    assert "who is in the corpus, and with which labels, is public" in " ".join(done.stdout.split())


def test_references_that_a_batch_lacks_are_the_public_model(tiny: Path) -> None:
    """So a user who is absent is a reference replaced: the mean is always over the same number."""
    asked: list[torch.Tensor] = []

    class Recorded(Amin):
        def next_token(self, public: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            asked.append(rows)
            assert torch.equal(rows[2:], public.expand(3, -1))
            return super().next_token(public, rows)

    writer = _Writer(tiny, 0)
    found = writer.texts(
        ReferenceBatch("a", ("one", "two words"), 5), "reason", Recorded(clip=5.0, private_tokens=3), 3
    )
    assert list(found)
    assert {len(rows) for rows in asked} == {5}


def test_the_logits_with_a_cache_are_those_of_each_prompt_alone(tiny: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompts = [tokenizer(text)["input_ids"] for text in ("one", "another and longer prompt", "two words")]
    rows = _Rows(network, prompts, len(prompts) + 1)
    for text in ([7, 11], [5], [3, 7, 11]):
        found = [rows.begin(), *map(rows.append, text)]
        for index, prompt in enumerate(prompts):
            with torch.inference_mode():
                expected = network(input_ids=torch.tensor([[*prompt, *text]])).logits[0, -len(text) - 1 :]
            for row, wanted in zip(found, expected, strict=True):
                assert len(row) == len(prompts) + 2
                assert torch.equal(row[-1], row[0]), "the public model stands for missing references"
                torch.testing.assert_close(row[index], wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("threshold", "private"), [(-100.0, 40), (100.0, 0)], ids=["private", "public"])
def test_a_batch_of_amin_writes_texts_until_its_private_tokens_are_spent(
    tiny: Path, threshold: float, private: int
) -> None:
    """With public tokens alone it ends too."""
    mechanism = Amin(clip=5.0, private_tokens=40, threshold=threshold)
    writer = _Writer(tiny, 0)
    network = writer._network
    network.lm_head = _Ending(network.lm_head, writer._tokenizer.eos_token_id)
    found = list(writer.texts(ReferenceBatch("a", ("one", "two words"), 2), "reason", mechanism, 40))
    assert mechanism.spent == private
    assert len(found) > 3
    tokens = sum(count for _, count in found)
    assert tokens + len(found) - 1 <= (private or 160) <= tokens + len(found)


class _Ending(torch.nn.Module):
    """Gives one token a fifth of all probability."""

    def __init__(self, head: torch.nn.Module, token: int) -> None:
        super().__init__()
        self._head, self._token = head, token

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        logits[..., self._token] = logits.logsumexp(dim=-1) - math.log(4)
        return logits


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--method", "other"), "must be invisible-ink or amin"),
        (("--method", "amin", "--references", 4, "--epsilon", 1), "does not last for 6 tokens of 4 references"),
        (("--method", "amin", "--references", 100), "no label has 100 users"),
    ],
)
def test_bad_input_is_named(real: Path, tiny: Path, tmp_path: Path, options: tuple[Any, ...], problem: str) -> None:
    refused = write(real, tiny, tmp_path / "output", *options)
    assert refused.exit_code == 2
    assert problem in refused.output
