"""The command `privmix`: one file of `cluster.commands` for each of its verbs."""

from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from cluster.commands.audit import audit
from cluster.commands.budget import budget
from cluster.commands.compare import compare
from cluster.commands.demo import demo_corpus
from cluster.commands.evaluate import evaluate
from cluster.commands.generate import generate
from cluster.commands.heads import heads
from cluster.commands.keys import keys
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
from services.keys.records import KeysError
from services.training.errors import InputError, TrainingError


class Commands(TyperGroup):
    """Tells what a person can mend in words, without a traceback.

    Exits with 2 when something given cannot be used, 1 when the work failed, and 130 when it was interrupted.
    """

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except (ConfigurationError, InputError) as error:
            _end(ctx, str(error), 2)
        except (KeysError, LedgerError, TrainingError) as error:
            _end(ctx, str(error), 1)
        except KeyboardInterrupt:
            _end(ctx, "interrupted; run it again to go on", 130)


def _end(ctx: typer.Context, message: str, code: int) -> NoReturn:
    typer.echo(f"privmix {ctx.invoked_subcommand}: {message}", err=True)
    raise typer.Exit(code)


app = typer.Typer(
    name="privmix",
    cls=Commands,
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
app.add_typer(keys)
app.add_typer(ledger)
app.add_typer(audit)
app.add_typer(heads)
app.add_typer(generate)
