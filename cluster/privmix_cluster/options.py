"""Declares the options that several commands share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from privmix.training.corpus import Corpus
    from privmix.training.options import Resources

NAMESPACE = "privmix"
"""The default `namespace` of a service."""
RUNNING = "auto"
"""The address with which Ray finds the cluster that runs on this machine."""

AddressOption = Annotated[str, typer.Option(help="The Ray cluster of the service.", envvar="RAY_ADDRESS")]
NamespaceOption = Annotated[str, typer.Option(help="The `namespace` in the service's configuration.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

ProgressJsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object at the end, and progress in plain lines.")
]

CorpusArgument = Annotated[list[Path], typer.Argument(help="JSON Lines, CSV or Parquet: files or quoted globs.")]
TextFieldOption = Annotated[str, typer.Option(help="The field with the text, or with a list of messages.")]


@dataclass(frozen=True)
class CorpusOptions:
    """How corpora are read."""

    user_field: Annotated[str, typer.Option(help="The field with the user's id.")] = "user"
    users: Annotated[
        str | None,
        typer.Option(
            metavar="row|block:TOKENS",
            help="Make each row, or each block of TOKENS tokens, a user, as papers do. The default is --user-field. "
            "The guarantee is then for a row or a block, not for a person.",
        ),
    ] = None
    text_field: TextFieldOption = "text"
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip bad rows, and count them by kind.")] = False

    def corpus(self, paths: Path | Sequence[Path]) -> "Corpus":
        """Returns the corpus in files. Raises `CorpusError` if one does not exist."""
        from privmix.training.corpus import Corpus  # slow to import

        return Corpus(paths, self.user_field, self.text_field, self.skip_bad, self.users)


MODEL = "Model"
"""The panel of the help with the options of the public model."""


@dataclass(frozen=True)
class RunOptions:
    """Where a training reads and writes, on what, and how it reports."""

    output: Annotated[
        Path, typer.Option(help="The directory of what is trained. An interrupted training continues there.")
    ]
    salt_file: Annotated[
        Path | None,
        typer.Option(help="The secret of the partition, created on first use. Default: in the output directory."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="The public model: a directory or hub id. Default: smollm2-135m.", rich_help_panel=MODEL),
    ] = None
    cpus: Annotated[
        float,
        typer.Option(
            help="The number of CPU cores for each adapter. More cores train fewer at a time.",
            rich_help_panel="Resources",
        ),
    ] = 1
    gpus: Annotated[
        float | None,
        typer.Option(
            help="The number of GPUs for each adapter, such as 0.25. Default: 1 if the cluster has any.",
            rich_help_panel="Resources",
        ),
    ] = None
    as_json: ProgressJsonOption = False

    @property
    def resources(self) -> "Resources":
        """The resources of an adapter. Raises `InputError` if they are invalid."""
        from privmix.training.options import Resources

        return Resources.checked(cpus=self.cpus, gpus=self.gpus)
