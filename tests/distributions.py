"""Finds the installed distributions that requirements need."""

import importlib.metadata as metadata
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(requirements: list[Requirement], extras: frozenset[str]) -> Iterator[Requirement]:
    """Yields the requirements for this platform and these extras."""
    for requirement in requirements:
        environments = [{"extra": extra} for extra in extras or {""}]
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            yield requirement


def closure(requirements: list[Requirement], extras: frozenset[str]) -> dict[str, metadata.Distribution]:
    """Returns the distributions that pip would install, in their installed versions.

    The locks exclude some requirements on purpose. They are not installed, and imports must work without them.
    """
    found: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    waiting = list(required(requirements, extras))
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in found:
            continue
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        found[key] = distribution
        waiting += required([Requirement(text) for text in distribution.requires or ()], key[1])
    return {name: distribution for (name, _), distribution in found.items()}
