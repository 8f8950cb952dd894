"""Implements `privmix train-base`, which trains one model with DP-SGD from a private corpus."""

import time
from typing import Annotated

from privmix.training.options import DP_SGD_TRAINING, DpSgdOptions
from privmix_cluster.commands.train import report_training, train_model
from privmix_cluster.option_groups import FieldsOf, Given, grouped
from privmix_cluster.options import CorpusArgument, CorpusOptions, RunOptions

GUARANTEE = ("epsilon", "delta", "clip", "blocks", "steps", "expected_batch", "population")
RECIPE = {
    "LoRA": ("rank", "alpha", "targets"),
    "Optimiser": ("learning_rate", "weight_decay", "block", "precision"),
}


@grouped
def train_base(
    corpus: CorpusArgument,
    run: RunOptions,
    guarantee: Annotated[Given, FieldsOf(DpSgdOptions(), {"Guarantee": GUARANTEE})],
    reading: CorpusOptions,
    recipe: Annotated[Given, FieldsOf(DP_SGD_TRAINING, RECIPE)],
) -> None:
    """Fine-tune one adapter on the whole private corpus with DP-SGD, to serve it or to train parts on it.

    The exit status is 0 if the training is complete, 2 if the input is invalid, 1 if training failed, and 130 if the
    command was interrupted. Run it again to continue.
    """
    started = time.monotonic()
    documents = reading.corpus(corpus)
    private = DpSgdOptions.checked(**guarantee)
    trained = train_model(documents, run, recipe, private)
    report_training(trained, run, time.monotonic() - started)
