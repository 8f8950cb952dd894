"""Claim: a request takes noise that was drawn before it, every number once, of the distribution that was planned."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest

from privmix.privacy.arrays import Integers
from privmix.privacy.sampling import noise
from privmix.privacy.sampling.noise import AHEAD, NoisePool, discrete_gaussian, discrete_laplace


class Recorder:
    """Draws the numbers 0, 1, 2, ..., and records in which thread."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self._numbers: Iterator[int] = count()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> Integers:
        self.threads.append(threading.get_ident())
        with self._lock:
            return np.array([next(self._numbers) for _ in range(count)], dtype=np.int64)


def wait_for_refills() -> None:
    noise._refills.submit(lambda: None).result()


def test_a_request_draws_no_noise_itself() -> None:
    """The time of a sampler grows with the noise: who sees the time of a token learns about its noise."""
    recorder = Recorder()
    pool = NoisePool(recorder)
    pool.take(100)
    wait_for_refills()
    for _ in range(5):
        recorder.threads.clear()
        for _ in range(AHEAD):
            pool.take(100)
        assert threading.get_ident() not in recorder.threads
        wait_for_refills()


def test_a_refill_that_fails_is_not_the_last() -> None:
    """Otherwise every later request would draw its own noise, and its time would tell of it."""
    recorder, failures = Recorder(), [MemoryError()]

    def draw(count: int) -> Integers:
        if threading.get_ident() != requesting and failures:
            raise failures.pop()
        return recorder(count)

    requesting = threading.get_ident()
    pool = NoisePool(draw)
    for _ in range(2):
        pool.take(100)
        wait_for_refills()
    assert not failures
    recorder.threads.clear()
    pool.take(100)
    assert requesting not in recorder.threads


def test_no_noise_is_used_twice() -> None:
    pool = NoisePool(Recorder())
    with ThreadPoolExecutor(8) as clients:
        taken = list(clients.map(pool.take, [size for size in (1, 70, 500, 3) for _ in range(50)]))
    assert [len(numbers) for numbers in taken] == [size for size in (1, 70, 500, 3) for _ in range(50)]
    everything = np.concatenate(taken)
    assert len(np.unique(everything)) == len(everything)


@pytest.mark.parametrize("scale", [0.7, 20.0])
def test_noise_from_the_pool_has_the_planned_distribution(scale: float) -> None:
    draws, values = 2**14, np.array([[5, -7]], dtype=np.int64)
    x = np.arange(-1000, 1001)
    for add, weights in (
        (discrete_gaussian, np.exp(-(x**2) / (2 * scale**2))),
        (discrete_laplace, np.exp(-abs(x) / scale)),
    ):
        drawn = np.concatenate([add(values.repeat(draws // 8, axis=0), scale) - values for _ in range(8)])
        variance = (weights * x**2).sum() / weights.sum()
        kurtosis = (weights * x**4).sum() / weights.sum()
        # Seven standard deviations of the mean and of the variance of the draws.
        assert abs(drawn.mean()) < 7 * np.sqrt(variance / drawn.size)
        assert abs((drawn**2).mean() - variance) < 7 * np.sqrt((kurtosis - variance**2) / drawn.size)
