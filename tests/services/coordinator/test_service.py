"""What the coordinator owes the running service beyond single answers."""

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.running import RunningService, settled


def complete(service: RunningService, prompt: str, max_tokens: int) -> int:
    """The tokens that the answer was charged."""
    body = {"model": "privmix", "prompt": prompt, "max_tokens": max_tokens}
    answer = httpx.post(f"{service.base_url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    charged: int = answer["usage"]["completion_tokens"]
    return charged


def test_requests_on_each_others_heels_are_all_answered(service: RunningService) -> None:
    """A coordinator that falls idle hands its lease back; a request that comes just then must not be forgotten."""
    for _ in range(40):
        assert complete(service, "Hello", 1) == 1


def test_an_idle_service_has_charged_what_it_released(service: RunningService) -> None:
    before = settled(service)
    with ThreadPoolExecutor(4) as pool:
        charged = sum(pool.map(lambda number: complete(service, f"Story {number}:", 5 + number), range(8)))
    assert settled(service) - before == charged
