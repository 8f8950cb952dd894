"""Adds exact noise to integers, with OpenDP's samplers of the discrete Gaussian and the discrete Laplace distribution.

Floating-point noise has gaps that reveal the value (Mironov 2012); integer noise has none.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from opendp.domains import atom_domain, vector_domain
from opendp.measurements import make_gaussian, make_laplace
from opendp.metrics import l1_distance, l2_distance
from opendp.mod import Measurement, enable_features

enable_features("contrib")

Integers = NDArray[np.int64]


def discrete_gaussian(values: Integers, scale: float) -> Integers:
    """Adds independent noise with mass proportional to exp(-x^2 / (2 scale^2)) to each value.

    Values at a Euclidean distance d have a Rényi divergence of at most a d^2 / (2 scale^2) at every order a (Canonne,
    Kamath, Steinke 2020, Proposition 5).
    """
    return _noisy(values, _gaussian(scale))


def discrete_laplace(values: Integers, scale: float) -> Integers:
    """Adds independent noise with mass proportional to exp(-abs(x) / scale) to each value."""
    return _noisy(values, _laplace(scale))


def _noisy(values: Integers, measurement: Measurement) -> Integers:
    return np.array(measurement(values.ravel().tolist()), dtype=np.int64).reshape(values.shape)


@lru_cache(maxsize=16)
def _gaussian(scale: float) -> Measurement:
    domain = vector_domain(atom_domain(T="i64"))
    return make_gaussian(domain, l2_distance(T=float), scale=scale)


@lru_cache(maxsize=16)
def _laplace(scale: float) -> Measurement:
    domain = vector_domain(atom_domain(T="i64"))
    return make_laplace(domain, l1_distance(T="i64"), scale=scale)
