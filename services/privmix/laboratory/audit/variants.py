"""Names the mechanisms that audits attack: every protocol, and its variants under other parameters."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from privmix.privacy.events import Accountant
from privmix.privacy.protocols import PROTOCOLS

_VARIANTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "pmixed": ({"projection": "mix"}, {"q": 0.25}),
    "adapmixed": ({"projection": "mix"},),
    "exponential": ({"sample": 2},),
}

_BY_ORDER = Accountant(4.0)
"""Plans without exact composition, which takes a second and changes no guarantee."""


def variants(name: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the parameters under which a protocol is a different mechanism; the first are the default ones."""
    return ({}, *_VARIANTS.get(name, ()))


@cache
def audited(parts: int) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Returns each protocol and variant that certifies the cost of a token of ``parts`` parts, with its parameters.

    Leaves out protocols that read no part, and those whose cost is that of a training, which no token shows.
    """
    return tuple(_audited(parts))


def _audited(parts: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, settings in PROTOCOLS.items():
        if settings.one_model:
            continue
        for parameters in variants(name):
            protocol = settings.model_validate(parameters).plan(parts, _BY_ORDER)
            if protocol.guarantee.status == "certified" and protocol.rows != 0:
                yield name, parameters
