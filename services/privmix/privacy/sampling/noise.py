"""Adds exact noise to integers, with OpenDP's samplers of the discrete Gaussian and the discrete Laplace distribution.

Floating-point noise has gaps that reveal the value (Mironov 2012); integer noise has none. The time of a sampler grows
with the noise that it draws (Jin et al. 2022), so a request takes noise that was drawn before it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Lock

import numpy as np
from opendp.domains import atom_domain, vector_domain
from opendp.measurements import make_gaussian, make_laplace
from opendp.metrics import l1_distance, l2_distance
from opendp.mod import enable_features

from privmix.privacy.arrays import Integers

enable_features("contrib")


AHEAD = 4
"""The number of requests, of the largest size so far, for which a pool keeps noise."""

_refills = ThreadPoolExecutor(1, thread_name_prefix="noise")


class NoisePool:
    """Keeps noise of one distribution and draws more of it in another thread. Every number is handed out once.

    The first request, and those that come faster than noise is drawn, draw what is missing themselves, in a time that
    depends on it.

    Args:
        draw: returns independent noise, int64 [count].
    """

    def __init__(self, draw: Callable[[int], Integers]) -> None:
        self._draw = draw
        self._lock = Lock()
        self._ready = np.empty(0, np.int64)
        self._wanted = 0
        self._refilling = False

    def take(self, count: int) -> Integers:
        """Returns noise, int64 [count]."""
        with self._lock:
            taken, self._ready = self._ready[:count], self._ready[count:]
            self._wanted = max(self._wanted, AHEAD * count)
            refill, self._refilling = not self._refilling, True
        if refill:
            _refills.submit(self._refill)
        missing = count - len(taken)
        return np.concatenate([taken, self._draw(missing)]) if missing else taken

    def _refill(self) -> None:
        while True:
            with self._lock:
                missing = self._wanted - len(self._ready)
                if missing <= 0:
                    self._refilling = False
                    return
            try:
                drawn = self._draw(missing)
            except BaseException:
                with self._lock:
                    self._refilling = False  # so that the next request begins another refill
                raise
            with self._lock:
                self._ready = np.concatenate([self._ready, drawn])


def discrete_gaussian(values: Integers, scale: float) -> Integers:
    """Adds independent noise with mass proportional to exp(-x^2 / (2 scale^2)) to each value.

    Values at a Euclidean distance d have a Rényi divergence of at most a d^2 / (2 scale^2) at every order a (Canonne,
    Kamath, Steinke 2020, Proposition 5).
    """
    return _noisy(values, _gaussian(scale))


def discrete_laplace(values: Integers, scale: float) -> Integers:
    """Adds independent noise with mass proportional to exp(-abs(x) / scale) to each value."""
    return _noisy(values, _laplace(scale))


def _noisy(values: Integers, pool: NoisePool) -> Integers:
    return np.asarray(values + pool.take(values.size).reshape(values.shape), dtype=np.int64)


@lru_cache(maxsize=16)
def _gaussian(scale: float) -> NoisePool:
    domain = vector_domain(atom_domain(T="i64"))
    measurement = make_gaussian(domain, l2_distance(T=float), scale=scale)
    return NoisePool(lambda count: np.array(measurement([0] * count), dtype=np.int64))


@lru_cache(maxsize=16)
def _laplace(scale: float) -> NoisePool:
    domain = vector_domain(atom_domain(T="i64"))
    measurement = make_laplace(domain, l1_distance(T="i64"), scale=scale)
    return NoisePool(lambda count: np.array(measurement([0] * count), dtype=np.int64))
