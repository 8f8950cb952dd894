"""Held-out text to the perplexity of every method, at the same budget, with the guarantee that each really has.

    evaluate(Corpus(Path("heldout.jsonl")), Path("evaluation"), Ensembles.load([Path("ensemble")]))

Whatever is computed is kept below the output directory under names that say what it follows from: an evaluation that
was stopped goes on where it was, and one with other methods computes these alone. Distributions of private models are
private, and so are the results.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import ray
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.evaluation import methods, tasks
from services.evaluation.cases import Case, Outcomes, Planned, grouped
from services.evaluation.ensembles import Ensemble, Ensembles
from services.evaluation.methods import QUANTITIES, Budget, Method, Quantity
from services.evaluation.results import Evaluation, Result, SweepPoint, SweepResult, Table, impossible, result
from services.evaluation.rows import PART_TYPE, PUBLIC_TYPE, EnsembleRows, Origin, whole
from services.evaluation.scoring import Precision
from services.evaluation.text import Text, held_out_text
from services.training.corpus import Corpus, Document
from services.training.errors import InputError
from services.training.manifest import Adapter
from services.training.progress import Display
from services.training.tasks import connected

ROWS, OUTCOMES = "rows", "outcomes"
# Protocols of a task: enough to share the reading of rows, few enough that tasks can be spread and resumed.
_PROTOCOLS_AT_ONCE = 6
# What must stay free on the disk beside the rows.
_SPARE = 2**30


class EvaluationOptions(BaseModel):
    """What is evaluated, and how much of it.

    Attributes:
        epsilons: a table for each; sweeps are at the largest.
        tokens: what the budget must last for, and the tokens of a run.
        sweeps: the ablation figures that are wanted.
        sweep_runs: how many of the runs these take, where a table takes all: points of a line are of the same text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epsilons: tuple[float, ...] = Field((2.0, 8.0), min_length=1)
    delta: float = Field(1e-5, gt=0, lt=1)
    tokens: int = Field(1024, ge=1)
    runs: int = Field(5, ge=1)
    context: int = Field(256, ge=2)
    sweeps: tuple[Quantity, ...] = QUANTITIES
    sweep_runs: int = Field(2, ge=1)
    seed: int = Field(0, ge=0)
    precision: Precision = "auto"

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """These options, or an `InputError` that names the first impossible one."""
        try:
            options = cls.model_validate(values)
            _ = options.budgets
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}") from error
        return options

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(Budget(epsilon=each, delta=self.delta, tokens=self.tokens) for each in sorted(self.epsilons))


def evaluate(
    held_out: Corpus, output: Path, ensembles: Ensembles, options: EvaluationOptions, display: Display | None = None
) -> Evaluation:
    """Compute what is missing in `output`, on the connected Ray cluster or one started for this call.

    Raises:
        InputError: something given cannot be used (`CorpusError` and `ManifestError` are such).
        EvaluationError: a task failed, or another evaluation is writing to `output`.
    """
    with _only_writer(output), display or Display() as shown:
        shown.say("reading the held-out text")
        documents = list(held_out)
        text = _text(documents, ensembles, options)
        comparison = _Comparison(ensembles, options, text, output, shown)
        with ExitStack() as cluster:
            comparison.compute_rows(cluster)
            comparison.compute_outcomes(cluster)
        return comparison.results(documents)


