"""Defines the command `privmix`. Each of its verbs is in a file of the same name in `cluster.commands`."""

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from cluster.configuration import ConfigurationError
from services.budget.errors import LedgerError
from services.ensembles.records import EnsemblesError
from services.errors import InputError, WorkError
from services.keys.records import KeysError

VERBS = (
    "quickstart",
    "demo-corpus",
    "train",
    "split",
    "tune",
    "evaluate",
    "compare",
    "protocols",
    "topology",
    "serve",
    "status",
    "scale",
    "ensembles",
    "budget",
    "plan",
    "keys",
    "alerts",
    "ledger",
    "audit",
    "heads",
    "generate",
)


class Commands(TyperGroup):
    """Prints expected errors as messages, without a traceback.

    Exits with 2 for invalid input, 1 if the work failed, and 130 if it was interrupted.
    """

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except (ConfigurationError, InputError) as error:
            _end(ctx, str(error), 2)
        except (EnsemblesError, KeysError, LedgerError, WorkError) as error:
            _end(ctx, str(error), 1)
        except KeyboardInterrupt:
            _end(ctx, "interrupted; run it again to continue", 130)


class Verbs(Commands):
    """Imports the file of a verb only when the verb is called, because importing all of them takes many seconds."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(VERBS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name not in VERBS:
            return None
        name = cmd_name.replace("-", "_")
        verb = getattr(import_module(f"cluster.commands.{name}"), name)
        if not isinstance(verb, typer.Typer):
            function, verb = verb, typer.Typer(pretty_exceptions_enable=False, add_completion=False)
            verb.command(cmd_name)(function)
        return typer.main.get_command(verb)


def _end(ctx: typer.Context, message: str, code: int) -> NoReturn:
    typer.echo(f"privmix {ctx.invoked_subcommand}: {message}", err=True)
    raise typer.Exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"privmix {version('privmix')}")
        raise typer.Exit


app = typer.Typer(name="privmix", cls=Verbs, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def privmix(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve next-token queries from models fine-tuned on private text, with a differential-privacy guarantee."""
