"""Evaluates every method on held-out text at the same budget: its perplexity and its actual guarantee.

    evaluate(Corpus(Path("heldout.jsonl")), Path("evaluation"), Ensembles.load([Path("ensemble")]))

Intermediate results are stored below the output directory under hashes of their inputs. So an interrupted evaluation
continues, and one with further methods computes only these. Outputs of private models are private, and so are the
results.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from privmix.foundation.errors import InputError, WorkError
from privmix.foundation.progress import Display
from privmix.laboratory.evaluation import methods
from privmix.laboratory.evaluation.cases import Case, PlannedCase
from privmix.laboratory.evaluation.ensembles import ComparedEnsembles, TrainedEnsemble, private_training
from privmix.laboratory.evaluation.options import EvaluationOptions
from privmix.laboratory.evaluation.results import (
    Evaluation,
    Result,
    ResultTable,
    impossible,
    result,
)
from privmix.laboratory.evaluation.text import EvaluationText, held_out_text
from privmix.laboratory.evaluation.workbench import Workbench
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.dp_sgd import DpSgdSettings
from privmix.privacy.protocols.ensemble import EnsembleSettings
from privmix.privacy.protocols.finetuned import FinetunedSettings
from privmix.privacy.protocols.public import PublicSettings
from privmix.privacy.settings import Settings
from privmix.training.corpus import Corpus, Document
from privmix.training.manifest import Adapter, PrivateTraining

_WITHOUT_BASE = (PublicSettings, EnsembleSettings, FinetunedSettings, DpSgdSettings)
"""Settings that no private base is charged to: they have no budget, or are the base itself."""


def evaluate(
    held_out: Corpus,
    output: Path,
    ensembles: ComparedEnsembles,
    options: EvaluationOptions,
    display: Display | None = None,
) -> Evaluation:
    """Computes the missing results in `output`, on the connected Ray cluster or on one started for this call.

    Raises:
        InputError: an argument is invalid (includes `CorpusError` and `ManifestError`).
        WorkError: a task failed, or another evaluation is writing to `output`.
    """
    _check_names(ensembles)
    for value in options.points:
        methods.chosen(options, value, ensembles.main.parts, bool(ensembles.main.halves))
    with _only_writer(output), display or Display() as shown:
        shown.say("reading the held-out text")
        documents = list(held_out)
        text = _text(documents, ensembles, options)
        revision = ensembles.main.public_revision
        bench = Workbench(ensembles.base, revision, text, output, options.precision, shown)
        comparison = _Comparison(ensembles, options, bench)
        with ExitStack() as cluster:
            comparison.compute(cluster)
        return comparison.results(documents)


class _Comparison:
    """Plans and computes the cases of one evaluation."""

    def __init__(self, ensembles: ComparedEnsembles, options: EvaluationOptions, bench: Workbench) -> None:
        self._ensembles = ensembles
        self._options = options
        self._bench = bench
        self._text = bench.text
        self._halves = bool(ensembles.main.halves)
        self._planned: dict[Case, PlannedCase | str] = {}

    def compute(self, cluster: ExitStack) -> None:
        self._bench.compute_rows(self._models(), cluster)
        for value in self._options.points:
            for _, case in self._rows_of_table(value):
                self._plan(case)
        self._bench.compute_outcomes(self._wanted(), cluster)

    def results(self, documents: list[Document]) -> Evaluation:
        main, options = self._ensembles.main, self._options
        return Evaluation(
            documents=len(documents),
            users=len({document.user for document in documents}),
            positions=len(self._text.runs[0]),
            runs=len(self._text.runs),
            apart=self._text.apart,
            context=options.context,
            parts=main.parts,
            halves=self._halves,
            base_model=self._ensembles.base.name if main.base_training else main.manifest.base_model,
            sweep=options.sweep,
            tables=tuple(
                ResultTable(value, options.budget(value), tuple(self._table(value))) for value in options.points
            ),
        )

    def _models(self) -> Iterator[tuple[TrainedEnsemble, Sequence[Adapter]]]:
        main = self._ensembles.main
        yield from ((ensemble, ensemble.manifest.parts) for ensemble in self._ensembles.all)
        if self._halves:
            yield main, main.halves

    def _wanted(self) -> Iterator[tuple[int, PlannedCase]]:
        """Yields each run with each of its protocols."""
        for run in range(len(self._text.runs)):
            for planned in self._planned.values():
                if isinstance(planned, PlannedCase):
                    yield run, planned

    def _rows_of_table(self, value: str | None) -> Iterator[tuple[str, Case]]:
        main, budget = self._ensembles.main, self._options.budget(value)
        yield from self._references()
        if (trained := self._ensembles.dp_sgd_for(budget.epsilon)) is not None:
            yield self._case(trained, methods.dp_sgd(budget, private_training(trained.manifest)))
        for based in self._ensembles.on_bases:
            if (training := based.base_training) is not None and training.epsilon <= budget.epsilon:
                yield self._case(based, methods.dp_sgd(budget, training))
        yield from self._included(main, value, self._halves)
        for other in sorted(self._ensembles.others, key=lambda ensemble: -ensemble.parts):
            yield self._case(other, EnsembleSettings())
            yield from self._included(other, value, halves=False)

    def _included(self, ensemble: TrainedEnsemble, value: str | None, halves: bool) -> Iterator[tuple[str, Case]]:
        """Yields each case to evaluate once: a value of a field can make several alike."""
        labels: dict[Case, str] = {}
        for label, settings in methods.chosen(self._options, value, ensemble.parts, halves, check=False):
            labels.setdefault(self._case(ensemble, settings)[1], label)
        yield from ((label, case) for case, label in labels.items())

    def _references(self) -> Iterator[tuple[str, Case]]:
        main, finetuned = self._ensembles.main, self._ensembles.finetuned
        yield self._case(main, PublicSettings())
        if finetuned is not None:
            yield self._case(finetuned, FinetunedSettings())
        yield self._case(main, EnsembleSettings())

    def _case(self, ensemble: TrainedEnsemble, settings: Settings) -> tuple[str, Case]:
        """Returns settings, of which the budget pays the ensemble's private base too, and their label."""
        training = ensemble.base_training
        if training is not None and not isinstance(settings, _WITHOUT_BASE):
            settings = settings.on_base(training.event)
        return methods.label(settings), Case(ensemble.directory, settings)

    def _table(self, value: str | None) -> Iterator[Result]:
        runs = len(self._text.runs)
        return (self._result(label, case, runs) for label, case in self._rows_of_table(value))

    def _result(self, label: str, case: Case, runs: int) -> Result:
        planned = self._planned[case]
        training = self._of(case).base_training
        epsilon = None if training is None or isinstance(case.settings, PublicSettings) else training.epsilon
        if isinstance(planned, str):
            return impossible(label, case, self._of(case).parts, planned, base=epsilon)
        public = self._planned[self._case(self._ensembles.main, PublicSettings())[1]]
        assert isinstance(public, PlannedCase)
        outcomes, public_outcomes = (self._bench.outcomes.first(protocol, runs) for protocol in (planned, public))
        return result(label, case, planned.protocol, outcomes, public_outcomes, base=epsilon)

    def _plan(self, case: Case) -> None:
        if case in self._planned:
            return
        ensemble = self._of(case)
        if isinstance(case.settings, PublicSettings):
            self._planned[case] = PlannedCase(case, case.settings.plan(ensemble.parts), self._bench.public_files)
        elif isinstance(case.settings, DpSgdSettings) and ensemble.manifest.dp_sgd is None:  # the base, without parts
            self._planned[case] = PlannedCase(case, case.settings.plan(1), self._bench.base_files(ensemble))
        else:
            try:
                protocol = case.settings.plan(ensemble.parts)
                _check_base(case.settings, protocol, ensemble.base_training)
            except ValueError as error:
                self._planned[case] = str(error)
                return
            adapters = ensemble.halves if protocol.halves else ensemble.manifest.parts
            self._planned[case] = PlannedCase(case, protocol, self._bench.files(ensemble, adapters))

    def _of(self, case: Case) -> TrainedEnsemble:
        return next(ensemble for ensemble in self._ensembles.all if ensemble.directory == case.ensemble)


