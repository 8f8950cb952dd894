"""Claim: rate limits refill evenly, and a refused request can start exactly after the announced wait."""

import pytest

from privmix.keys.messages import Refused
from privmix.keys.rate_limiter import RateLimiter, TokenBucket, TokenBuckets
from privmix.keys.records import Share


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("amount", [1, 7, 60])
def test_a_bucket_has_enough_after_the_wait_and_not_before(amount: int) -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    wait = bucket.wait_s(amount)
    assert wait == pytest.approx(amount)
    clock.now += wait - 0.01
    assert bucket.wait_s(amount) > 0
    clock.now += 0.01
    assert bucket.wait_s(amount) == 0


def test_each_key_has_a_bucket_until_it_is_full_again() -> None:
    clock = Clock()
    buckets = TokenBuckets(2, clock)
    for _ in range(3):
        buckets.take("a")
    assert (buckets.wait_s("a"), buckets.wait_s("b")) == (60.0, 0.0)
    clock.now += 100
    buckets.take("b")
    assert set(buckets._buckets) == {"b"}
    assert buckets.wait_s("a") == 0


def test_the_wait_for_more_than_the_limit_is_infinite() -> None:
    assert TokenBucket(5).wait_s(6) == float("inf")


def test_a_request_takes_from_all_its_shares_or_from_none() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    shares = {"key:a": Share(requests_per_minute=6, tokens_per_minute=600), "group:g": Share(tokens_per_minute=120)}
    assert limiter.take("1", shares, 100) is None
    refused = limiter.take("2", shares, 50)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.limit) == ("tokens_per_minute", 120)
    assert refused.retry_after_s == pytest.approx(15)
    states = limiter.states(shares)
    assert states.requests is not None
    assert states.tokens is not None
    assert (states.requests.remaining, states.requests.limit) == (5, 6)
    assert (states.tokens.remaining, states.tokens.limit) == (20, 120)
    assert states.tokens.reset_s == pytest.approx(50)
    limiter.end("1", 10)
    assert limiter.take("3", shares, 110) is None, "unused tokens of the first request are available again"


def test_requests_per_minute_are_limited() -> None:
    clock = Clock()
    limiter, shares = RateLimiter(clock), {"key:a": Share(requests_per_minute=2)}
    assert [limiter.take(str(number), shares, 5) for number in range(2)] == [None, None]
    refused = limiter.take("2", shares, 5)
    assert refused is not None
    assert refused.reason == "requests_per_minute"
    assert refused.retry_after_s == pytest.approx(30)
    clock.now = 30
    assert limiter.take("2", shares, 5) is None
