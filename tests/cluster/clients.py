"""Clients that keep account of what really reached them."""

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
    """One completion as its client saw it.

    Attributes:
        tokens: how many arrived.
        end: the finish reason; None where the stream broke or was refused.
        refusal: the error's code, or its type where the server gave none.
    """

    tokens: int
    end: str | None
    refusal: str | None


class Clients:
    """Streams through the real client, each written down when it ends."""

    def __init__(self, base_url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120)
        self._lock = threading.Lock()
        self.transcripts: list[Transcript] = []

    @property
    def received(self) -> int:
        return sum(transcript.tokens for transcript in self.transcripts)

    def stream(self, number: int, max_tokens: int = 64) -> Transcript:
        """One completion, whatever becomes of it."""
        tokens, end, refusal = 0, None, None
        # The second is no option of OpenAI's.
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
        """So many streams beside the block; what is yielded is filled when they have ended, after it."""
        ended: list[Transcript] = []
        with ThreadPoolExecutor(streams) as pool:
            running = [pool.submit(self.stream, number, max_tokens) for number in range(streams)]
            yield ended
        ended += (stream.result() for stream in running)

    def answers_again(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> float:
        """Seconds until a whole stream came; `meanwhile` is called again and again, however long a try takes.

        Raises:
            TimeoutError: none came within so many seconds.
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
