"""Claim: a trial measures the perplexity of a service's releases, and ends at the end of its budget."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from privmix.laboratory.evaluation.rows import RowReader, writing
from privmix.laboratory.evaluation.trial import TrialResult, run_trials
from privmix.privacy import accounting
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.adapmixed import AdaPMixedSettings
from privmix.privacy.protocols.dp_sgd import DpSgdEvent, noise_multiplier
from privmix.privacy.protocols.ensemble import EnsembleSettings
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.gnmax import GNMaxSettings
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.public import PublicSettings
from privmix.privacy.protocols.submix import SubMixSettings
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregateSettings
from privmix.privacy.settings import Settings
from tests.services.laboratory.evaluation.hidden_states import VOCABULARY, StoredRows, write_rows

PARTS, POSITIONS = 4, 80


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> StoredRows:
    return write_rows(tmp_path_factory.mktemp("rows"), POSITIONS, PARTS)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> StoredRows:
    return write_rows(tmp_path_factory.mktemp("halves"), POSITIONS, 2 * PARTS)


def outcomes(written: StoredRows, *settings: Settings) -> list[TrialResult]:
    planned = [(setting, setting.plan(PARTS)) for setting in settings]
    return run_trials(planned, RowReader.open(written.files), np.arange(POSITIONS), written.tokens)


def mean_loss(log_probabilities: np.ndarray, tokens: np.ndarray) -> float:
    return float(-log_probabilities[np.arange(len(tokens)), tokens].mean())


def test_references_are_the_distributions_themselves(written: StoredRows) -> None:
    public, ensemble = outcomes(written, PublicSettings(), EnsembleSettings())
    assert public.loss == pytest.approx(mean_loss(written.public.numpy(), written.tokens), rel=1e-5)
    mean = written.models.double().exp().mean(dim=1).log().numpy()
    # Parts are stored as float16 differences, whose rounding errors average out.
    assert ensemble.loss == pytest.approx(mean_loss(mean, written.tokens), rel=1e-3)
    assert ensemble.loss < public.loss - 0.1
    assert (public.asked, ensemble.asked) == (0, PARTS)


@pytest.mark.parametrize("projection", ["clip", "mix"])
def test_pmixed_lies_between_the_public_model_and_the_ensemble(written: StoredRows, projection: str) -> None:
    def settings(**radius: float) -> PMixedSettings:
        return PMixedSettings.model_validate({"projection": projection, "tokens": POSITIONS, **radius})

    public, ensemble, none, all_, some = outcomes(
        written, PublicSettings(), EnsembleSettings(), settings(epsilon=0.2), settings(epsilon=1e5), settings(epsilon=8)
    )
    assert none.loss == pytest.approx(public.loss, abs=2e-2)
    assert all_.loss == pytest.approx(ensemble.loss, abs=2e-3)
    assert ensemble.loss < some.loss < public.loss
    assert (some.answered, some.possible) == (POSITIONS, POSITIONS)


def test_a_budget_for_fewer_tokens_ends_after_them(written: StoredRows) -> None:
    public, half = outcomes(written, PublicSettings(), PMixedSettings(epsilon=8, tokens=POSITIONS // 2))
    assert half.answered == POSITIONS // 2
    assert half.loss < public.loss


def test_a_budget_for_more_tokens_pays_for_each_position_several_times(written: StoredRows) -> None:
    once, often = outcomes(
        written, PMixedSettings(epsilon=8, tokens=POSITIONS), PMixedSettings(epsilon=8, tokens=16 * POSITIONS)
    )
    assert (once.answered, once.charged) == (POSITIONS, POSITIONS)
    assert (often.answered, often.charged) == (POSITIONS, 16 * POSITIONS)
    assert once.loss < often.loss, "a budget for more tokens allows a smaller radius"


def test_individual_budgets_fade_after_their_horizon(written: StoredRows) -> None:
    """The run stands for 16 horizons, in which the accounts are nearly spent."""
    settings = PublicSettings(), IndividualSettings(epsilon=8, tokens=POSITIONS)
    planned = [(each, each.plan(PARTS)) for each in settings]
    everywhere = np.arange(POSITIONS), written.tokens
    public, faded = run_trials(planned, RowReader.open(written.files), *everywhere, released=16 * POSITIONS)
    (within,) = run_trials(planned[1:], RowReader.open(written.files), *everywhere)
    assert within.loss < faded.loss < public.loss
    assert public.loss - within.loss > 2 * (public.loss - faded.loss)


def test_measured_losses_are_shown_over_the_tokens_with_the_share_that_is_screened(written: StoredRows) -> None:
    def settings(threshold: float) -> AdaPMixedSettings:
        return AdaPMixedSettings(mollifier="renyi", epsilon=1e4, tokens=2 * POSITIONS, threshold=threshold)

    nothing, everything, bounded = outcomes(written, settings(0), settings(1e9), PMixedSettings(tokens=POSITIONS))
    assert nothing.losses is not None
    assert everything.losses is not None
    assert bounded.losses is None
    assert (nothing.losses.screened, everything.losses.screened) == (1, 0)
    assert nothing.losses.quarters[-1] == pytest.approx(nothing.losses.screening)
    assert nothing.losses.screening == pytest.approx(2 * POSITIONS * 18 * (1e-4 / (PARTS * 1e-2)) ** 2)
    assert list(everything.losses.quarters) == sorted(everything.losses.quarters)
    total = accounting.epsilon(np.array([everything.losses.quarters[-1]]), 1e-5, [18.0]).epsilon
    assert everything.epsilon == pytest.approx(total)


def test_submix_shows_the_loss_of_the_part_that_pays_most(halves: StoredRows) -> None:
    settings = SubMixSettings(epsilon=8, tokens=POSITIONS)
    (outcome,) = outcomes(halves, settings)
    budget = settings.details(settings.plan(PARTS))["part_budget"]
    assert outcome.losses is not None
    assert outcome.losses.screened is None
    assert 0 < outcome.losses.quarters[0] < outcome.losses.quarters[-1] <= budget


def test_measured_losses_are_paid_several_times_too(written: StoredRows) -> None:
    def settings(tokens: int) -> AdaPMixedSettings:
        return AdaPMixedSettings(mollifier="renyi", beta=5.0, order=2, epsilon=10.5, tokens=tokens)

    once, twice = outcomes(written, settings(POSITIONS), settings(2 * POSITIONS))
    assert twice.answered == pytest.approx(once.answered / 2, abs=2)


def test_submix_stops_at_the_end_of_its_budget(halves: StoredRows) -> None:
    # At order 4 and this delta, an epsilon of 3.4 leaves a loss of 0.3 to every part.
    public, short, long = outcomes(
        halves,
        PublicSettings(),
        SubMixSettings(epsilon=3.4, tokens=POSITIONS, beta=0.5),
        SubMixSettings(epsilon=1e4, tokens=POSITIONS, beta=0.5),
    )
    assert 0 < short.answered < POSITIONS == long.answered
    assert short.epsilon is not None
    assert short.epsilon <= 3.4
    assert long.loss < short.loss < public.loss
    # The public model answers all later positions without the parts.
    assert short.asked == pytest.approx(2 * PARTS * _asked(short.answered) / POSITIONS)


def _asked(answered: int) -> int:
    """Rounds up to whole batches; the rest of the last batch is discarded."""
    return min(POSITIONS, -(-(answered + 1) // 32) * 32)


def test_a_plurality_of_candidates_cannot_release_every_token(written: StoredRows) -> None:
    """Some true tokens are not among the ten candidates from a vocabulary of 96."""
    gnmax, aggregate = outcomes(
        written,
        GNMaxSettings(candidates=10, epsilon=1e3, tokens=POSITIONS),
        SubsampleAggregateSettings(candidates=10, epsilon=1e3, tokens=POSITIONS),
    )
    for outcome in (gnmax, aggregate):
        assert 0 < outcome.possible < POSITIONS


def test_only_protocols_with_noise_vary_between_trials(written: StoredRows) -> None:
    drawn = ExponentialSettings(sample=PARTS // 2, epsilon=20, tokens=POSITIONS)
    first, second = (outcomes(written, drawn, PMixedSettings(epsilon=20, tokens=POSITIONS)) for _ in range(2))
    assert first[0].loss != second[0].loss
    assert first[1] == second[1], "the distribution over the draws is exact"
    assert first[0].asked == PARTS // 2


def test_losses_are_summed_by_the_length_of_the_context(written: StoredRows) -> None:
    contexts = np.array([1, 16, 17, 64, 65, 128, 129, 256, 257, 40] * (POSITIONS // 10))
    planned: list[tuple[Settings, Protocol]] = [(PublicSettings(), PublicSettings().plan(PARTS))]
    (public,) = run_trials(planned, RowReader.open(written.files), np.arange(POSITIONS), written.tokens, contexts)
    losses = -written.public.double().numpy()[np.arange(POSITIONS), written.tokens]
    for first, ((count, total), repeated) in enumerate(zip(public.contexts, (2, 3, 2, 2), strict=True)):
        assert count == repeated * POSITIONS // 10
        ends = [(0, 1), (2, 3, 9), (4, 5), (6, 7)][first]
        assert total == pytest.approx(sum(losses[end::10].sum() for end in ends), rel=1e-5)


def test_a_private_base_is_p0_and_the_budget_pays_for_it(written: StoredRows, tmp_path: Path) -> None:
    """The public model under it is a reference only: what it cannot release counts for no method."""
    hidden = written.public.clone()
    hidden[:8] -= 60 * torch.nn.functional.one_hot(torch.from_numpy(written.tokens[:8]), VOCABULARY)
    with writing(tmp_path / "original.npy", (POSITIONS, VOCABULARY)) as put:
        put(0, hidden.log_softmax(1))
    files = replace(written.files, original=(written.files.head, tmp_path / "original.npy"))
    base = DpSgdEvent("user", noise_multiplier(4.0, 1e-5, 1.0, 12), 1.0, 12, "base")
    alone = ExponentialSettings(epsilon=8, tokens=POSITIONS)
    on_base = alone.on_base(base)
    planned = [(settings, settings.plan(PARTS)) for settings in (PublicSettings(), alone, on_base)]
    arguments = RowReader.open(files), np.arange(POSITIONS), written.tokens
    public, without, with_base = run_trials(planned, *arguments)
    for outcome in (public, without, with_base):
        assert (outcome.positions, outcome.possible) == (POSITIONS, POSITIONS - 8)
    assert public.loss == pytest.approx(mean_loss(written.public[8:].numpy(), written.tokens[8:]), rel=1e-5)
    assert without.loss < with_base.loss < public.loss
    assert with_base.answered == POSITIONS
    assert with_base.epsilon == pytest.approx(8.0, abs=1e-3)
    radius = planned[1][1]
    assert run_trials([(on_base, radius)], *arguments)[0].answered < POSITIONS, "the base leaves less for tokens"