class _Comparison:
    """The cases of one evaluation, and where what they need is kept."""

    def __init__(
        self, ensembles: Ensembles, options: EvaluationOptions, text: Text, output: Path, display: Display
    ) -> None:
        self._ensembles = ensembles
        self._options = options
        self._text = text
        self._rows = output / ROWS
        self._display = display
        self._outcomes = Outcomes(output / OUTCOMES, text)
        self._halves = bool(ensembles.main.halves)
        self._planned: dict[Case, Planned | str] = {}

    def compute_rows(self, cluster: ExitStack) -> None:
        """The public model first: the others are kept as differences from it.

        Args:
            cluster: where a Ray cluster is entered, once something is missing.
        """
        self._rows.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted: dict[Path, tuple[Path | None, str]] = {self._path(None): (None, "public model")}
        for ensemble in self._ensembles.all:
            halves = ensemble.halves if ensemble is self._ensembles.main else ()
            for adapter in (*ensemble.manifest.parts, *halves):
                path = ensemble.manifest.adapter_path(ensemble.directory, adapter)
                wanted[self._path(adapter)] = path, f"{ensemble.directory.name}/{adapter.name}"
        for path in set(self._rows.iterdir()) - set(wanted):
            path.unlink()  # of another text or ensemble: private, and to no purpose
        missing = {path: of for path, of in wanted.items() if not whole(path, self._text.positions)}
        if not missing:
            return
        _check_room(self._rows, len(missing), self._text.positions * _vocabulary(self._ensembles.base))
        cluster.enter_context(connected())
        text = ray.put(self._text)
        public = self._path(None)
        for stage in ([public], [path for path in missing if path != public]):
            jobs = {
                missing[path][1]: (
                    *(self._ensembles.base, missing[path][0], text, self._options.precision, path),
                    None if path == public else public,
                )
                for path in stage
                if path in missing
            }
            if jobs:
                self._display.say(f"computing the distributions of {len(jobs)} models")
            for _ in tasks.spread(tasks.score, jobs, self._display, gpus=True):
                pass

    def compute_outcomes(self, cluster: ExitStack) -> None:
        self._display.say("planning every method")
        for case, _ in self._cases():
            self._plan(case)
        jobs = grouped(self._missing(), _PROTOCOLS_AT_ONCE)
        if not jobs:
            return
        cluster.enter_context(connected())
        several = [each for _, together in jobs.values() for each in together]
        self._display.say(f"evaluating {len(set(map(id, several)))} protocols, {len(several)} runs of them in all")
        arguments = {
            name: (
                [(each.case.settings, each.protocol) for each in several],
                several[0].files,
                self._text.runs[run],
                self._text.true_tokens[self._text.runs[run]],
            )
            for name, (run, several) in jobs.items()
        }
        for name, outcomes in tasks.spread(tasks.trials, arguments, self._display):
            run, several = jobs[name]
            for planned_one, outcome in zip(several, outcomes, strict=True):
                self._outcomes.put(planned_one, run, outcome)

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
            base_model=main.manifest.base_model,
            tables=tuple(Table(budget, tuple(self._table(budget))) for budget in options.budgets),
            sweep_runs=self._sweep_runs,
            sweeps=tuple(self._sweeps()),
        )

    def _missing(self) -> Iterator[tuple[int, Planned]]:
        """Each protocol with a run whose outcome is not known."""
        runs: dict[Case, int] = {}
        for case, count in self._cases():
            runs[case] = max(count, runs.get(case, 0))
        for run in range(len(self._text.runs)):
            for case, count in runs.items():
                planned = self._planned[case]
                if isinstance(planned, Planned) and run < count and self._outcomes.get(planned, run) is None:
                    yield run, planned

    def _cases(self) -> Iterator[tuple[Case, int]]:
        """What is wanted, and over how many runs."""
        for budget in self._options.budgets:
            yield from ((case, len(self._text.runs)) for _, case in self._rows_of_table(budget))
        for _, points in self._swept():
            yield from ((case, self._sweep_runs) for _, _, case in points)

    @property
    def _sweep_runs(self) -> int:
        return min(self._options.sweep_runs, len(self._text.runs))

    def _rows_of_table(self, budget: Budget) -> Iterator[tuple[str, Case]]:
        main = self._ensembles.main
        yield from self._references()
        if self._ensembles.dp_sgd is not None:
            yield self._case(self._ensembles.dp_sgd, methods.dp_sgd(budget, self._ensembles.dp_sgd.manifest))
        for method in methods.private(budget, main.parts, self._halves):
            yield self._case(main, method)

    def _references(self) -> Iterator[tuple[str, Case]]:
        main, finetuned = self._ensembles.main, self._ensembles.finetuned
        yield self._case(main, methods.public())
        if finetuned is not None:
            yield self._case(finetuned, methods.finetuned())
        yield self._case(main, methods.ensemble())

    def _swept(self) -> Iterator[tuple[Quantity, list[tuple[float, str, Case]]]]:
        main, budget = self._ensembles.main, self._options.budgets[-1]
        for sweep in methods.sweeps(budget, main.parts, self._halves):
            if sweep.quantity not in self._options.sweeps:
                continue
            yield sweep.quantity, [(point.value, *self._case(main, point.method)) for point in sweep.points]
        sizes = sorted((main, *self._ensembles.others), key=lambda each: each.parts)
        if len(sizes) > 1 and "parts" in self._options.sweeps:
            of_size = [(each, method) for each in sizes for method in methods.of_size(budget, each.parts)]
            yield "parts", [(float(each.parts), *self._case(each, method)) for each, method in of_size]

    def _case(self, ensemble: Ensemble, method: Method) -> tuple[str, Case]:
        return method.label, Case(ensemble.directory, method.settings)

    def _table(self, budget: Budget) -> Iterable[Result]:
        runs = len(self._text.runs)
        return [self._result(label, case, runs) for label, case in self._rows_of_table(budget)]

    def _sweeps(self) -> Iterator[SweepResult]:
        runs = self._sweep_runs
        references = tuple(self._result(label, case, runs) for label, case in self._references())
        for quantity, points in self._swept():
            found = tuple(SweepPoint(value, self._result(label, case, runs)) for value, label, case in points)
            yield SweepResult(quantity, self._options.budgets[-1], found, references)

    def _result(self, label: str, case: Case, runs: int) -> Result:
        planned = self._planned[case]
        if isinstance(planned, str):
            return impossible(label, case.settings, self._of(case).parts, planned)
        public = self._planned[self._case(self._ensembles.main, methods.public())[1]]
        assert isinstance(public, Planned)
        own, theirs = self._outcomes.first(planned, runs), self._outcomes.first(public, runs)
        return result(label, case.settings, planned.protocol, own, theirs)

    def _plan(self, case: Case) -> None:
        if case in self._planned:
            return
        ensemble = self._of(case)
        try:
            protocol = case.settings.plan(ensemble.parts)
        except ValueError as error:
            self._planned[case] = str(error)
            return
        adapters = ensemble.halves if protocol.halves else ensemble.manifest.parts
        files = EnsembleRows(self._path(None), tuple(self._path(adapter) for adapter in adapters))
        self._planned[case] = Planned(case, protocol, files)

    def _of(self, case: Case) -> Ensemble:
        return next(each for each in self._ensembles.all if each.directory == case.ensemble)

    def _path(self, adapter: Adapter | None) -> Path:
        origin = Origin(
            base=self._ensembles.main.manifest.base_revision,
            adapter=None if adapter is None else adapter.sha256,
            text=self._text.digest,
            precision=self._options.precision,
        )
        return self._rows / origin.file


def _text(documents: Iterable[Document], ensembles: Ensembles, options: EvaluationOptions) -> Text:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensembles.base)
    return held_out_text(
        documents,
        tokenizer,
        context=options.context,
        tokens=options.tokens,
        runs=options.runs,
        seed=options.seed,
    )


def _vocabulary(base: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(base).get_text_config().vocab_size)


def _check_room(directory: Path, models: int, values: int) -> None:
    wanted = values * (PUBLIC_TYPE().itemsize + models * PART_TYPE().itemsize)
    free = shutil.disk_usage(directory).free
    if wanted + _SPARE > free:
        raise InputError(
            f"output {directory.parent}: the distributions of {models} models take {wanted / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} are free; make room, or ask for fewer --runs or --tokens"
        )


@contextmanager
def _only_writer(output: Path) -> Iterator[None]:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {output}: cannot be made: {error.strerror}") from error
    try:
        with FileLock(output / ".evaluation.lock", timeout=0):
            yield
    except Timeout as error:
        raise tasks.EvaluationError(
            f"output {output}: another evaluation is writing to it; wait for it or stop it"
        ) from error
