"""Declares the options that choose protocols to compare, for evaluations and attacks."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from privmix_cluster.parameters import SetOption, assigned, fields

BUDGET = {"Budget": ("epsilon", "delta", "tokens", "renyi_epsilon")}


@dataclass(frozen=True)
class MethodOptions:
    """Which protocols are compared, with which values of their fields."""

    protocol: Annotated[
        list[str] | None, typer.Option(help="A protocol to compare; repeat for more. Default: all.")
    ] = None
    given: SetOption = None
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,VALUE...",
            help="A table for each value of a field of the budget or of a protocol, such as epsilon=2,8 or q=0.1,0.5.",
        ),
    ] = None

    @property
    def values(self) -> dict[str, Any]:
        """What is chosen, as fields of `ComparisonOptions`."""
        field, values = (None, "") if self.sweep is None else assigned("sweep", self.sweep)
        return {
            "protocols": self.protocol or None,
            "fields": fields(self.given),
            "sweep": field,
            "values": tuple(value.strip() for value in values.split(",") if value.strip()),
        }
