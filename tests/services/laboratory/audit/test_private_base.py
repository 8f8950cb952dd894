"""Claim: the audit finds a private base that is not charged, is charged for another one, or passes as public."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.laboratory.audit.private_base import faults
from privmix.privacy.events import Event
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.settings import Settings
from privmix.training.manifest import PRIVATE_BASE, Manifest
from privmix.training.private_base import merged
from tests.inline import run_inline
from tests.support.cli import privmix
from tests.support.training import small_documents, train_base, train_parts, write_corpus
from tests.tiny import write_tiny_model

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
        train_base(corpus, folders[name], tiny)
        train_parts(corpus, folders[above], folders[name])
    return SimpleNamespace(**folders, tiny=tiny, corpus=corpus)


def event(ensemble: Path) -> Event:
    described = Manifest.load(ensemble).private_base
    assert described is not None
    return described.training.event


def test_each_planted_fault_is_found(made: SimpleNamespace, tmp_path: Path) -> None:
    sound = ledger(tmp_path / "sound.db", made.parts, event(made.parts))
    assert faults(made.parts, sound, [made.base, made.other]) == ()

    (free,) = faults(made.parts, ledger(tmp_path / "free.db", made.parts, None))
    assert "does not charge the base" in free

    (other,) = faults(made.others, ledger(tmp_path / "once.db", made.others, event(made.parts)))
    assert "charges one base and the parts are on another" in other

    assert faults(made.others, sound)[0] == "the ledger is another ensemble's"

    passed = tmp_path / "public-looking"
    AutoModelForCausalLM.from_pretrained(merged(made.base)).save_pretrained(passed)
    AutoTokenizer.from_pretrained(made.tiny).save_pretrained(passed)
    config = json.loads((passed / "config.json").read_bytes())
    del config[PRIVATE_BASE]
    (passed / "config.json").write_text(json.dumps(config))
    train_parts(made.corpus, tmp_path / "forged", passed)
    unpaid = ledger(tmp_path / "forged.db", tmp_path / "forged", None)
    assert faults(tmp_path / "forged", unpaid) == (), "without the training, nothing shows it"
    (fault,) = faults(tmp_path / "forged", unpaid, [made.other, made.base])
    assert f"passes as public, and has the weights that {made.base} made of private text" in fault

    arguments = ["audit", "base", str(tmp_path / "forged"), "--ledger", unpaid, "--json"]
    assert privmix(*arguments).exit_code == 0
    done = privmix(*arguments, "--trained", str(made.base))
    assert done.exit_code == 1
    assert json.loads(done.output) == {"faults": [fault]}
