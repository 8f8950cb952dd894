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

EpsilonsOption = Annotated[list[float], typer.Option("--epsilon", help="A budget; again for another table.")]
DeltaOption = Annotated[float, typer.Option(help="The delta of every budget.")]
TokensOption = Annotated[list[int], typer.Option(help="Tokens that a budget must last for; again for another table.")]
ProtocolsOption = Annotated[
    list[str] | None,
    typer.Option("--protocol", help="A protocol to evaluate beside the references; repeat for more. Default: all."),
]
RunTokensOption = Annotated[int | None, typer.Option(help="Tokens of a run. Default: those of the shortest budget.")]
RunsOption = Annotated[int, typer.Option(help="Runs, each on other text where it suffices.")]
SweepOption = Annotated[
    list[str], typer.Option(help="An ablation figure; again for more. Default: all. `none` for none.")
]
