"""Runs a whole comparison from one corpus: splits it by user, trains ensembles of several sizes, evaluates all methods.

Each step keeps its results in the output directory and continues there when it runs again.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from privmix.engine import PartKind
from privmix.foundation.errors import InputError
from privmix.foundation.progress import Display
from privmix.foundation.ray_session import connected
from privmix.laboratory.evaluation.ensembles import ComparedEnsembles
from privmix.laboratory.evaluation.evaluate import evaluate
from privmix.laboratory.evaluation.options import COMPARED_PARTS, EvaluationOptions
from privmix.laboratory.evaluation.results import Evaluation
from privmix.training import dp_sgd, train
from privmix.training.corpus import Corpus
from privmix.training.options import PLAIN_TARGETS, DpSgdOptions, Resources, TrainingOptions
from privmix.training.plan import run_trainings
from privmix.training.split import split

_READERS = TrainingOptions(block=128, batch=1, epochs=2)
"""Few passes over the text in small steps: on two processor cores, 190,000 tokens take 12 minutes."""
_PLAIN = _READERS.model_copy(update={"part_kind": "lora", "targets": PLAIN_TARGETS})
_TRAINING: Mapping[PartKind, TrainingOptions] = {
    "reader": _READERS,
    "lora": _PLAIN,
    "text": TrainingOptions(part_kind="text"),
}


def compare(
    corpus: Corpus,
    output: Path,
    *,
    parts: Sequence[int] = COMPARED_PARTS,
    held_out: float = 0.1,
    user_limit: int | None = None,
    model: str | None = None,
    part_kind: PartKind = "reader",
    references: bool = True,
    on_base: float | None = None,
    resources: Resources | None = None,
    options: EvaluationOptions | None = None,
    display: Callable[[], Display] = Display,
) -> Evaluation:
    """Splits the corpus, trains missing models and evaluates in `output`.

    Args:
        parts: the numbers of parts. The largest also has models of half-parts if `options` include SubMix.
        held_out, user_limit: see `split`.
        part_kind: what a part is. With "text", only the references are trained.
        references: also train what the parts are compared with: a model without privacy, and DP-SGD by user for each
            epsilon, by the default recipe of `privmix train-base`.
        on_base: also train the largest ensemble on a private base, for each epsilon: DP-SGD by user with this share of
            it. None trains no base.
        display: creates the display of one step.

    Raises:
        InputError: an argument is invalid.
        WorkError: an adapter or an evaluation failed.
    """
    if min(parts, default=0) < 2:
        raise InputError("parts: give numbers of at least 2; the model of the whole corpus is trained anyway")
    if on_base is not None and not 0 < on_base < 1:
        raise InputError(f"on-base: must lie between 0 and 1, not {on_base:g}")
    texts, ensembles = output / "corpus", output / "ensembles"
    train_file, held_out_file = texts / "train.jsonl", texts / "heldout.jsonl"
    with display() as shown:
        corpus.report = shown.read
        split(
            corpus,
            train_file,
            held_out_file,
            fraction=held_out,
            salt_file=texts / "split.salt",
            user_limit=user_limit,
        )
    options = options or EvaluationOptions()
    largest = max(parts)
    sizes = {count: ensembles / (f"{count}" if part_kind == "reader" else f"{part_kind}-{count}") for count in parts}
    finetuned = ensembles / "1" if references else None
    private = {epsilon: ensembles / f"dp-sgd-{epsilon:g}" for epsilon in options.epsilons} if references else {}
    below = [] if on_base is None else [on_base * epsilon for epsilon in options.epsilons]
    bases = {epsilon: ensembles / f"dp-sgd-{epsilon:g}" for epsilon in below}
    with connected():
        plans = [
            dp_sgd.plan(
                Corpus(train_file), directory, private=DpSgdOptions(epsilon=epsilon, delta=options.delta), model=model
            )
            for epsilon, directory in (private | bases).items()
        ]
        # Train the adapters with the most text first, so that no machine waits for them at the end.
        if finetuned is not None:
            plans.append(train.plan(Corpus(train_file), finetuned, parts=1, model=model, options=_PLAIN))
        plans += [
            train.plan(
                Corpus(train_file),
                directory,
                parts=count,
                halves=count == largest and options.needs_halves(count),
                model=model,
                options=_TRAINING[part_kind],
            )
            for count, directory in sorted(sizes.items())
        ]
        run_trainings(plans, resources or Resources(), display())
        above = {directory: ensembles / f"{largest}-on-{directory.name}" for directory in bases.values()}
        run_trainings(
            [
                train.plan(Corpus(train_file), directory, parts=largest, model=str(base), options=_TRAINING[part_kind])
                for base, directory in above.items()
            ],
            resources or Resources(),
            display(),
        )
        loaded = ComparedEnsembles.load([*sizes.values(), *above.values()], finetuned, list(private.values()))
        return evaluate(Corpus(held_out_file), output, loaded, options, display())
