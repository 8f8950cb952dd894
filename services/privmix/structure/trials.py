"""Tries each new grammar in a process that can be killed, before any other process compiles it.

A short description can need gigabytes or minutes to compile, and a defect of the engine can end its process. So the
processes of `trial_process.py` translate and compile it first, within limits of memory and time that the system
enforces. They know no secret: neither the environment of this process, nor its files.
"""

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from privmix.foundation.turns import Turns
from privmix.structure.errors import StructureError
from privmix.structure.grammar import StructureKind
from privmix.structure.limits import MAX_BYTES
from privmix.structure.matcher import Position

MAX_DESCRIPTION = 8 * MAX_BYTES
"""The maximum number of bytes of a description as JSON: those of many tools, or one whose characters are escaped."""
MAX_ANSWER = 8 << 20
"""The maximum number of bytes of an answer of a trial, which has the grammar."""
MAX_KNOWN = 4096
"""The maximum number of grammars that are known to compile."""
MAX_KNOWN_BYTES = 32 << 20
START_S = 60.0
"""How long the processes may take to start. They read a vocabulary, which takes a second."""
GRACE_S = 5.0

_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")
_TOO_COSTLY = "it takes too much memory or time to compile; make it simpler"


class TrialError(RuntimeError):
    """The processes cannot try a grammar, whatever it is."""


@dataclass(frozen=True)
class TrialLimits:
    """Limits the trial of a grammar.

    Attributes:
        memory: bytes.
        cpu_s: seconds of one processor.
        wall_s: seconds; a busy machine may take them without doing much.
        processes: the number of trials at once.
    """

    memory: int = 256 << 20
    cpu_s: float = 4.0
    wall_s: float = 20.0
    processes: int = 3


@dataclass(frozen=True)
class Tried:
    """Describes a grammar that passed its trial.

    Attributes:
        grammar: see `privmix.structure.grammar`.
        start: the position at the beginning of a text. It has an end.
        cpu_s: how long a compilation takes.
        memory: the bytes that the compiled grammar holds.
    """

    grammar: str
    start: Position
    cpu_s: float
    memory: int

    @property
    def size(self) -> int:
        """The bytes of this description, about."""
        return len(self.grammar) + len(self.start.legal) + 8 * (self.start.shortest or 0)


class Trials:
    """Tries grammars for one model. The processes start with the first grammar, and again if they are lost.

    Args:
        read_tokenizer: returns the text of the model's `tokenizer.json`, and the tokens that end a completion.
    """

    def __init__(
        self, read_tokenizer: Callable[[], tuple[str, frozenset[int]]], limits: TrialLimits | None = None
    ) -> None:
        self._limits = limits or TrialLimits()
        self._read_tokenizer = read_tokenizer
        self._processes: _Processes | None = None
        self._starting = asyncio.Lock()
        self._turns = Turns(self._limits.processes)
        self._known: OrderedDict[bytes, Tried] = OrderedDict()
        self._known_bytes = 0

    async def grammar(self, kind: StructureKind, described: Any, cache_salt: str = "") -> Tried:
        """Returns the grammar of a description that compiles within the limits. The latest ones are not tried again.

        Args:
            described: see `of_kind`.
            cache_salt: a grammar that passed is known with the same salt only, so that a client cannot infer from the
                time of an answer which grammars other clients use. Trials with one salt wait for each other.

        Raises:
            StructureError: the description is invalid or too large, admits no text of the model's tokens, or exceeds a
                limit; or the engine cannot read this model's tokenizer.
            TrialError: the processes do not work.
        """
        request = _request(kind, described)
        key = sha256(f"{cache_salt}\0".encode() + request).digest()
        async with self._turns.turn(cache_salt):
            if key not in self._known:
                self._keep(key, await _to_its_end(self._tried(request)))
            self._known.move_to_end(key)
            return self._known[key]

    def most_answers(self, tried: Tried) -> int:
        """Returns how many answers may have a grammar: together they cost what the trial of one may cost."""
        return max(1, int(min(self._limits.cpu_s / max(tried.cpu_s, 1e-6), self._limits.memory / max(tried.memory, 1))))

    def close(self) -> None:
        """Ends the processes. They start again with the next grammar."""
        if self._processes is not None:
            self._processes.end()
        self._processes = None

    def _keep(self, key: bytes, tried: Tried) -> None:
        self._known[key] = tried
        self._known_bytes += tried.size
        while len(self._known) > MAX_KNOWN or (self._known_bytes > MAX_KNOWN_BYTES and len(self._known) > 1):
            _, oldest = self._known.popitem(last=False)
            self._known_bytes -= oldest.size

    async def _tried(self, request: bytes) -> Tried:
        for _ in range(2):  # the processes may have been lost since the last trial
            processes = await self._started()
            answer = await processes.ask(request)
            if answer is not None:
                return _read(answer)
            processes.end()
            self._processes = None if self._processes is processes else self._processes
        raise TrialError("the processes that try grammars do not answer")

    async def _started(self) -> "_Processes":
        async with self._starting:
            if self._processes is None:
                self._processes = await asyncio.to_thread(_Processes, self._read_tokenizer, self._limits)
            return self._processes


