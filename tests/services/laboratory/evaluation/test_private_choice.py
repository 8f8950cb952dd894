"""Claim: a private choice changes with one user as little as its epsilon says, is paid once, and shows nothing else."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from privmix.budget.reader import read
from privmix.foundation.errors import InputError, WorkError
from privmix.laboratory.evaluation import private_choice, tasks
from privmix.laboratory.evaluation.cases import CandidateSettings
from privmix.laboratory.evaluation.ensembles import TrainedEnsemble
from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.private_choice import FILE, choose
from privmix.laboratory.evaluation.text import EvaluationText, texts_of_users
from privmix.laboratory.evaluation.tuning import Tuning, TuningResult
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.sampling.selection import LOSS_UNITS, SelectionEvent
from privmix.training import public_model
from privmix.training.corpus import Corpus, Document
from privmix.training.options import TokenBudget
from tests.ensembles import write_ensemble
from tests.inline import run_inline
from tests.tiny import write_tiny_model

PARTS = 4
BUDGET = TokenBudget(epsilon=100, delta=1e-5, tokens=64)
"""Too large for exact composition, which would take longer than the scores."""
LINES = ["The ferry leaves at nine.", "My chest hurts since noon.", "Tax forms are due in May; see page 3."]
DOCUMENTS = [Document(f"user-{number}", line * (1 + number)) for number, line in enumerate(LINES)]
TOKENS = 16
PROTOCOL_NAMES = ("public", "pmixed", "exponential")


def corpus(path: Path, documents: Sequence[Document] = DOCUMENTS) -> Corpus:
    path.write_text("".join(f'{{"user": "{item.user}", "text": "{item.text}"}}\n' for item in documents))
    return Corpus(path)


def choice(ensemble: Path, protocol: str) -> TuningResult:
    one = Estimate.of([1.0])
    return TuningResult(protocol, ensemble, PARTS, protocol, {}, "certified", 2.0, one, one, on_front=True)


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def ensemble(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choice")
    model = write_tiny_model(folder / "model") if request.param == "tiny" else None
    return write_ensemble(folder / "ensemble", PARTS, model=model)


@pytest.fixture
def tuning(ensemble: Path) -> Tuning:
    found = tuple(choice(ensemble, protocol) for protocol in PROTOCOL_NAMES)
    return Tuning(BUDGET, 64, 1, found, found[0])


def texts(ensemble: Path, documents: list[Document]) -> list[EvaluationText]:
    from transformers import AutoTokenizer

    base = public_model.resolve(TrainedEnsemble.load(ensemble).manifest.base_model)
    return list(texts_of_users(documents, AutoTokenizer.from_pretrained(base), context=TOKENS, tokens=TOKENS))


def losses(ensemble: Path, documents: list[Document]) -> np.ndarray:
    loaded = TrainedEnsemble.load(ensemble)
    settings = [PROTOCOLS[name].model_validate(BUDGET.limits()) for name in PROTOCOL_NAMES]
    candidates = CandidateSettings(
        [loaded.files(part) for part in loaded.manifest.parts], [(each, each.plan(PARTS)) for each in settings]
    )
    return tasks.losses_of_users(
        public_model.resolve(loaded.manifest.base_model), [candidates], texts(ensemble, documents)
    )


def test_a_users_losses_are_bounded_and_no_other_user_changes_a_bit_of_them(ensemble: Path) -> None:
    whole = losses(ensemble, DOCUMENTS)
    assert whole.shape == (3, 3)
    assert ((whole >= 0) & (whole <= LOSS_UNITS)).all()
    assert (whole[:, 0] == LOSS_UNITS // 2).all(), "the public model gains nothing over itself"
    assert len(np.unique(whole[:, 1:])) > 3
    replaced = [DOCUMENTS[0], Document("user-1", "x" * 500), DOCUMENTS[2]]
    after = losses(ensemble, replaced)
    np.testing.assert_array_equal(after[[0, 2]], whole[[0, 2]])
    assert (after[1] != whole[1]).any()


def test_a_user_without_tokens_counts_the_same_for_every_candidate(ensemble: Path) -> None:
    assert len(np.unique(losses(ensemble, [Document("silent", "a")]))) == 1


def test_the_text_of_a_user_is_cut_alone(ensemble: Path) -> None:
    together, alone = texts(ensemble, DOCUMENTS), texts(ensemble, DOCUMENTS[1:2])
    assert together[1].blocks == alone[0].blocks
    assert all(sum(len(block.tokens) for block in text.blocks) <= TOKENS for text in together)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores short texts in this process."""
    run_inline(monkeypatch)
    monkeypatch.setattr(private_choice, "CONTEXT", TOKENS)


@pytest.mark.usefixtures("inline")
def test_a_choice_is_charged_once_and_stored(tuning: Tuning, tmp_path: Path) -> None:
    users, ledger = corpus(tmp_path / "users.jsonl"), str(tmp_path / "ledger.db")
    first = choose(tuning, users, tmp_path, epsilon=0.5, ledger=ledger, budget=1.0)
    again = choose(tuning, users, tmp_path, epsilon=0.5, ledger=ledger, budget=1.0)
    assert first == again
    (event,) = read(ledger).charged
    assert isinstance(event, SelectionEvent)
    assert (event.epsilon, event.unit, event.neighbours, event.rounds) == (0.5, "user", "replace", 1)
    assert first.users == 3
    stored = (tmp_path / FILE).read_text()
    assert "loss" not in stored


@pytest.mark.usefixtures("inline")
def test_a_choice_that_the_budget_does_not_cover_is_not_made(tuning: Tuning, tmp_path: Path) -> None:
    users, ledger = corpus(tmp_path / "users.jsonl"), str(tmp_path / "ledger.db")
    with pytest.raises(WorkError, match="budget"):
        choose(tuning, users, tmp_path, epsilon=0.5, ledger=ledger, budget=0.1)
    assert not (tmp_path / FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("ensemble", ["smollm2"], indirect=True)
def test_with_a_large_epsilon_the_best_candidate_is_chosen(
    tuning: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_choice, "CONTEXT", TOKENS)
    twins = [Document(f"{item.user} {twin}", item.text) for item in DOCUMENTS for twin in range(4)]
    totals = 4 * losses(tuning.choices[0].ensemble, DOCUMENTS).sum(axis=0)
    chosen = choose(
        tuning, corpus(tmp_path / "users.jsonl", twins), tmp_path, epsilon=500, ledger=str(tmp_path / "ledger.db")
    )
    assert chosen.protocol == PROTOCOL_NAMES[int(totals.argmin())]
    assert np.sort(totals)[1] - totals.min() > 20 * LOSS_UNITS / 250, "the other candidates have weights below e^-20"


def test_a_choice_of_one_costs_nothing(ensemble: Path, tmp_path: Path) -> None:
    only = choice(ensemble, "public")
    with pytest.raises(InputError, match="nothing to choose"):
        choose(
            Tuning(BUDGET, 64, 1, (only,), only),
            corpus(tmp_path / "users.jsonl"),
            tmp_path,
            epsilon=0.5,
            ledger=str(tmp_path / "ledger.db"),
        )
    assert not (tmp_path / "ledger.db").exists()
