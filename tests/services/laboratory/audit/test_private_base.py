"""Claim: the audit finds a private base that is not charged, is charged for another one, or passes as public."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.budget.filter import Filter, counted
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.state import Balance
from privmix.laboratory.audit.private_base import charge_faults, faults
from privmix.privacy.events import Event
from privmix.privacy.protocols.dp_sgd import DpSgdEvent, noise_multiplier
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregateSettings
from privmix.privacy.settings import Settings
from privmix.training import dp_sgd
from privmix.training.corpus import Corpus
from privmix.training.manifest import PRIVATE_BASE, Manifest, PrivateBase, PrivateTraining
from privmix.training.options import DpSgdOptions, TrainingOptions
from privmix.training.plan import run_training
from privmix.training.private_base import merged
from privmix.training.train import plan
from tests.inline import run_inline
from tests.support.cli import privmix
from tests.support.training import small_documents, write_corpus
from tests.tiny import write_tiny_model

PLAIN = TrainingOptions(part_kind="lora", targets=("v_proj",), block=16, precision="float32", weight_decay=0)
PARTS = TrainingOptions(block=16, batch=1, epochs=1, precision="float32")
PRIVATE = DpSgdOptions(steps=2, epsilon=2)
SETTINGS = ExponentialSettings(epsilon=8.0, delta=1e-5, tokens=64)


def ledger(path: Path, ensemble: Path, base: Event | None) -> str:
    """Writes the ledger of a service that charges this base and has released ten tokens."""
    settings: Settings = SETTINGS.on_base(base)
    protocol = settings.plan(2)
    name = Manifest.load(ensemble).ensemble
    written = Ledger.create(path, PrivacyBudget.of(name, settings, protocol, base=base))
    written.settle(written.lease(protocol.event, 10).lease, 10)
    return str(path)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two bases of one corpus, and parts on each."""
    tiny, corpus = write_tiny_model(tmp_path / "tiny"), write_corpus(tmp_path / "corpus.jsonl", small_documents())
    folders = {name: tmp_path / name for name in ("base", "other", "parts", "others")}
    run_inline(monkeypatch)
    for name, above in (("base", "parts"), ("other", "others")):
        run_training(dp_sgd.plan(Corpus(corpus), folders[name], private=PRIVATE, model=str(tiny), options=PLAIN))
        run_training(plan(Corpus(corpus), folders[above], parts=2, model=str(folders[name]), options=PARTS))
    return SimpleNamespace(**folders, tiny=tiny, corpus=corpus)


def event(ensemble: Path) -> Event:
    described = Manifest.load(ensemble).private_base
    assert described is not None
    return described.training.event


def test_each_planted_fault_is_found(made: SimpleNamespace, tmp_path: Path) -> None:
    sound = ledger(tmp_path / "sound.db", made.parts, event(made.parts))
    assert faults(made.parts, sound, [made.base, made.other]) == ()

    (free, too_little) = faults(made.parts, ledger(tmp_path / "free.db", made.parts, None))
    assert "does not charge the base" in free
    assert "and the two events cost 4." in too_little

    found = faults(made.others, ledger(tmp_path / "once.db", made.others, event(made.parts)))
    assert "charges one base and the parts are on another" in found[0]

    passed = tmp_path / "public-looking"
    AutoModelForCausalLM.from_pretrained(merged(made.base)).save_pretrained(passed)
    AutoTokenizer.from_pretrained(made.tiny).save_pretrained(passed)
    config = json.loads((passed / "config.json").read_bytes())
    del config[PRIVATE_BASE]
    (passed / "config.json").write_text(json.dumps(config))
    run_training(plan(Corpus(made.corpus), tmp_path / "forged", parts=2, model=str(passed), options=PARTS))
    unpaid = ledger(tmp_path / "forged.db", tmp_path / "forged", None)
    assert faults(tmp_path / "forged", unpaid) == (), "without the training, nothing shows it"
    (fault,) = faults(tmp_path / "forged", unpaid, [made.other, made.base])
    assert f"passes as public, and has the weights that {made.base} made of private text" in fault

    arguments = ["audit", "base", str(tmp_path / "forged"), "--ledger", unpaid, "--json"]
    assert privmix(*arguments).exit_code == 0
    done = privmix(*arguments, "--trained", str(made.base))
    assert done.exit_code == 1
    assert json.loads(done.output) == {"faults": [fault]}


