"""Claim: a client whose stream is open when the service is stopped is told so before the connection closes."""

import json
import threading
from pathlib import Path

import httpx
import pytest

from tests.running import configure, own_ensemble, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_stream_that_a_stop_ends_has_an_error_event(ensemble: Path, tmp_path: Path) -> None:
    config = configure(tmp_path, own_ensemble(ensemble, tmp_path), coordinator={"pace_s": 0.2})
    with running(config) as service:
        body = {"model": "privmix", "prompt": "The patient", "max_tokens": 256, "ignore_eos": True, "stream": True}
        events: list[bytes] = []
        with httpx.stream("POST", f"{service.base_url}/v1/completions", json=body, timeout=120) as stream:
            stopping = None
            for line in stream.iter_lines():
                events += [line.removeprefix("data: ").encode()] if line.startswith("data: ") else []
                if len(events) == 3 and stopping is None:
                    stopping = threading.Thread(target=service.process.terminate)
                    stopping.start()
    assert json.loads(events[-1])["error"]["code"] == "service_stopping", "the response ended as a whole one does"
