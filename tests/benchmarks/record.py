"""Runs a measurement and keeps what it prints: `python -m tests.benchmarks.record --machine WORDS NAME COMMAND...`.

    python -m tests.benchmarks.record --machine 'two idle cores' corpus python -m tests.benchmarks.corpus --json

The record is `measured/NAME.json`, beside this file: the figures as the command printed them, with the command, the
date, the commit and the machine. The next measurement of the same name replaces it. `--result FILE` keeps what the
command printed elsewhere, such as on a machine with a GPU, or wrote to a file. `python -m tests.benchmarks.render`
brings the figures into the pages.
"""

import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from datetime import date as Date
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, ConfigDict

from privmix.foundation.files import write_atomically

ROOT = Path(__file__).parents[2]
MEASURED = Path(__file__).with_name("measured")


class MeasuredRecord(BaseModel):
    """Holds one measurement.

    Attributes:
        date: of the measurement; of a reported one, the day on which its figures were first written down.
        commit: that was measured, "+" if it was changed; of a reported one, the commit that wrote the figures down.
        command: that repeats the measurement.
        machine: in words: the processor or device, the cores, and what else ran.
        source: "printed" by the command, or "reported": copied from text, with the digits that the text had.
        figures: in the form of the command's JSON; a reported record has the part of it that the text had.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: Date
    commit: str
    command: str
    machine: str
    source: Literal["printed", "reported"]
    figures: dict[str, Any]

    @classmethod
    def read(cls, name: str, folder: Path = MEASURED) -> "MeasuredRecord":
        """Reads the record of this name.

        Raises:
            FileNotFoundError: there is none.
            pydantic.ValidationError: the file is no record.
        """
        return cls.model_validate_json((folder / f"{name}.json").read_bytes())

    def write(self, name: str, folder: Path = MEASURED) -> None:
        """Replaces the record of this name."""
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"{name}.json", (self.model_dump_json(indent=1) + "\n").encode())


def commit() -> str:
    """Returns the short hash of the checkout's commit, with "+" if files were changed."""
    return _printed("git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*").strip()


def _printed(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def main(
    name: Annotated[str, typer.Argument(help="Of the record.")],
    command: Annotated[list[str], typer.Argument(help="That measures, and prints JSON.")],
    machine: Annotated[str, typer.Option(help="In words: the processor or device, the cores, and what else ran.")],
    result: Annotated[Path | None, typer.Option(help="What the command printed; by default, it is run.")] = None,
    folder: Annotated[Path, typer.Option(help="Of the records.")] = MEASURED,
) -> None:
    """Runs a measurement and keeps what it prints as a record."""
    measured = commit()
    program = sys.executable if command[0] == "python" else command[0]
    printed = _printed(program, *command[1:]) if result is None else result.read_text()
    try:
        figures = json.loads(printed)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"command: printed no JSON ({error}); give it --json") from error
    MeasuredRecord(
        date=datetime.now(UTC).date(),
        commit=measured,
        command=shlex.join(command),
        machine=machine,
        source="printed",
        figures=figures,
    ).write(name, folder)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"allow_interspersed_args": False})(main)
    app()
