"""Names the mechanisms that audits attack: every protocol, and its variants under other parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.privacy.protocols import PROTOCOLS

_VARIANTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "pmixed": ({"projection": "mix"}, {"q": 0.25}),
    "adapmixed": ({"projection": "mix"},),
    "exponential": ({"sample": 2},),
}


def variants(name: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the parameters under which a protocol is a different mechanism; the first are the default ones."""
    return ({}, *_VARIANTS.get(name, ()))


def audited(parts: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each protocol and variant that certifies the cost of a token of ``parts`` parts, with its parameters.

    Leaves out protocols that read no part, and those whose cost is that of a training, which no token shows.
    """
    for name, settings in PROTOCOLS.items():
        if settings.one_model:
            continue
        for parameters in variants(name):
            protocol = settings.model_validate(parameters).plan(parts)
            if protocol.guarantee.status == "certified" and protocol.rows != 0:
                yield name, parameters
