"""A whole comparison from one corpus: split by user, train ensembles of several sizes, evaluate every method.

Each step keeps what it made in the output directory, and goes on there when it is run again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from services.evaluation.ensembles import Ensembles
from services.evaluation.evaluate import EvaluationOptions, evaluate
from services.evaluation.results import Evaluation
from services.evaluation.split import split
from services.progress import Display
from services.ray_session import connected
from services.training import dp_sgd, train
from services.training.corpus import Corpus
from services.training.options import DP_SGD_TRAINING, PLAIN_TARGETS, DpSgdOptions, Resources, TrainingOptions
from services.training.plan import carry_out

PARTS = (16, 8, 4)

TRAINING = TrainingOptions(block=128, batch=1, epochs=1, learning_rate=1e-3)
"""One pass over the text, in small steps: what two processor cores do in half an hour."""

# The model without privacy needs to share nothing.
_PLAIN = {"attention": "own", "targets": PLAIN_TARGETS}
DP_SGD_EPOCHS = 2
"""Over one block of each user, which is all that is read of them: the noise asks for many steps."""
DP_SGD_RATE = 2e-3


def compare(
    corpus: Corpus,
    output: Path,
    *,
    parts: Sequence[int] = PARTS,
    held_out: float = 0.1,
    user_limit: int | None = None,
    model: str | None = None,
    training: TrainingOptions = TRAINING,
    resources: Resources | None = None,
    options: EvaluationOptions | None = None,
    display: Callable[[], Display] = Display,
) -> Evaluation:
    """Split, train what is missing, and evaluate in `output`; DP-SGD is trained for each budget, by user.

    Args:
        parts: the sizes of the ensembles. The first is the table's, with models of half-parts for SubMix.
        held_out, user_limit: see `split`.
        display: makes that of one step.

    Raises:
        InputError: something given cannot be used.
        WorkError: an adapter or an evaluation failed.
    """
    texts, ensembles = output / "corpus", output / "ensembles"
    train_file, held_out_file = texts / "train.jsonl", texts / "heldout.jsonl"
    split(
        corpus,
        train_file,
        held_out_file,
        share=held_out,
        salt_file=texts / "split.salt",
        user_limit=user_limit,
    )
    options = options or EvaluationOptions()
    private = [ensembles / f"dp-sgd-{budget.epsilon:g}" for budget in options.budgets]
    with connected():
        plans = [
            dp_sgd.plan(
                Corpus(train_file),
                directory,
                private=DpSgdOptions(unit="user", epsilon=budget.epsilon, delta=budget.delta),
                model=model,
                options=DP_SGD_TRAINING.model_copy(
                    update={"block": training.block, "epochs": DP_SGD_EPOCHS, "learning_rate": DP_SGD_RATE}
                ),
            )
            for budget, directory in zip(options.budgets, private, strict=True)
        ]
        # The adapters with most text first, so that no machine waits at the end for one of these.
        plans += [
            train.plan(
                Corpus(train_file),
                ensembles / str(count),
                parts=count,
                halves=count == parts[0],
                model=model,
                options=training if count > 1 else training.model_copy(update=_PLAIN),
            )
            for count in sorted({1, *parts})
        ]
        carry_out(plans, resources or Resources(), display())
        several = Ensembles.load([ensembles / str(count) for count in parts], ensembles / "1", private)
        return evaluate(Corpus(held_out_file), output, several, options, display())
