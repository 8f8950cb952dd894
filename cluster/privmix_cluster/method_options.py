"""Declares the options that choose protocols to compare, for evaluations and attacks."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from privmix_cluster.parameters import bad

BUDGET = {"Budget": ("epsilon", "delta", "tokens", "renyi_epsilon")}


@dataclass(frozen=True)
class MethodOptions:
    """Which protocols are compared, with which values of their fields."""

    protocol: Annotated[
        list[str] | None, typer.Option(help="A protocol to compare; repeat for more. Default: all.")
    ] = None
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A value of a protocol's field; repeat for more."),
    ] = None
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
        field, values = (None, "") if self.sweep is None else _assigned("sweep", self.sweep)
        return {
            "protocols": self.protocol or None,
            "fields": dict(_assigned("set", each) for each in self.given or ()),
            "sweep": field,
            "values": tuple(value.strip() for value in values.split(",") if value.strip()),
        }


def _assigned(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise bad(option, f"must be FIELD=VALUE, such as q=0.1, got {text!r}")
    return name.strip().replace("-", "_"), value.strip()
