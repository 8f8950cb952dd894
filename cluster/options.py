"""Options that several commands have."""

from typing import Annotated

import typer

EnsembleOption = Annotated[str | None, typer.Option(help="Its model name, where the configuration has several.")]
AddressOption = Annotated[str, typer.Option(help="The Ray cluster of the service.", envvar="RAY_ADDRESS")]
NamespaceOption = Annotated[str, typer.Option(help="The service's, as in its configuration.")]
EnsembleNamespaceOption = Annotated[
    str, typer.Option(help="The service's, as in its configuration; NAMESPACE.NAME for one of `ensembles`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
