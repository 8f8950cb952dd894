"""Claim: a report is complete and self-contained, and explains every number."""

import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

from privmix.laboratory.evaluation.cases import Case
from privmix.laboratory.evaluation.comparisons import distinct_label, label
from privmix.laboratory.evaluation.figures import PALETTES, Theme, gaps, style
from privmix.laboratory.evaluation.methods import private, sweeps
from privmix.laboratory.evaluation.report import CSV_FILE, HTML_FILE, JSON_FILE, write_report
from privmix.laboratory.evaluation.results import (
    Evaluation,
    Result,
    ResultTable,
    SweepPoint,
    SweepResult,
    impossible,
    result,
)
from privmix.laboratory.evaluation.trial import TrialResult
from privmix.privacy.protocols.ensemble import EnsembleSettings
from privmix.privacy.protocols.gnmax import GNMaxSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
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
    return [
        TrialResult(100, 100, 100, 90 if few else 100, loss + run / 10, 0.25, 16.0, 1.5, contexts) for run in range(2)
    ]


def test_tokens_that_no_protocol_can_release_are_excluded_and_others_are_infinite() -> None:
    def of(possible: int) -> list[TrialResult]:
        return [TrialResult(100, 100, 100, possible, 3.9, 0.25, 16.0, 1.5) for _ in range(2)]

    settings = EnsembleSettings()
    protocol = settings.plan(PARTS)
    case = Case(Path("16"), settings)
    alike, fewer = (result("", case, protocol, of(possible), of(99)) for possible in (99, 98))
    assert alike.perplexity is not None
    assert alike.perplexity.mean == pytest.approx(math.exp(3.9))
    assert alike.possible == 0.99
    assert fewer.perplexity is not None
    assert math.isinf(fewer.perplexity.mean)
    assert fewer.change is None


def result_of(settings: Settings, parts: int = PARTS) -> Result:
    case = Case(Path(str(parts)), settings)
    try:
        protocol = settings.plan(parts)
    except ValueError as error:
        return impossible(distinct_label(settings), case, parts, str(error))
    return result(distinct_label(settings), case, protocol, outcomes(settings), outcomes(PublicSettings()))


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    budget, longer = (TokenBudget(epsilon=4, delta=1e-5, tokens=tokens) for tokens in (100, 400))
    references = tuple(result_of(settings) for settings in (PublicSettings(), EnsembleSettings()))
    tables = tuple(
        ResultTable(
            each,
            (
                *references,
                *(result_of(settings) for settings in private(each, PARTS, halves=True)),
                result_of(EnsembleSettings(), FEWER),
                *(result_of(settings, FEWER) for settings in private(each, FEWER, halves=False)),
            ),
        )
        for each in (budget, longer)
    )
    chosen = [sweep for sweep in sweeps(budget, PARTS, halves=False) if sweep.quantity in ("radius", "order")]
    swept = tuple(
        SweepResult(
            sweep.quantity,
            budget,
            tuple(SweepPoint(point.value, result_of(point.settings)) for point in sweep.points),
            references,
        )
        for sweep in chosen
    )
    return Evaluation(12, 3, 100, 2, True, 256, PARTS, True, None, "smollm2-135m", tables, 2, swept)