def _check_base(settings: Settings, protocol: Protocol, base: PrivateTraining | None) -> None:
    """Raises `ValueError` if a private base costs more than the budget, or if its cost cannot be added to it."""
    if base is None or isinstance(settings, _WITHOUT_BASE):
        return
    if base.event.adjacency != protocol.guarantee.adjacency:
        raise ValueError(
            f"its guarantee is for a {protocol.guarantee.adjacency} and the private base's for a {base.event.adjacency}"
        )
    if settings.epsilon is not None and base.epsilon > settings.epsilon:
        raise ValueError(f"the private base alone cost epsilon {base.epsilon:g}")


def _check_names(ensembles: ComparedEnsembles) -> None:
    """Raises `InputError` if two ensembles cannot be told apart in the report."""
    directories: dict[str, Path] = {}
    for ensemble in (ensembles.main, *ensembles.others):
        directory = ensemble.directory
        same = directories.setdefault(directory.name, directory)
        if same != directory:
            raise InputError(f"ensemble: {same} and {directory} have one name, and the report shows names; rename one")


def _text(documents: Iterable[Document], ensembles: ComparedEnsembles, options: EvaluationOptions) -> EvaluationText:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensembles.base)
    return held_out_text(
        documents,
        tokenizer,
        context=options.context,
        tokens=options.run_tokens or min(options.budget(value).tokens for value in options.points),
        runs=options.runs,
        seed=options.seed,
    )


@contextmanager
def _only_writer(output: Path) -> Iterator[None]:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {output}: cannot be created: {error.strerror}") from error
    try:
        with FileLock(output / ".evaluation.lock", timeout=0):
            yield
    except Timeout as error:
        raise WorkError(f"output {output}: another evaluation is writing to it; wait for it or stop it") from error
