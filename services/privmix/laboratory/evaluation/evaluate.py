"""Evaluates every method on held-out text at the same budget: its perplexity and its actual guarantee.

    evaluate(Corpus(Path("heldout.jsonl")), Path("evaluation"), Ensembles.load([Path("ensemble")]))

Intermediate results are stored below the output directory under hashes of their inputs. So an interrupted evaluation
continues, and one with further methods computes only these. Outputs of private models are private, and so are the
results.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from privmix.budget.sentence import IMPORTED
from privmix.foundation.errors import InputError
from privmix.foundation.files import only_writer
from privmix.foundation.progress import Display
from privmix.foundation.ray_session import connected
from privmix.laboratory.evaluation import methods
from privmix.laboratory.evaluation.cases import Case
from privmix.laboratory.evaluation.ensembles import ComparedEnsembles, TrainedEnsemble, private_training
from privmix.laboratory.evaluation.options import EvaluationOptions
from privmix.laboratory.evaluation.results import Evaluation, Result, ResultTable, impossible, result
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
    with only_writer(output, "evaluation"), display or Display() as shown:
        shown.say("reading the held-out text")
        text = _text(held_out, ensembles, options)
        revision = ensembles.main.public_revision
        bench = Workbench(ensembles.base, revision, text, output, options.precision, shown)
        comparison = _Comparison(ensembles, options, bench)
        with connected():
            comparison.compute()
        return comparison.results()


class _Comparison:
    """Plans and computes the cases of one evaluation."""

    def __init__(self, ensembles: ComparedEnsembles, options: EvaluationOptions, bench: Workbench) -> None:
        self._ensembles = ensembles
        self._options = options
        self._bench = bench
        self._cases: dict[tuple[Path, Settings], Case | str] = {}

    def compute(self) -> None:
        self._bench.compute_rows(self._models())
        rows = (row for value in self._options.points for row in self._methods(value))
        cases = (self._case(ensemble, settings) for _, ensemble, settings in rows)
        self._bench.compute_outcomes([case for case in cases if isinstance(case, Case)])

    def results(self) -> Evaluation:
        main, options, text = self._ensembles.main, self._options, self._bench.text
        return Evaluation(
            positions=len(text.runs[0]),
            runs=len(text.runs),
            apart=text.apart,
            context=options.context,
            base_model=self._ensembles.base.name if main.base_training else main.manifest.base_model,
            sweep=options.sweep,
            tables=tuple(
                ResultTable(
                    value, options.budget(value), tuple(self._result(*method) for method in self._methods(value))
                )
                for value in options.points
            ),
        )

    def _models(self) -> Iterator[tuple[TrainedEnsemble, Sequence[Adapter]]]:
        for ensemble in self._ensembles.all:
            yield ensemble, ensemble.manifest.parts
            yield ensemble, ensemble.halves

    def _methods(self, value: str | None) -> Iterator[tuple[str, TrainedEnsemble, Settings]]:
        """Yields the label, the ensemble and the settings of each row of a table."""
        ensembles, budget = self._ensembles, self._options.budget(value)
        main, finetuned = ensembles.main, ensembles.finetuned
        references: list[tuple[TrainedEnsemble, Settings]] = [(main, PublicSettings())]
        references += [] if finetuned is None else [(finetuned, FinetunedSettings())]
        references += [(main, EnsembleSettings())]
        if (trained := ensembles.dp_sgd_for(budget.epsilon)) is not None:
            references.append((trained, methods.dp_sgd(budget, private_training(trained.manifest))))
        for based in ensembles.on_bases:
            if (training := based.base_training) is not None and training.epsilon <= budget.epsilon:
                references.append((based, methods.dp_sgd(budget, training)))
        yield from ((methods.label(settings), ensemble, settings) for ensemble, settings in references)
        if main.parts > 1:
            yield "One part, not private", main, FinetunedSettings()
        yield from self._private(main, value)
        for other in sorted(ensembles.others, key=lambda ensemble: -ensemble.parts):
            yield methods.label(EnsembleSettings()), other, EnsembleSettings()
            yield from self._private(other, value)

    def _private(self, ensemble: TrainedEnsemble, value: str | None) -> Iterator[tuple[str, TrainedEnsemble, Settings]]:
        """Yields each protocol once: a value of a field can make several alike. The budget pays a private base too."""
        training, labels = ensemble.base_training, dict[Settings, str]()
        halves = bool(ensemble.halves)
        for label, settings in methods.chosen(self._options, value, ensemble.parts, halves, check=False):
            labels.setdefault(settings if training is None else settings.on_base(training.event), label)
        yield from ((label, ensemble, settings) for settings, label in labels.items())

    def _result(self, label: str, ensemble: TrainedEnsemble, settings: Settings) -> Result:
        case, training = self._case(ensemble, settings), ensemble.base_training
        epsilon = None if training is None or isinstance(settings, PublicSettings) else training.epsilon
        if isinstance(case, str):
            return impossible(label, ensemble.directory.name, settings, ensemble.parts, case, base=epsilon)
        public = self._case(self._ensembles.main, PublicSettings())
        assert isinstance(public, Case)
        outcomes, guarantee = self._bench.outcomes, case.protocol.guarantee
        if ensemble.manifest.imported and not isinstance(settings, DpSgdSettings):
            guarantee = guarantee.provided(IMPORTED)
        return result(label, case, outcomes.all(case), outcomes.all(public), guarantee, base=epsilon)

    def _case(self, ensemble: TrainedEnsemble, settings: Settings) -> Case | str:
        """Returns settings with their plan, or why they are impossible. Planning takes a second, so it is kept."""
        key = ensemble.directory, settings
        if key not in self._cases:
            self._cases[key] = self._planned(ensemble, settings)
        return self._cases[key]

    def _planned(self, ensemble: TrainedEnsemble, settings: Settings) -> Case | str:
        name, bench = ensemble.directory.name, self._bench
        if isinstance(settings, PublicSettings):
            return Case(name, settings, settings.plan(ensemble.parts), bench.public_files)
        if isinstance(settings, DpSgdSettings) and ensemble.manifest.dp_sgd is None:  # the base, without parts
            return Case(name, settings, settings.plan(1), bench.base_files(ensemble))
        try:
            protocol = settings.plan(1 if settings.one_model else ensemble.parts)
            _check_base(settings, protocol, ensemble.base_training)
        except ValueError as error:
            return str(error)
        adapters = ensemble.halves if protocol.halves else ensemble.manifest.parts[: protocol.parts]
        return Case(name, settings, protocol, bench.files(ensemble, adapters))


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
    )
