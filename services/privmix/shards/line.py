"""Carries calls to a shard over a TCP connection: in order, in a tenth of the time that Ray takes for its calls.

A GPU waits between two steps for two calls: `tests/benchmarks/host_path.py` measures for how long. Ray's own call tells
the caller an address and a secret (`Shard.line`). Before anything is unpickled, each side proves to the other that it
knows the secret: the port of a shard that died may belong to anybody. As between Ray's processes, frames are neither
encrypted nor signed.

A frame is the pickled arguments or answer, after its length. A call runs at most once.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_bytes
from threading import Thread
from typing import Any, BinaryIO

NONCE = 32
LENGTH = 8
"""The bytes of a frame's length."""
CONNECT_S = 5.0
"""How long the two sides may take to prove what they know."""
ACCEPT_S = 0.1
"""The time between two attempts to accept a connection."""
SILENT_S = 3
"""After how many seconds of silence the other side's kernel is asked whether it lives, and how often, three times."""


@dataclass(frozen=True, slots=True)
class LineAddress:
    host: str
    port: int
    secret: bytes = field(repr=False)


class LineServer:
    """Answers calls, those of a connection in their order.

    Args:
        target: the object whose methods are called.
        thread: runs them, one after another.
        waiting: those that run in their connection's thread instead, after its earlier calls and before later ones.
    """

    def __init__(self, target: object, thread: Executor, host: str, waiting: Collection[str] = ()) -> None:
        self._target = target
        self._thread = thread
        self._waiting = waiting
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address = LineAddress(host, self._listener.getsockname()[1], token_bytes(NONCE))
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no more files or threads for now
                time.sleep(ACCEPT_S)

    def _serve(self, connection: socket.socket) -> None:
        """Reads the calls of one connection until it ends."""
        with connection, connection.makefile("rb") as frames, suppress(Exception):
            _keep(connection)
            self._check(connection, frames)
            try:
                while True:
                    method, arguments = pickle.loads(_read(frames, int.from_bytes(_read(frames, LENGTH))))
                    if method in self._waiting:
                        self._wait_for_earlier()
                        self._answer(connection, method, arguments)
                    else:
                        self._thread.submit(self._answer, connection, method, arguments)
            finally:
                self._wait_for_earlier()

    def _wait_for_earlier(self) -> None:
        """Waits until all calls that were submitted are answered."""
        self._thread.submit(lambda: None).result()

    def _check(self, connection: socket.socket, frames: BinaryIO) -> None:
        """Raises OSError or EOFError: the caller does not prove that it knows the secret."""
        connection.settimeout(CONNECT_S)
        theirs, own = _read(frames, NONCE), token_bytes(NONCE)
        connection.sendall(own + _proof(self.address, b"shard", theirs, own))
        if not hmac.compare_digest(_read(frames, NONCE), _proof(self.address, b"caller", theirs, own)):
            raise ConnectionRefusedError
        connection.settimeout(None)

    def _answer(self, connection: socket.socket, method: str, arguments: tuple[Any, ...]) -> None:
        """Runs a call. Ends the connection where there is no answer, because answers belong to calls by their order."""
        try:
            answer: tuple[bool, Any]
            try:
                answer = True, getattr(self._target, method)(*arguments)
            except Exception as error:
                answer = False, _portable(error.with_traceback(None))  # which would keep what the call has made
            connection.sendall(_frame(answer))
        except BaseException:
            with suppress(OSError):  # the caller has left
                connection.shutdown(socket.SHUT_RDWR)


class Line:
    """Stands for an actor's handle: `line.weigh.remote(asked)` calls `Shard.weigh` and returns a future.

    The future raises what the method raises, or ConnectionError if the connection ends first.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._reading = asyncio.create_task(self._read(reader))
        self._reading.add_done_callback(self._end)

    @classmethod
    async def to(cls, address: LineAddress) -> Line:
        """Connects to a shard.

        Raises:
            OSError: it does not answer, or does not prove that it is the shard.
        """
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                _keep(writer.get_extra_info("socket"))
                own = token_bytes(NONCE)
                writer.write(own)
                theirs = await reader.readexactly(NONCE)
                if not hmac.compare_digest(await reader.readexactly(NONCE), _proof(address, b"shard", own, theirs)):
                    raise ConnectionRefusedError("the shard's port belongs to another process")
                writer.write(_proof(address, b"caller", own, theirs))
            except EOFError:
                writer.close()
                raise ConnectionResetError from None
            except BaseException:
                writer.close()
                raise
        return cls(reader, writer)

    def __getattr__(self, method: str) -> _Method:
        return _Method(lambda *arguments: self._call(method, arguments))

    def close(self) -> None:
        """Ends the connection after what was sent. Calls without an answer raise ConnectionError."""
        self._reading.cancel()

    def _call(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it
        if self._reading.done():
            answer.set_exception(ConnectionResetError())
        else:
            self._writer.write(_frame((method, arguments)))
            self._waiting.append(answer)
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            length = int.from_bytes(await reader.readexactly(LENGTH))
            good, value = pickle.loads(await reader.readexactly(length))
            answer = self._waiting.popleft()
            if not answer.done():
                (answer.set_result if good else answer.set_exception)(value)

    def _end(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            reading.exception()  # what ended the connection
        self._writer.close()
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(ConnectionResetError())


@dataclass(frozen=True, slots=True)
class _Method:
    remote: Callable[..., asyncio.Future[Any]]


def _frame(content: object) -> bytes:
    pickled = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return len(pickled).to_bytes(LENGTH) + pickled


def _portable(error: Exception) -> Exception:
    """Returns the error, or one that tells its type or message if a caller could not get it or would take it amiss."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ValueError(str(error)) if isinstance(error, ValueError) else RuntimeError(type(error).__name__)
    unlike_itself = isinstance(error, ConnectionError | StopIteration)
    return RuntimeError(type(error).__name__) if unlike_itself else error


def _read(frames: BinaryIO, length: int) -> bytes:
    """Raises EOFError: the connection ended."""
    read = frames.read(length)
    if len(read) < length:
        raise EOFError
    return read


def _proof(address: LineAddress, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(address.secret, side + first + second, "sha256")


def _keep(connection: socket.socket) -> None:
    """Sends frames at once, and notices a machine that has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        connection.setsockopt(socket.IPPROTO_TCP, option, SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000 * SILENT_S)
