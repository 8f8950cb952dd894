"""Clients that record the tokens that they receive."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai

STREAMS = 8


@dataclass(frozen=True)
class Transcript:
    """One completion from the client's view.

    Attributes:
        tokens: the number of received tokens.
        end: the finish reason; None if the stream broke or was refused.
        refusal: the error's code, or its type if it has no code.
    """

    tokens: int
    end: str | None
    refusal: str | None


class Clients:
    """Streams through the real client, and records each stream at its end."""

    def __init__(self, base_url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120)
        self._lock = threading.Lock()
        self.transcripts: list[Transcript] = []

    @property
    def received(self) -> int:
        return sum(transcript.tokens for transcript in self.transcripts)

    def stream(self, number: int, max_tokens: int = 64) -> Transcript:
        """Requests one completion and returns its transcript, also after a failure."""
        tokens, end, refusal = 0, None, None
        # The second argument is not an option of OpenAI.
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        try:
            chunks = self._client.completions.create(
                model="privmix",
                prompt=f"Once upon a time, in story number {number},",
                max_tokens=max_tokens,
                stream=True,
                stream_options=options,
            )
            for chunk in chunks:
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
                if chunk.choices and chunk.choices[0].finish_reason:
                    end = chunk.choices[0].finish_reason
        except openai.OpenAIError as error:
            refusal = getattr(error, "code", None) or type(error).__name__
        transcript = Transcript(tokens, end, refusal)
        with self._lock:
            self.transcripts.append(transcript)
        return transcript

    @contextmanager
    def streaming(self, streams: int = STREAMS, max_tokens: int = 64) -> Iterator[list[Transcript]]:
        """Runs streams beside the block. The yielded list is complete after the block, when all have ended."""
        ended: list[Transcript] = []
        with ThreadPoolExecutor(streams) as pool:
            running = [pool.submit(self.stream, number, max_tokens) for number in range(streams)]
            yield ended
        ended += (stream.result() for stream in running)

    def answers_again(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> float:
        """Returns the seconds until a stream completes. Calls `meanwhile` repeatedly during the attempts.

        Raises:
            TimeoutError: no stream completed within `seconds`.
        """
        began = time.monotonic()
        while self._try_beside(meanwhile).end is None:
            if time.monotonic() > began + seconds:
                raise TimeoutError(f"no answer within {seconds:g} s after the last fault")
            time.sleep(0.5)
        return time.monotonic() - began

    def _try_beside(self, meanwhile: Callable[[], None]) -> Transcript:
        with ThreadPoolExecutor(1) as pool:
            tried = pool.submit(self.stream, 0, max_tokens=8)
            while not wait([tried], timeout=0.5).done:
                meanwhile()
        meanwhile()
        return tried.result()
