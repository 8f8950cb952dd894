"""Searches protocol, number of parts and q: measures the perplexity of each choice and the rows that a token needs.

    tune(Corpus(Path("set_aside.jsonl")), Path("tuning"), TokenBudget(epsilon=8, delta=1e-5, tokens=16384))

A choice that depends on private text reveals information about it, which no ledger charges. So the sample must be
public, or set aside and never served. Derived parameters (radius, sigma, scale) are the largest, or smallest, that the
budget allows. The results hold for the sample; parts of a larger corpus learn more.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from privmix.foundation.errors import InputError, WorkError
from privmix.foundation.progress import Display
from privmix.foundation.ray_session import connected
from privmix.laboratory.evaluation import comparisons
from privmix.laboratory.evaluation.cases import Case, PlannedCase
from privmix.laboratory.evaluation.ensembles import ComparedEnsembles, TrainedEnsemble
from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.methods import FRACTIONS
from privmix.laboratory.evaluation.options import TUNED_PARTS, TUNED_RUN_TOKENS
from privmix.laboratory.evaluation.results import result
from privmix.laboratory.evaluation.text import EvaluationText, held_out_text
from privmix.laboratory.evaluation.workbench import Workbench
from privmix.privacy.events import Event, GuaranteeStatus
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.settings import Settings
from privmix.training import dp_sgd
from privmix.training.corpus import Corpus, Document
from privmix.training.marks import Marks
from privmix.training.options import DpSgdOptions, Resources, TokenBudget, TrainingOptions
from privmix.training.plan import run_trainings
from privmix.training.split import split
from privmix.training.train import plan

HELD_OUT = 0.2
CONTEXT = 256
TOLERANCE = 0.01
"""The relative perplexity by which the recommended choice may be worse than the best, if it is cheaper."""

# The perplexity if a true token has probability 0.
_INFINITE = Estimate(math.inf, None, None, ())


@dataclass(frozen=True)
class TuningResult:
    """Holds settings on one ensemble and their results.

    Attributes:
        ensemble: the directory of the ensemble.
        base: the epsilon of the private base that the ensemble is on; None on the public model.
        parameters: the content of the configuration's `privacy`, with derived parameters.
        rows: the average number of rows for a token, the public row included.
        perplexity, change: over the runs; `change` is the ratio to the public model's on the same tokens.
        on_front: whether no choice of the same guarantee is better in rows or perplexity and not worse in the other.
    """

    label: str
    ensemble: Path
    parts: int
    protocol: str
    parameters: Mapping[str, Any]
    status: str
    rows: float
    perplexity: Estimate
    change: Estimate
    on_front: bool = False
    base: float | None = None


@dataclass(frozen=True)
class Tuning:
    """Holds all choices, sorted by rows and perplexity. `recommended` is certified."""

    budget: TokenBudget
    positions: int
    runs: int
    choices: tuple[TuningResult, ...]
    recommended: TuningResult


def refuse_private(sample: Sequence[Document], marks: Marks, where: str) -> None:
    """Checks that a sample shares no users and texts with the private corpus.

    Raises:
        InputError: the sample shares a user or a text.
    """
    shared = marks.overlap(sample)
    if shared:
        raise InputError(
            f"set-aside: {shared.users} of its users and {shared.texts} of its {len(sample)} texts are in {where}: "
            "tuning on private text reveals information that no ledger charges. Choose a public sample, or text that "
            "was set aside and is not used for training; give different users different ids"
        )


def tune(
    sample: Corpus,
    output: Path,
    budget: TokenBudget,
    *,
    parts: Sequence[int] = TUNED_PARTS,
    base_shares: Sequence[float] = (),
    ensembles: Sequence[Path] = (),
    runs: int = 3,
    run_tokens: int | None = None,
    drawn: int | None = None,
    model: str | None = None,
    training: TrainingOptions | None = None,
    any_guarantee: bool = False,
    display: Callable[[], Display] = Display,
) -> Tuning:
    """Evaluates every choice in `output` and keeps earlier results.

    Args:
        parts: the numbers of parts to train on one side of the sample, split by user. The other side is evaluated.
        base_shares: shares of epsilon. For each, a base is trained by DP-SGD, and on it the largest number of parts. A
            sample of fewer users than the corpus has underestimates a base, which learns from all of them at once.
        ensembles: ensembles trained on other public or set-aside text, instead of training. Then the whole sample is
            evaluated. One of them must be on the public model.
        run_tokens, drawn: see `EvaluationOptions`; a run has the budget's tokens, by default at most
            `TUNED_RUN_TOKENS`.
        any_guarantee: also evaluate methods with published or data-dependent guarantees. They are never recommended.
        display: creates the display of one step.

    Raises:
        InputError: an argument is invalid.
        WorkError: an adapter or an evaluation failed.
    """
    output.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(output / ".tuning.lock", timeout=0), ExitStack() as cluster:
            if not ensembles:
                cluster.enter_context(connected())
                options = training or TrainingOptions()
                sample, ensembles = _train(sample, output, parts, model, options, budget, base_shares, display)
            loaded = ComparedEnsembles.load(list(ensembles), None, ())
            if loaded.main.base_training is not None:
                raise InputError(
                    f"ensemble {loaded.main.directory}: is on a private base; give one on the public model, too, with "
                    "which others are compared"
                )
            with display() as shown:
                text = _text(list(sample), loaded, run_tokens or min(budget.tokens, TUNED_RUN_TOKENS), runs, shown)
                bench = Workbench(loaded.base, loaded.main.manifest.base_revision, text, output, "auto", shown)
                return _Search(loaded, bench, budget, drawn).tuning(any_guarantee, cluster)
    except Timeout as error:
        raise WorkError(f"output {output}: another tuning is writing to it; wait or stop it") from error


def candidates(
    budget: TokenBudget, parts: int, any_guarantee: bool, drawn: int | None = None, base: Event | None = None
) -> Iterator[Settings]:
    """Yields the settings to evaluate on an ensemble of ``parts`` parts that the budget allows.

    Args:
        base: the event of the private base that the budget pays besides the tokens.
        drawn: the number of parts that are scored at a position. With fewer than all, protocols draw no more for a
            token, and those that need all parts are left out.
    """
    fractions = sorted({q for q in (1 / parts, *FRACTIONS) if q * parts >= 1})
    tuned = (each for name in PROTOCOLS for each in comparisons.tuned(name, parts, budget.limits(), fractions))
    for chosen in dict.fromkeys(tuned if drawn is None or drawn >= parts else _drawing(tuned, drawn)):
        settings = chosen.on_base(base)
        status = _status(settings, parts)
        if status == "certified" or (any_guarantee and status is not None):
            yield settings


def _drawing(tuned: Iterable[Settings], drawn: int) -> Iterator[Settings]:
    for settings in tuned:
        with suppress(ValueError):
            yield comparisons.drawing(settings, drawn)


def _status(settings: Settings, parts: int) -> GuaranteeStatus | None:
    """Returns the status of the guarantee; None if the budget does not allow these settings."""
    try:
        return settings.plan(parts).guarantee.status
    except ValueError:
        return None


def front(choices: Sequence[TuningResult]) -> set[int]:
    """Returns the indices of the Pareto front: no choice of the same guarantee, or a certified one, beats them."""
    return {index for index, choice in enumerate(choices) if not any(_beats(other, choice) for other in choices)}


def recommend(choices: Sequence[TuningResult]) -> TuningResult:
    """Returns the cheapest certified choice whose perplexity is within `TOLERANCE` of the best certified one."""
    certified = [choice for choice in choices if choice.status == "certified"]
    best = min(choice.perplexity.mean for choice in certified)
    near = [choice for choice in certified if choice.perplexity.mean <= best * (1 + TOLERANCE)]
    return min(near, key=_by_rows)


def _by_rows(choice: TuningResult) -> tuple[float, float]:
    return choice.rows, choice.perplexity.mean


def _beats(first: TuningResult, second: TuningResult) -> bool:
    if first.status not in ("certified", second.status):
        return False
    rows, perplexity = _by_rows(first)
    other_rows, other_perplexity = _by_rows(second)
    return rows <= other_rows and perplexity <= other_perplexity and _by_rows(first) != _by_rows(second)


def _train(
    sample: Corpus,
    output: Path,
    parts: Sequence[int],
    model: str | None,
    options: TrainingOptions,
    budget: TokenBudget,
    base_shares: Sequence[float],
    display: Callable[[], Display],
) -> tuple[Corpus, list[Path]]:
    for share in base_shares:
        if not 0 < share < 1:
            raise InputError(f"base-share: must lie between 0 and 1, not {share:g}")
    texts = output / "corpus"
    train_file, held_out = texts / "train.jsonl", texts / "heldout.jsonl"
    with display() as shown:
        sample.report = shown.read
        split(sample, train_file, held_out, fraction=HELD_OUT, salt_file=texts / "split.salt")
    ensembles, corpus = output / "ensembles", Corpus(train_file)
    directories = [ensembles / str(count) for count in parts]
    bases = {share: ensembles / f"base-{share:g}" for share in base_shares}
    plans = [
        dp_sgd.plan(corpus, base, private=DpSgdOptions(epsilon=share * budget.epsilon, delta=budget.delta), model=model)
        for share, base in bases.items()
    ]
    plans += [
        plan(corpus, directory, parts=count, model=model, options=options)
        for count, directory in zip(parts, directories, strict=True)
    ]
    run_trainings(plans, Resources(), display())
    above = {base: ensembles / f"{max(parts)}-on-{base.name}" for base in bases.values()}
    on_bases = [
        plan(corpus, directory, parts=max(parts), model=str(base), options=options) for base, directory in above.items()
    ]
    if on_bases:
        run_trainings(on_bases, Resources(), display())
    return Corpus(held_out), [*directories, *above.values()]


def _text(
    sample: Sequence[Document], ensembles: ComparedEnsembles, tokens: int, runs: int, display: Display
) -> EvaluationText:
    from transformers import AutoTokenizer

    display.say("reading the sample")
    return held_out_text(
        sample, AutoTokenizer.from_pretrained(ensembles.base), context=CONTEXT, tokens=tokens, runs=runs
    )


class _Search:
    """Computes the rows of all models and the outcomes of all choices on a workbench."""

    def __init__(self, ensembles: ComparedEnsembles, bench: Workbench, budget: TokenBudget, drawn: int | None) -> None:
        self._bench = bench
        self._runs = range(len(bench.text.runs))
        self._ensembles = sorted(ensembles.all, key=lambda each: (each.base_training is not None, each.parts))
        self._of = {ensemble.directory: ensemble for ensemble in self._ensembles}
        self._budget = budget
        self._drawn = drawn

    def tuning(self, any_guarantee: bool, cluster: ExitStack) -> Tuning:
        models = ((ensemble, ensemble.manifest.parts) for ensemble in self._ensembles)
        self._bench.compute_rows(models, cluster, self._drawn)
        protocols = [
            self._planned(settings, ensemble)
            for ensemble in self._ensembles
            for settings in candidates(self._budget, ensemble.parts, any_guarantee, self._drawn, _event(ensemble))
        ]
        self._bench.compute_outcomes(((run, planned) for run in self._runs for planned in protocols), cluster)
        public = next(planned for planned in protocols if planned.protocol.rows == 0)
        # The public model's result is the same for all ensembles, so only the first is kept.
        kept = [planned for planned in protocols if planned is public or planned.protocol.rows != 0]
        choices = sorted((self._choice(planned, public) for planned in kept), key=_by_rows)
        on_front = front(choices)
        marked = tuple(replace(choice, on_front=index in on_front) for index, choice in enumerate(choices))
        return Tuning(self._budget, len(self._bench.text.runs[0]), len(self._runs), marked, recommend(marked))

    def _choice(self, planned: PlannedCase, public: PlannedCase) -> TuningResult:
        runs = len(self._runs)
        outcomes, public_outcomes = (self._bench.outcomes.first(case, runs) for case in (planned, public))
        settings, protocol = planned.case.settings, planned.protocol
        training = self._of[planned.case.ensemble].base_training
        base = None if training is None else training.epsilon
        measured = result(comparisons.label(settings), planned.case, protocol, outcomes, public_outcomes, base=base)
        return TuningResult(
            label=measured.name,
            ensemble=planned.case.ensemble,
            parts=protocol.parts,
            protocol=measured.protocol,
            parameters=measured.parameters,
            status=measured.status,
            rows=1 + protocol.expected_rows,
            perplexity=measured.perplexity or _INFINITE,
            change=measured.change or _INFINITE,
            base=base,
        )

    def _planned(self, settings: Settings, ensemble: TrainedEnsemble) -> PlannedCase:
        return PlannedCase(
            Case(ensemble.directory, settings),
            settings.plan(ensemble.parts),
            self._bench.files(ensemble, ensemble.manifest.parts, self._drawn),
        )


def _event(ensemble: TrainedEnsemble) -> Event | None:
    return None if ensemble.base_training is None else ensemble.base_training.event
