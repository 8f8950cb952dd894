"""Claim: each part is drawn independently with probability q, with the operating system's generator alone."""

import ast
import math
from pathlib import Path
from typing import Any

import pytest

import services.privacy
from services.privacy.sampling.randomness import poisson_subsample, uniform_below

PREDICTABLE = {
    "random",
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "multinomial",
    "bernoulli",
    "default_rng",
    "manual_seed",
    "Generator",
    "uniform_",
    "exponential_",
}


def test_no_seedable_generator_is_used() -> None:
    node: Any  # ast.AST has no lineno
    for file in Path(*services.privacy.__path__).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = {
                ast.Attribute: lambda n: [n.attr],
                ast.Import: lambda n: [alias.name for alias in n.names],
                ast.ImportFrom: lambda n: [n.module, *(alias.name for alias in n.names)],
            }.get(type(node), lambda n: [])(node)
            assert not PREDICTABLE & set(names), f"{file.name}, line {node.lineno}"


@pytest.mark.parametrize("q", [0.0, 0.03, 0.5, 1.0])
def test_every_part_is_drawn_with_probability_q(q: float) -> None:
    parts, draws = 64, 4000
    counts = [0] * parts
    pairs = 0
    for _ in range(draws):
        drawn = poisson_subsample(parts, q)
        assert list(drawn) == sorted(set(drawn))
        for part in drawn:
            counts[part] += 1
        pairs += sum(1 for part in drawn if part % 2 == 0 and part + 1 in drawn)
    # Seven standard deviations: chance fails any of these less than once in 10**9 runs.
    spread = 7 * math.sqrt(draws * q * (1 - q))
    assert all(abs(count - draws * q) <= spread for count in counts)
    neighbours = draws * parts / 2
    assert abs(pairs - neighbours * q * q) <= 7 * math.sqrt(neighbours * q * q * (1 - q * q))


def test_a_uniform_integer_reaches_every_value_below_its_bound() -> None:
    assert {uniform_below(3) for _ in range(400)} == {0, 1, 2}


@pytest.mark.parametrize(("parts", "q"), [(-1, 0.5), (3, -0.1), (3, 1.1), (3, math.nan)])
def test_impossible_draws_are_refused(parts: int, q: float) -> None:
    with pytest.raises(ValueError, match=r"parts must|q must"):
        poisson_subsample(parts, q)
