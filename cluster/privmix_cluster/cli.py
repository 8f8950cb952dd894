"""Defines the command `privmix`. Each of its verbs is in a file of the same name in `privmix_cluster.commands`."""

import sys
from collections.abc import Mapping
from errno import EACCES, EDQUOT, EEXIST, ENOSPC, ENOTDIR, EPERM, EROFS
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from keyword import iskeyword
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from privmix.foundation.errors import ExtraMissing, InputError, WorkError

VERBS: Mapping[str, str] = {
    "quickstart": "Train a demo ensemble, serve it with vLLM on Ray, and request one completion over HTTP.",
    "train": "Fine-tune one adapter on each part of a private corpus.",
    "import": "Make an ensemble of plain LoRA adapters that PEFT trained elsewhere, one adapter a part.",
    "train-base": "Fine-tune one adapter on the whole private corpus with DP-SGD, to serve it or to train parts on it.",
    "evaluate": "Compare the perplexity of all methods on held-out text at the same budget, with their actual "
    "guarantees.",
    "protocols": "List all protocols: the guarantee, the queried models, the reasons to choose it, and the parameters.",
    "serve": "Serve an ensemble over HTTP until Ctrl-C or SIGTERM.",
    "status": "Show the actors, parts and versions of a running service; exit with 1 if an actor does not work.",
    "scale": "Add parts of the ensemble (shards) or throughput (copies), or remove some. Streams continue.",
    "budget": "Show the privacy budget, the spent part and the remaining part. Works with and without a running "
    "service.",
    "plan": "Compute the radius that a budget allows, or the epsilon that a radius costs.",
    "keys": "Manage the service's API keys and their shares of the budget.",
    "ledger": "Create, verify or charge the budget's ledger.",
    "audit": "Attack the output of protocols, and compare the result with their claims.",
    "reproduce": "Repeat the tables and figures of the papers, each printed number beside ours.",
    "heads": "Train a small model on a table with a binary target, privately, and compare the ways to do it.",
    "generate": "Generate private synthetic texts from a template of prompts, with a data card.",
}
"""The verbs in the order of the help, with the first line of their own help: listing them imports none of them."""


_FULL = "free some space, then run it again to continue"
_CLOSED = "choose a place that this user can write (HOME, TMPDIR and PRIVMIX_CACHE name some)"
FIXES: Mapping[int, str] = {
    **dict.fromkeys((ENOSPC, EDQUOT), _FULL),
    **dict.fromkeys((EACCES, EPERM, EROFS, ENOTDIR, EEXIST), _CLOSED),
}
"""The fixes of a machine's limits, which no command can foresee."""


class Commands(TyperGroup):
    """Prints expected errors as messages, without a traceback.

    Exits with 2 for invalid input, 1 if the work failed, and 130 if it was interrupted.
    """

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except InputError as error:
            _end(ctx, error, 2)
        except WorkError as error:
            _end(ctx, error, 1)
        except ModuleNotFoundError as error:
            missing = ExtraMissing.of(error)
            if missing is None:
                raise
            _end(ctx, missing, 1)
        except OSError as error:
            cause: Any = getattr(error, "cause", error)
            if cause.errno not in FIXES:
                raise
            _end(ctx, f"{cause.filename or 'a file'}: {cause.strerror}; {FIXES[cause.errno]}", 1)
        except KeyboardInterrupt:
            _end(ctx, "interrupted; run it again to continue", 130)


class Verbs(Commands):
    """Imports the file of a verb only when the verb is called, because importing all of them takes many seconds."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")  # KOI8-R and CP1251 have no epsilon and no bars
        return super().main(*arguments, **options)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(VERBS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load(listed.name or ""), rest


def load(name: str) -> Any:
    """Imports a verb and returns its command."""
    module = name.replace("-", "_") + "_" * iskeyword(name)
    verb = getattr(import_module(f"privmix_cluster.commands.{module}"), module)
    if not isinstance(verb, typer.Typer):
        function, verb = verb, typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        verb.command(name)(function)
    return typer.main.get_command(verb)


def _end(ctx: typer.Context, message: object, code: int) -> NoReturn:
    # The error of an actor carries the original as its cause; its own text is a traceback.
    typer.echo(f"privmix {ctx.invoked_subcommand}: {getattr(message, 'cause', message)}", err=True)
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
