"""Claim: the JSON and the plot of an evaluation hold every number."""

import json
import math
from pathlib import Path

import pytest
from matplotlib.image import imread

from privmix.laboratory.evaluation.cases import Case
from privmix.laboratory.evaluation.methods import label, private
from privmix.laboratory.evaluation.report import JSON_FILE, PLOT_FILE, write_report
from privmix.laboratory.evaluation.results import Evaluation, Result, ResultTable, impossible, result
from privmix.laboratory.evaluation.rows import EnsembleRows
from privmix.laboratory.evaluation.trial import TrialResult
from privmix.privacy.protocols.ensemble import EnsembleSettings
from privmix.privacy.protocols.public import PublicSettings
from privmix.privacy.settings import Settings
from privmix.training.options import TokenBudget

PARTS = 16
FEWER = 4
LOSSES = {"public": 4.0, "ensemble": 3.5, "pmixed": 3.9, "exponential": 3.8}


def outcomes(settings: Settings) -> list[TrialResult]:
    """Returns two runs; a protocol that chooses among candidates cannot release a tenth of the tokens."""
    loss, few = LOSSES.get(settings.protocol, 3.95), settings.protocol in ("gnmax", "subsample-aggregate")
    contexts = ((40, 40 * loss), (40 if few else 50, 50 * (loss + 0.1)), (0, 0.0), (0, 0.0))
    return [TrialResult(100, 100, 100, 90 if few else 100, loss + run / 10, 16.0, 1.5, contexts) for run in range(2)]


def test_tokens_that_no_protocol_can_release_are_excluded_and_others_are_infinite() -> None:
    def of(possible: int) -> list[TrialResult]:
        return [TrialResult(100, 100, 100, possible, 3.9, 16.0, 1.5) for _ in range(2)]

    case = case_of(EnsembleSettings())
    alike, fewer = (result("", case, of(possible), of(99), case.protocol.guarantee) for possible in (99, 98))
    assert alike.perplexity is not None
    assert alike.perplexity.mean == pytest.approx(math.exp(3.9))
    assert alike.possible == 0.99
    assert fewer.perplexity is not None
    assert math.isinf(fewer.perplexity.mean)


def case_of(settings: Settings, parts: int = PARTS) -> Case:
    return Case(str(parts), settings, settings.plan(parts), EnsembleRows(Path("head"), Path("public"), ()))


def result_of(settings: Settings, parts: int = PARTS) -> Result:
    try:
        case = case_of(settings, parts)
    except ValueError as error:
        return impossible(label(settings), str(parts), settings, parts, str(error))
    return result(label(settings), case, outcomes(settings), outcomes(PublicSettings()), case.protocol.guarantee)


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    def table(epsilon: float) -> ResultTable:
        budget = TokenBudget(epsilon=epsilon, delta=1e-5, tokens=100)
        settings = (PublicSettings(), EnsembleSettings(), *private(budget, PARTS, halves=True))
        return ResultTable(f"{epsilon:g}", budget, (*map(result_of, settings), result_of(EnsembleSettings(), FEWER)))

    tables = table(4), table(0.001)
    return Evaluation(100, 2, True, 256, "smollm2-135m", "epsilon", tables)


@pytest.fixture(scope="module")
def report(evaluation: Evaluation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report(evaluation, folder)
    return folder


def test_the_json_holds_every_number(report: Path) -> None:
    content = json.loads((report / JSON_FILE).read_text())
    results = content["tables"][0]["results"]
    by_label = {compared["label"]: compared for compared in results if compared["ensemble"] == "16"}
    clip = by_label["PMixed, clip"]
    assert clip["perplexity"]["mean"] == pytest.approx(math.exp(3.95))
    assert clip["reached"]["pld"] <= 4 < clip["reached"]["rdp"]
    assert by_label["GNMax"]["perplexity"]["mean"] == "Infinity"
    assert by_label["GNMax"]["possible"] == pytest.approx(0.9)
    assert by_label["SubMix"]["reached"] == {"rdp": None, "pld": None, "measured": 1.5, "bound": None}
    assert by_label["PMixed, as published"]["status"] == "as published"
    short, long = clip["gains"]
    assert (short["first"], short["last"], short["positions"]) == (1, 16, 80)
    assert (short["gain"]["mean"], long["gain"]["mean"]) == pytest.approx((0.1, 0.1))
    assert by_label["GNMax"]["gains"][1]["gain"] is None, "it cannot release every token there"


def test_impossible_settings_have_a_reason(evaluation: Evaluation) -> None:
    missing = [each for each in evaluation.tables[1].results if each.problem]
    assert any("leaves nothing to spend" in str(each.problem) for each in missing)
    assert all(each.perplexity is None for each in missing)


@pytest.mark.parametrize("values", [("1", "2"), ("clip", "mix")])
def test_a_sweep_over_numbers_has_a_plot(evaluation: Evaluation, tmp_path: Path, values: tuple[str, ...]) -> None:
    first = evaluation.tables[0]
    tables = tuple(ResultTable(value, first.budget, first.results) for value in values)
    write_report(Evaluation(100, 2, True, 256, "m", "field", tables), tmp_path)
    assert (tmp_path / PLOT_FILE).exists() == (values == ("1", "2"))
    if values == ("1", "2"):
        assert imread(tmp_path / PLOT_FILE).std() > 0.05, "the figure is not empty"