DELTA = 1e-5
FULL = DpSgdEvent("user", noise_multiplier(4.0, DELTA, 1.0, 12), 1.0, 12, "full")
SAMPLED = DpSgdEvent("user", noise_multiplier(4.0, DELTA, 0.5, 40), 0.5, 40, "sampled")

Kind = Callable[..., Settings]
COUNTED: tuple[Kind, ...] = (PMixedSettings, SubsampleAggregateSettings)
"""By exact composition; the others are counted at one order, and the last by accounts."""
CASES: list[tuple[Kind, DpSgdEvent]] = [
    *((kind, FULL) for kind in (*COUNTED, ExponentialSettings, IndividualSettings)),
    *((kind, SAMPLED) for kind in (PMixedSettings, ExponentialSettings)),
]


def on(ensemble: Path, base: DpSgdEvent) -> Manifest:
    """Returns the manifest of an ensemble on a base with this training."""
    training = PrivateTraining(epsilon=4, delta=DELTA, clip=1, blocks=4, event=base)
    described = PrivateBase(origin="1" * 64, adapter="2" * 64, training=training)
    manifest = Manifest.load(ensemble)
    return manifest.model_copy(update={"private_base": described})


def balances(
    path: Path, manifest: Manifest, kind: Kind, base: DpSgdEvent | None, counts: Sequence[int], parts: int = 64
) -> Iterator[Balance]:
    """Yields the balances of a ledger for 64 parts that charges this base, after these numbers of tokens."""
    settings = kind(epsilon=8, delta=DELTA, tokens=1024).on_base(base)
    protocol = settings.plan(64)
    terms = PrivacyBudget.of(manifest.ensemble, settings, protocol, base=base)
    terms = counted(terms, protocol.event, settings.planned)
    assert (terms.counter is not None) == (kind in COUNTED)
    event = settings.plan(parts, terms.accountant).event
    ledger, before = Ledger.create(path, terms), 0
    for count in counts:
        while before < count:
            lease = ledger.lease(event, count - before, parts=64)
            ledger.settle(lease.lease, lease.count, () if terms.horizon is None else (0,) * 64)
            before += lease.count
        yield ledger.balance()


@pytest.mark.parametrize(("kind", "base"), CASES)
def test_no_ledger_that_charges_its_base_has_a_fault(
    ensemble: Path, tmp_path: Path, kind: Kind, base: DpSgdEvent
) -> None:
    manifest = on(ensemble, base)
    for balance in balances(tmp_path / "ledger.db", manifest, kind, base, (0, 10, 1000)):
        assert tuple(charge_faults(manifest, balance)) == ()


@pytest.mark.parametrize("kind", COUNTED)
def test_tokens_of_another_number_of_parts_are_no_fault(ensemble: Path, tmp_path: Path, kind: Kind) -> None:
    """They are bought in blocks, which cost more than the tokens alone."""
    manifest = on(ensemble, FULL)
    (balance,) = balances(tmp_path / "ledger.db", manifest, kind, FULL, (10,), parts=48)
    assert tuple(charge_faults(manifest, balance)) == ()


@pytest.mark.parametrize(("kind", "base"), CASES)
def test_every_kind_of_ledger_without_its_base_is_found(
    ensemble: Path, tmp_path: Path, kind: Kind, base: DpSgdEvent
) -> None:
    manifest = on(ensemble, base)
    for balance in balances(tmp_path / "ledger.db", manifest, kind, None, (0, 10, 500)):
        (free, _too_little) = charge_faults(manifest, balance)
        assert "does not charge the base" in free


@pytest.mark.parametrize("kind", COUNTED)
def test_a_counter_that_counts_too_few_tokens_is_found(
    ensemble: Path, tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the ledger states the cost of fewer tokens than it charged."""
    manifest = on(ensemble, FULL)
    (balance,) = balances(tmp_path / "ledger.db", manifest, kind, FULL, (500,))
    monkeypatch.setattr(Filter, "stated_tokens", lambda self, spent: 480)
    (too_little,) = charge_faults(manifest, balance)
    assert "by its counter" in too_little