class _Processes:
    """Starts the processes, and asks them.

    Attributes:
        pid: the id of the first one, whose children the others are.

    Raises:
        StructureError: the engine cannot read the tokenizer.
        TrialError: the processes do not start.
    """

    def __init__(self, read_tokenizer: Callable[[], tuple[str, frozenset[int]]], limits: TrialLimits) -> None:
        text, ends = read_tokenizer()
        self._limits = limits
        self._control, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "privmix.structure.trial_process"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the engine's messages quote the client's text
                env=_environment(),
                start_new_session=True,  # a terminal's interrupt is for this process
            )
        self.pid = process.pid
        self.end = weakref.finalize(self, _end, self._control, process)
        self._control.settimeout(START_S)
        try:
            setup = json.dumps({"tokenizer": text, "ends": sorted(ends), "limits": asdict(limits)}).encode()
            self._control.sendall(struct.pack("!Q", len(setup)) + setup)
            started = self._control.recv(1 << 16)
        except OSError:
            started = b""
        if started != b"\n":
            self.end()
            if started:
                raise StructureError(started.decode())
            raise TrialError("the processes that try grammars do not start")
        self._control.setblocking(False)

    async def ask(self, request: bytes) -> bytes | None:
        """Returns the answer of a process, which is empty if it was killed; None if none took the request."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"\n"], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(self._limits.wall_s + GRACE_S):
                if not await _begun(reader):
                    return None
            async with asyncio.timeout(self._limits.wall_s + GRACE_S):
                with suppress(ConnectionError):
                    writer.write(request)
                    writer.write_eof()
                    return await _bounded(reader)
                return b""
        except TimeoutError:
            return None
        finally:
            writer.close()


async def _to_its_end(trial: Coroutine[Any, Any, Tried]) -> Tried:
    """Returns the result of a trial. A client that leaves waits for its end, as the trial has a process until then."""
    running = asyncio.create_task(trial)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise


async def _bounded(reader: asyncio.StreamReader) -> bytes:
    """Returns an answer; an empty one, as of a process that was killed, if it is larger than `MAX_ANSWER`."""
    answer = bytearray()
    while piece := await reader.read(1 << 16):
        answer += piece
        if len(answer) > MAX_ANSWER:
            return b""
    return bytes(answer)


async def _begun(reader: asyncio.StreamReader) -> bool:
    with suppress(ConnectionError):
        return await reader.read(1) == b"\n"
    return False


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also those that try a grammar
    process.wait()


def _environment() -> dict[str, str]:
    """Returns what a process needs to find its modules, and no keys or addresses."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    # One heap, because each further one reserves addresses that count towards the limit.
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_ARENA_MAX": "1"}


def _request(kind: StructureKind, described: Any) -> bytes:
    try:
        request = json.dumps([kind, described]).encode()
    except (ValueError, RecursionError):  # a number of thousands of digits
        raise StructureError("a number in it is too long, or it is nested too deep") from None
    if len(request) > MAX_DESCRIPTION:
        raise StructureError(f"it has {len(request)} bytes as JSON; give at most {MAX_DESCRIPTION}")
    return request


def _read(answer: bytes) -> Tried:
    if not answer:
        raise StructureError(_TOO_COSTLY)
    told = json.loads(answer)
    if "refused" in told:
        raise StructureError(told["refused"] or _TOO_COSTLY)
    if "fault" in told:
        raise TrialError(f"a trial failed with {told['fault']}")
    start = Position(tuple(told["forced"]), bytes.fromhex(told["legal"]), tuple(told["end"]))
    return Tried(told["grammar"], start, told["cpu_s"], told["memory"])
