"""Clients that record what they receive, and count its tokens themselves.

The service under test serves a model that counts (`tests.counting`). So each word of a text is one token, and a client
knows the correct text in advance.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import openai

from tests.counting import NUMBERS

STREAMS = 8
TIMEOUT_S = 150.0
"""A stream waits for recovery this long. The service itself gives up after `coordinator.recovery_s`."""
SPACING = 97
"""Consecutive requests start to count this far apart, so that the text of another stream is noticed."""
POLL_S = 0.5


@dataclass(frozen=True)
class Chunk:
    """One chunk of a stream. `usage` is the server's count of the answer's tokens so far; None if it gave none."""

    text: str
    usage: int | None = None


@dataclass(frozen=True)
class Transcript:
    """One completion from the client's view.

    Attributes:
        start: the number in the prompt. The correct answer continues from it.
        wanted: the requested number of tokens.
        end: the finish reason; None if the stream broke or was refused.
        refusal: the error's code, or its type if it has no code.
        key: the name of the client's key.
    """

    start: int
    wanted: int
    chunks: tuple[Chunk, ...]
    end: str | None = None
    refusal: str | None = None
    key: str = "anonymous"

    @property
    def words(self) -> list[str]:
        """The received tokens."""
        return "".join(chunk.text for chunk in self.chunks).split()

    @property
    def tokens(self) -> int:
        """The number of received tokens, counted by the client."""
        return len(self.words)

    @property
    def is_whole(self) -> bool:
        """Whether the client received the whole answer."""
        return self.end is not None

    @property
    def missing(self) -> int:
        """The most tokens that the service may have released for this answer without the client's knowledge."""
        return 0 if self.is_whole else self.wanted - self.tokens


class Clients:
    """Streams through the real client with several keys in turn, or with none, and records each stream at its end."""

    def __init__(self, base_url: str, secrets: Mapping[str, str] | None = None) -> None:
        self._clients = {
            name: openai.OpenAI(base_url=f"{base_url}/v1", api_key=secret, max_retries=0, timeout=TIMEOUT_S)
            for name, secret in (secrets or {"anonymous": "none"}).items()
        }
        self._lock = threading.Lock()
        self._starts = count(step=SPACING)
        self.transcripts: list[Transcript] = []

    @property
    def received(self) -> int:
        return sum(transcript.tokens for transcript in self.transcripts)

    def stream(self, number: int, max_tokens: int = 64, timeout_s: float = TIMEOUT_S) -> Transcript:
        """Requests one completion and returns its transcript, also after a failure. `number` chooses the key."""
        key = list(self._clients)[number % len(self._clients)]
        with self._lock:
            start = next(self._starts) % NUMBERS
        chunks: list[Chunk] = []
        end, refusal = None, None
        # The second argument is not an option of OpenAI.
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        try:
            stream = self._clients[key].completions.create(
                model="privmix",
                prompt=str(start),
                max_tokens=max_tokens,
                stream=True,
                stream_options=options,
                timeout=timeout_s,
            )
            for chunk in stream:
                usage = chunk.usage.completion_tokens if chunk.usage else None
                chunks.append(Chunk("".join(choice.text or "" for choice in chunk.choices), usage))
                if chunk.choices and chunk.choices[0].finish_reason:
                    end = chunk.choices[0].finish_reason
        except openai.OpenAIError as error:
            refusal = getattr(error, "code", None) or type(error).__name__
        # A stream that is cut raises an error of the HTTP library.
        except Exception as error:
            refusal = type(error).__name__
        transcript = Transcript(start, max_tokens, tuple(chunks), end, refusal, key)
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
        """Returns the seconds until a stream completes. Calls `meanwhile` repeatedly during the attempts."""
        began = time.monotonic()
        while not self._try_beside(meanwhile).is_whole:
            if time.monotonic() > began + seconds:
                raise TimeoutError(f"no answer within {seconds:g} s after the last fault")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def _try_beside(self, meanwhile: Callable[[], None]) -> Transcript:
        with ThreadPoolExecutor(1) as pool:
            tried = pool.submit(self.stream, 0, max_tokens=8)
            while not wait([tried], timeout=POLL_S).done:
                meanwhile()
        meanwhile()
        return tried.result()