@pytest.fixture(scope="module")
def report(evaluation: Evaluation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report(evaluation, folder)
    return folder


class Loaded(HTMLParser):
    """Collects the addresses that a browser would fetch, and the tags that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "poster")]
        assert tag not in ("script", "link", "iframe", "object")
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing(report: Path) -> None:
    page = (report / HTML_FILE).read_text()
    loaded = Loaded(page)
    assert not loaded.open
    assert len(loaded.addresses) == 2 * 5, "each figure in a light and a dark version"
    assert all(address.startswith("data:image/png;base64,") for address in loaded.addresses)
    without_pictures = re.sub(r'"data:[^"]*"', "", page)
    assert not re.search(r"https?:|url\(|@import|\bimport\b", without_pictures)


def test_the_page_states_the_guarantees(report: Path, evaluation: Evaluation) -> None:
    page = (report / HTML_FILE).read_text()
    for compared in evaluation.tables[0].results:
        assert compared.label in page
        assert compared.status in page
    assert "best method certified for users is Exponential mechanism with 16 parts" in page
    # Its loss is 3.8, the public model's 4.0 and the ensemble's 3.5.
    assert "(Ensemble, not private, 16 parts). It closes 40 % of the gap" in page
    assert "∞" in page
    assert "for the operator" in page


def test_numbers_are_the_same_in_every_file(report: Path) -> None:
    content = json.loads((report / JSON_FILE).read_text())
    results = content["tables"][0]["results"]
    by_label = {compared["label"]: compared for compared in results if compared["ensemble"] == "16"}
    clip = by_label["PMixed, clip"]
    assert clip["perplexity"]["mean"] == pytest.approx(math.exp(3.95))
    assert clip["change"]["mean"] == pytest.approx(math.exp(-0.1))
    assert clip["reached"]["pld"] <= 4 < clip["reached"]["rdp"]
    assert by_label["GNMax"]["perplexity"]["mean"] == "infinite"
    assert by_label["GNMax"]["possible"] == pytest.approx(0.9)
    assert by_label["SubMix"]["reached"] == {"rdp": None, "pld": None, "measured": 1.5, "bound": None}
    assert by_label["PMixed, as published"]["status"] == "as published"
    short, long = clip["gains"]
    assert (short["first"], short["last"], short["positions"]) == (1, 16, 80)
    assert (short["gain"]["mean"], long["gain"]["mean"]) == pytest.approx((0.1, 0.1))
    assert by_label["GNMax"]["gains"][1]["gain"] is None, "it cannot release every token there"
    lines = list(csv.DictReader(io.StringIO((report / CSV_FILE).read_text())))
    assert len(lines) == 2 * len(results) + sum(len(sweep["points"]) for sweep in content["sweeps"])
    line = next(row for row in lines if row["method"] == "PMixed, clip" and row["figure"] == "table")
    assert float(line["perplexity"]) == clip["perplexity"]["mean"]
    assert float(line["gain_17_64"]) == long["gain"]["mean"]
    assert line["gain_129_256"] == "", "no position has so much context"
    assert json.loads(line["parameters"]) == clip["parameters"]


def test_impossible_settings_have_a_reason(evaluation: Evaluation, report: Path) -> None:
    order = next(sweep for sweep in evaluation.sweeps if sweep.quantity == "order")
    missing = [point.result for point in order.points if point.result.problem]
    assert missing
    assert all("leaves nothing to spend" in str(failed.problem) for failed in missing)
    assert all(failed.perplexity is None for failed in missing)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_line_styles_are_distinct(theme: Theme) -> None:
    budget = TokenBudget(epsilon=4, delta=1e-5, tokens=100)
    swept = (point.settings for sweep in sweeps(budget, PARTS, halves=True) for point in sweep.points)
    labels = {distinct_label(settings) for settings in (*private(budget, 64, halves=True), EnsembleSettings())}
    labels |= {label(settings) for settings in swept} | {"Exponential mechanism, m = 8"}
    assert len({style(PALETTES[theme], label) for label in labels}) == len(labels) >= 10


def test_figures_are_drawn(report: Path) -> None:
    for name in ("perplexity-overview", "perplexity-radius", "perplexity-order", "gap-parts", "gap-tokens"):
        pixels = imread(report / f"{name}.png")
        assert pixels.shape[1] == 1140
        assert pixels.std() > 0.05, "the figure is not empty"


def test_a_bound_of_a_perplexity_is_never_the_best() -> None:
    budget = TokenBudget(epsilon=4, delta=1e-5, tokens=100)
    case = Case(Path(str(PARTS)), GNMaxSettings.model_validate(budget.limits()))
    bound = result("", case, case.settings.plan(PARTS), outcomes(EnsembleSettings()), outcomes(PublicSettings()))
    own = result_of(PMixedSettings.model_validate(budget.limits()))
    assert bound.perplexity is not None
    assert own.perplexity is not None
    assert bound.perplexity.mean < own.perplexity.mean
    assert ResultTable(budget, (bound, own)).best_certified() is own
    assert ResultTable(budget, (bound,)).best_certified() is None


def test_the_share_of_the_gap_is_relative_to_the_best_model_without_privacy(evaluation: Evaluation) -> None:
    table = evaluation.tables[0]
    best = table.best_certified("exponential", str(FEWER))
    assert best is not None
    assert best.parts == FEWER
    closed = table.gap_closed(best)
    assert closed is not None
    assert closed.mean == pytest.approx((3.8 - 4.0) / (3.5 - 4.0))
    public = table.of("public")
    assert public is not None
    assert table.gap_closed(public) is None
    # A lone ensemble at one budget has no figure, nor have models without privacy that gain nothing.
    assert set(gaps(evaluation.tables)) == {"parts", "tokens"}
    alone = ResultTable(table.budget, tuple(each for each in table.results if each.parts == PARTS))
    assert not gaps([alone])
    useless = ResultTable(table.budget, tuple(each for each in table.results if each.protocol != "ensemble"))
    assert useless.reference() is None
    assert not gaps([useless])
