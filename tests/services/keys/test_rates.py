"""Rates refill evenly, and what they say about waiting is true."""

import pytest

from services.keys.messages import Refused
from services.keys.rates import Bucket, Rates
from services.keys.records import Share


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("amount", [1, 7, 60])
def test_after_the_wait_there_is_enough_and_before_it_there_is_not(amount: int) -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    wait = bucket.wait_s(amount)
    assert wait == pytest.approx(amount)
    clock.now += wait - 0.01
    assert bucket.wait_s(amount) > 0
    clock.now += 0.01
    assert bucket.wait_s(amount) == 0


def test_more_than_there_ever_is() -> None:
    assert Bucket(5).wait_s(6) == float("inf")


def test_a_request_takes_from_all_of_its_shares_or_from_none() -> None:
    clock = Clock()
    rates = Rates(clock)
    shares = {"key:a": Share(requests_per_minute=6, tokens_per_minute=600), "group:g": Share(tokens_per_minute=120)}
    assert rates.take("1", shares, 100) is None
    refused = rates.take("2", shares, 50)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.limit) == ("tokens_per_minute", 120)
    assert refused.retry_after_s == pytest.approx(15)
    states = rates.states(shares)
    assert states.requests is not None
    assert states.tokens is not None
    assert (states.requests.remaining, states.requests.limit) == (5, 6)
    assert (states.tokens.remaining, states.tokens.limit) == (20, 120)
    assert states.tokens.reset_s == pytest.approx(50)
    rates.end("1", 10)
    assert rates.take("3", shares, 110) is None, "what the first did not use is there again"


def test_requests_a_minute() -> None:
    clock = Clock()
    rates, shares = Rates(clock), {"key:a": Share(requests_per_minute=2)}
    assert [rates.take(str(number), shares, 5) for number in range(2)] == [None, None]
    refused = rates.take("2", shares, 5)
    assert refused is not None
    assert refused.reason == "requests_per_minute"
    assert refused.retry_after_s == pytest.approx(30)
    clock.now = 30
    assert rates.take("2", shares, 5) is None
