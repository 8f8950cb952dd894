"""Claim: heads keep to their guarantees under attack, are charged once, and survive storage."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from privmix.budget.reading import read
from privmix.foundation.errors import DataError, InputError, WorkError
from privmix.laboratory.heads import DATASET_NAMES, attacks, head, methods, mimic
from privmix.laboratory.heads.certified import CertifiedSettings
from privmix.laboratory.heads.data import DATASETS
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.table import Table, read_npz
from privmix.privacy.events import from_json
from tests.support.cli import privmix, refused, reported
from tests.support.tables import generated


@pytest.mark.slow
def test_a_narrow_flow_breaks_the_epsilon_of_its_density_and_the_certified_variant_keeps_it() -> None:
    """Only one row has a value in a feature. Theorem 3.1 bounds its loss, but the fit still follows it."""
    epsilon, pair = 0.1, attacks.lever()
    torch.manual_seed(0)
    published = attacks.neighbours(
        "expm-nf", attacks.published_releases(epsilon, attacks.NARROW), pair, epsilon, trials=400
    )
    assert published.lower > 2 * epsilon
    assert published.status == "none"
    certified = attacks.certified_releases(epsilon, CertifiedSettings(candidates=64))
    assert attacks.neighbours("expm-certified", certified, pair, epsilon, trials=4000).certain <= epsilon


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_the_bound_found_for_the_certified_variant_is_below_its_epsilon(epsilon: float) -> None:
    releases = attacks.certified_releases(epsilon, CertifiedSettings(candidates=8))
    finding = attacks.neighbours("expm-certified", releases, attacks.lever(rows=8), epsilon, trials=10_000)
    assert 0 < finding.lower <= epsilon
    assert finding.verdict == "holds"


def test_one_run_finds_what_a_training_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a method that releases the answers of its own rows, in one parameter each."""
    table = generated(80)
    table = replace(table, x=np.eye(80, dtype=np.float32))
    certified = attacks.one_run("expm-certified", table, 1.0, runs=3)
    assert certified.verdict == "holds"
    assert certified.details == {"planted": 80, "runs": 3}

    def remembered(self: object, rows: Table, epsilon: float, seed: int) -> torch.Tensor:
        signs = torch.zeros(81)
        signs[rows.users] = torch.from_numpy(20 * rows.y - 10)
        return signs[None]

    monkeypatch.setattr(methods.Method, "release", remembered)
    # Half of the rows are guessed to be in. The verdict needs 64 right guesses of 80 in two of three runs.
    assert attacks.one_run("expm-certified", table, 0.1, runs=3).verdict == "broken"


def test_a_head_is_charged_once_and_predicts_without_limit(tmp_path: Path) -> None:
    table, ledger = generated(300), str(tmp_path / "ledger.db")
    made = head.train(table, "expm-certified", 1.0, tmp_path / "first", ledger=ledger, budget=2.1)
    assert made.event is not None
    for _ in range(2):
        assert head.predict(tmp_path / "first", table).shape == (300,)
    charged = read(ledger).charged
    assert dict(charged) == {from_json(made.event): 1}
    head.train(table, "expm-certified", 1.0, tmp_path / "second", ledger=ledger, budget=2.1)
    with pytest.raises(WorkError, match="budget"):
        head.train(table, "expm-certified", 1.0, tmp_path / "third", ledger=ledger, budget=2.1)
    assert not (tmp_path / "third").exists()
    with pytest.raises(InputError, match="already contains a head"):
        head.train(table, "expm-certified", 1.0, tmp_path / "first", ledger=ledger, budget=2.1)


def test_the_help_names_the_built_in_tables() -> None:
    assert tuple(DATASETS) == DATASET_NAMES


def test_only_certified_methods_are_charged_to_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none proven"):
        head.train(generated(), "expm-nf", 1.0, tmp_path / "head", ledger=str(tmp_path / "ledger.db"))
    assert not (tmp_path / "ledger.db").exists()
    assert not (tmp_path / "head").exists()


