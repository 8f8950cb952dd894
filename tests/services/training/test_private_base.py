"""Claim: a model that DP-SGD trained is never taken for a public one, and what is trained on it carries its event."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from privmix.foundation.errors import ConfigurationError, InputError, ManifestError
from privmix.training.base import find_base
from privmix.training.manifest import PRIVATE_BASE, Manifest, private_base
from privmix.training.private_base import merged
from privmix_cluster.configuration import Configuration
from privmix_cluster.promise import promise
from tests.inline import run_inline
from tests.support.cli import privmix, refused
from tests.support.training import PLAIN, Ensemble, small_documents, train_base, train_parts, write_corpus

CONFIGURED = {"privacy": {"protocol": "exponential", "epsilon": 8, "tokens": 64}}


def configured(folder: Path, **changes: object) -> Configuration:
    return Configuration.of({"ensemble": str(folder), "budget": {"ledger": str(folder / "l.db")}, **changes})


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl", small_documents())


@pytest.fixture
def trained_base(tiny: Path, corpus: Path, one_ray: str, tmp_path: Path) -> Path:
    train_base(corpus, tmp_path / "base", tiny)
    return tmp_path / "base"


@pytest.mark.slow
def test_parts_on_a_private_base_carry_its_event(trained_base: Path, corpus: Path, tmp_path: Path) -> None:
    """However the base is named, and wherever it is copied: nothing that is trained on it passes as public."""
    trained = Manifest.load(trained_base)
    assert trained.dp_sgd is not None
    model = merged(trained_base)
    assert merged(trained_base) == model
    described = private_base(model)
    assert described is not None
    assert described.training == trained.dp_sgd
    copied = tmp_path / "copied"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(copied)
    AutoTokenizer.from_pretrained(model).save_pretrained(copied)
    shutil.copytree(model, tmp_path / "moved")
    for name in (trained_base, model, copied, tmp_path / "moved"):
        assert find_base(str(name), PLAIN).private == described
    ensemble = train_parts(corpus, tmp_path / "parts", trained_base).manifest
    assert ensemble.private_base == described
    ensemble.verify(tmp_path / "parts")
    promised = promise(configured(tmp_path / "parts", **CONFIGURED), ensemble)
    assert promised.terms.base_event == trained.dp_sgd.event
    assert promised.when_exhausted == "base"
    assert "base: Abadi et al. 2016" in promised.sentence

    again = train_parts(corpus, tmp_path / "parts", trained_base)
    assert (again.kept, again.manifest) == (2, ensemble), "the same command goes on, with the same base"
    with pytest.raises(InputError, match="was trained on private text itself"):
        train_base(corpus, tmp_path / "twice", model)

    forged = ensemble.model_copy(update={"private_base": None})
    with pytest.raises(ManifestError, match=r"private_base: the model in .* and the manifest differ"):
        forged.verify(tmp_path / "parts")
    config = json.loads((model / "config.json").read_bytes())
    del config[PRIVATE_BASE]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ManifestError, match="base_revision"):
        ensemble.verify(tmp_path / "parts")


def test_one_command_trains_the_base_and_the_parts(
    tiny: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_inline(monkeypatch)
    output = tmp_path / "both"
    arguments = ["train", str(corpus), "--output", str(output), "--parts", "2", "--base", "auto", "--model", str(tiny)]
    arguments += ["--block", "16", "--epochs", "1", "--precision", "float32", "--epsilon", "6"]
    for share in (["--base-share", "0.5"], []):
        done = privmix(*arguments, *share)
        assert done.exit_code == 0, done.output
        assert "the parts are on a private base, which cost epsilon 3" in done.output
        trained, manifest = Manifest.load(output / "base"), Manifest.load(output)
        assert trained.dp_sgd is not None
        assert manifest.private_base is not None
        assert manifest.private_base.training == trained.dp_sgd
        assert (trained.dp_sgd.epsilon, trained.dp_sgd.event.unit) == (3.0, "user")
        if not share:
            assert "0 of them trained and 2 kept" in done.output, "the second run goes on with the same base"
    promised = promise(configured(output, **CONFIGURED), manifest)
    assert manifest.private_base is not None
    assert promised.terms.base_event == manifest.private_base.training.event
    assert "must be above the 3 that the base in" in refused(*arguments, "--epsilon", "2")


@pytest.mark.slow
def test_what_is_configured_must_fit_the_base(trained_base: Path, corpus: Path, tmp_path: Path) -> None:
    manifest = train_parts(corpus, tmp_path / "parts", trained_base).manifest
    ledger = {"ledger": str(tmp_path / "l.db")}
    for privacy, problem in (
        ({"protocol": "exponential", "epsilon": 2, "tokens": 64}, "besides the private base"),
        ({"protocol": "public", "epsilon": 1}, "the private base alone cost 2"),
        ({"protocol": "submix", "epsilon": 8}, "base: its guarantee is for other neighbouring corpora"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            promise(configured(tmp_path / "parts", privacy=privacy), manifest)
    public = promise(configured(tmp_path / "parts", privacy={"protocol": "public"}), manifest)
    assert "The base's training, epsilon 2.0000 alone" in public.sentence
    with pytest.raises(ConfigurationError, match="when_exhausted: public would answer with the private base"):
        promise(configured(tmp_path / "parts", **CONFIGURED, budget={"when_exhausted": "public", **ledger}), manifest)


def test_only_dp_sgd_by_user_makes_a_base(ensemble: Ensemble, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was trained on private text without a guarantee"):
        find_base(str(ensemble.directory), PLAIN)
    arguments = ["train", str(corpus), "--output", str(tmp_path / "new"), "--base", str(ensemble.directory)]
    assert "was not trained with DP-SGD" in refused(*arguments, "--parts", "2")
    with pytest.raises(ConfigurationError, match="when_exhausted: base answers with the private base"):
        promise(
            configured(ensemble.directory, budget={"when_exhausted": "base", "ledger": str(tmp_path / "l.db")}),
            Manifest.load(ensemble.directory),
        )
