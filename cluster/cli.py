"""The command `privmix`: one file of `cluster.commands` for each of its verbs."""

import sys

import typer

from cluster.commands.audit import audit
from cluster.commands.budget import budget
from cluster.commands.compare import compare
from cluster.commands.demo import demo_corpus
from cluster.commands.evaluate import evaluate
from cluster.commands.ledger import ledger
from cluster.commands.plan import plan
from cluster.commands.protocols import protocols
from cluster.commands.quickstart import quickstart
from cluster.commands.scale import scale
from cluster.commands.serve import serve
from cluster.commands.split import split
from cluster.commands.status import status
from cluster.commands.topology import topology
from cluster.commands.train import train
from cluster.commands.tune import tune
from cluster.configuration import ConfigurationError
from cluster.parameters import ACCEPTED
from services.budget.errors import LedgerError
from services.training.errors import InputError, TrainingError

EXPECTED = (ConfigurationError, InputError, LedgerError, TrainingError)
"""What a person can mend: told in words, without a traceback."""

app = typer.Typer(
    name="privmix",
    help="Next-token serving from models fine-tuned on private text, with a differential-privacy guarantee for it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    quickstart,
    demo_corpus,
    train,
    split,
    tune,
    evaluate,
    compare,
    protocols,
    topology,
    serve,
    status,
    scale,
    budget,
):
    app.command()(command)
app.command(context_settings=ACCEPTED)(plan)
app.add_typer(ledger)
app.add_typer(audit)


def main() -> None:
    try:
        app()
    except EXPECTED as error:
        print(f"privmix: {error}", file=sys.stderr)
        sys.exit(1)