def test_a_changed_head_is_refused(tmp_path: Path) -> None:
    table = generated(200)
    head.train(table, "non-private", 1.0, tmp_path / "head")
    with pytest.raises(InputError, match="features"):
        head.predict(tmp_path / "head", replace(table, x=table.x[:, :2]))
    os.truncate(tmp_path / "head" / head.PARAMETERS, 20)
    with pytest.raises(InputError, match="train it again"):
        head.predict(tmp_path / "head", table)
    with pytest.raises(InputError, match="heads train"):
        head.predict(tmp_path, table)


def test_the_command_requires_a_guarantee_by_default(tmp_path: Path) -> None:
    rows = generated(300)
    path, bounds = tmp_path / "rows.csv", tmp_path / "bounds.json"
    pd.DataFrame({"a": rows.x[:, 0], "b": rows.x[:, 1], "c": rows.x[:, 2], "y": rows.y}).to_csv(path, index=False)
    bounds.write_text(json.dumps({name: [-1, 1] for name in "abc"}))
    own = ["--dataset", path, "--target", "y"]
    train = ["heads", "train", "--output", tmp_path / "h"]
    assert "none proven" in refused(*train, "--method", "expm-nf", *own)
    assert "bounds" in refused(*train, *own)
    own += ["--bounds", bounds]
    assert reported(*train, *own)["method"] == "expm-certified"
    predicted = privmix("heads", "predict", tmp_path / "h", *own)
    assert len(predicted.stdout.split()) == 300


def test_mimic_extract_is_prepared_by_its_layout(tmp_path: Path) -> None:
    """Uses a generated file of the published layout: columns (variable, aggregate), rows by stay and hour."""
    rng = np.random.default_rng(0)
    stays = [(subject, 100 + subject, 200 + subject) for subject in range(40)]
    hours = [29 if subject < 5 else 40 for subject in range(40)]
    names = ["subject_id", "hadm_id", "icustay_id"]
    rows = pd.MultiIndex.from_tuples(
        [(*stay, hour) for stay, last in zip(stays, hours, strict=True) for hour in range(last)],
        names=[*names, "hours_in"],
    )
    columns = pd.MultiIndex.from_product(
        [["heart rate", "glucose", "never"], ["count", "mean", "std"]], names=["LEVEL2", "Aggregation Function"]
    )
    values = rng.normal(size=(len(rows), 9))
    values[rng.random(values.shape) < 0.8] = np.nan
    values[:, 7] = np.nan
    patients = pd.DataFrame(
        {"mort_hosp": rng.integers(0, 2, 40), "los_icu": rng.uniform(1, 6, 40)},
        index=pd.MultiIndex.from_tuples(stays, names=names),
    )
    file = tmp_path / "all_hourly_data.h5"
    pd.DataFrame(values, rows, columns).to_hdf(file, key="vitals_labs")
    patients.to_hdf(file, key="patients")
    written = mimic.prepare(file, tmp_path / "out")
    assert set(written.values()) == {35}  # excludes stays below 30 hours
    table = read_npz(tmp_path / "out" / "mortality.npz")
    assert table.x.shape == (35, 24, 6)  # excludes a variable without measurements
    by_hour = read_npz(tmp_path / "out" / "mortality-hours.npz")
    np.testing.assert_array_equal(by_hour.x.reshape(35, 24, 2), table.x[:, :, :2])
    assert (table.scaling, table.unit) == ("private", "record")
    assert METHODS["dp-sgd"].unfit(replace(table, population=40)) is None, "the paper compares with it"
    np.testing.assert_array_equal(table.y, patients["mort_hosp"].to_numpy()[5:])
    with pytest.raises(DataError, match="MIMIC-Extract"):
        mimic.prepare(tmp_path / "nothing.h5", tmp_path)
