"""Calls over a line: who may call, what errors and ends do, and that no connection waits for another."""

import asyncio
import gc
import pickle
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from weakref import ref

import pytest

from privmix.shards.line import NONCE, Line, LineAddress, LineServer


class UnpicklableError(ValueError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Target:
    """Notes what is called."""

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.released = Event()

    def note(self, value: Any) -> Any:
        self.called.append(value)
        return value

    def refuse(self, error: Exception) -> None:
        raise error

    def wait(self) -> None:
        self.released.wait()

    def wait_beside(self) -> None:
        self.released.wait()

    def beside(self) -> str:
        return "beside"

    def fail(self) -> None:
        made = Event()
        self.called.append(ref(made))
        raise LookupError

    def unsendable(self) -> Any:
        return lambda: None

    def refuse_twice(self) -> None:
        raise UnpicklableError("one", "two")


class Refusing:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Planted:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def served(use: Callable[[Target, LineAddress], Awaitable[None]]) -> None:
    target = Target()
    server = LineServer(target, ThreadPoolExecutor(1), "127.0.0.1", ("wait_beside", "beside"))
    asyncio.run(_limited(use(target, server.address)))


async def _limited(work: Awaitable[None]) -> None:
    await asyncio.wait_for(work, 30.0)


def test_calls_are_answered_in_order_with_what_the_method_returns_or_raises() -> None:
    async def use(target: Target, address: LineAddress) -> None:
        line = await Line.to(address)
        answers = [line.note.remote(0), line.refuse.remote(LookupError("no")), line.refuse_twice.remote()]
        given_up = line.note.remote(1)
        given_up.cancel()
        assert await line.note.remote(2) == 2
        assert await answers[0] == 0
        with pytest.raises(LookupError, match="no"):
            await answers[1]
        with pytest.raises(ValueError, match="one and two"):
            await answers[2]
        assert target.called == [0, 1, 2], "what was sent is run, also when nobody waits for it any more"
        line.note.remote(3)
        line.close()
        ended = await Line.to(address)
        assert await ended.note.remote(4) == 4
        assert target.called == [0, 1, 2, 3, 4], "what was sent before the end is run"

    served(use)


def test_a_call_that_waits_for_others_delays_no_other_connection() -> None:
    async def use(target: Target, address: LineAddress) -> None:
        line, other = await Line.to(address), await Line.to(address)
        waiting, next_ = line.wait_beside.remote(), line.note.remote(1)
        assert await other.note.remote(0) == 0
        assert not waiting.done()
        target.released.set()
        await waiting
        assert await next_ == 1

    served(use)


def test_answers_come_in_the_order_of_calls_where_one_waits_in_another_thread() -> None:
    async def use(target: Target, address: LineAddress) -> None:
        line = await Line.to(address)
        slow, beside, broken = line.wait.remote(), line.beside.remote(), line.note.remote(Refusing())
        await asyncio.sleep(0.1)
        assert not beside.done()
        target.released.set()
        assert (await slow, await beside) == (None, "beside"), "also where a later call cannot be read"
        with pytest.raises(ConnectionResetError):
            await broken

    served(use)


def test_nothing_of_a_call_that_failed_is_kept() -> None:
    async def use(target: Target, address: LineAddress) -> None:
        with pytest.raises(LookupError):
            await (await Line.to(address)).fail.remote()
        while target.called[0]() is not None:
            await asyncio.sleep(0.01)

    gc.disable()
    try:
        served(use)
    finally:
        gc.enable()


def test_a_call_without_an_answer_ends_its_connection_so_that_no_other_gets_a_wrong_one() -> None:
    async def use(target: Target, address: LineAddress) -> None:
        line = await Line.to(address)
        for answer in [line.note.remote(0), line.unsendable.remote(), line.note.remote(1)][1:]:
            with pytest.raises(ConnectionResetError):
                await answer
        assert await (await Line.to(address)).note.remote(2) == 2

    served(use)


def test_what_an_ended_connection_has_sent_runs_before_what_a_new_one_sends() -> None:
    async def use(target: Target, address: LineAddress) -> None:
        line = await Line.to(address)
        for call in (line.wait.remote(), *map(line.note.remote, range(3))):
            call.cancel()
        line.close()
        newer = await Line.to(address)
        answer = newer.note.remote(3)
        await asyncio.sleep(0.2)
        target.released.set()
        assert await answer == 3
        assert target.called == [0, 1, 2, 3]

    served(use)


def test_a_caller_without_the_secret_is_refused_and_nothing_of_it_is_unpickled(tmp_path: Path) -> None:
    async def use(target: Target, address: LineAddress) -> None:
        with pytest.raises(ConnectionError):
            await Line.to(replace(address, secret=b"another"))
        planted = pickle.dumps(Planted(tmp_path / "planted"))
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(bytes(NONCE) + bytes(NONCE) + len(planted).to_bytes(8) + planted)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(10_000)
        assert await (await Line.to(address)).note.remote(0) == 0
        assert target.called == [0]
        assert not (tmp_path / "planted").exists()
        pickle.loads(planted)
        assert (tmp_path / "planted").exists(), "the planted object works"

    served(use)


@pytest.mark.parametrize("echo", [False, True])
def test_whoever_took_the_port_of_a_dead_shard_gets_no_call(echo: bool) -> None:
    """It does not know the secret, also if it sends back what it gets."""
    heard: list[bytes] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1000))
        writer.write(2 * heard[0] if echo else bytes(2 * NONCE))
        heard.append(await reader.read(1000))
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(ConnectionRefusedError):
                await Line.to(LineAddress("127.0.0.1", port, bytes(NONCE)))
            while len(heard) < 2:
                await asyncio.sleep(0.01)
        assert heard[1] == b""

    asyncio.run(_limited(run()))


def test_a_silent_connection_delays_no_other() -> None:
    async def use(target: Target, address: LineAddress) -> None:
        with socket.create_connection((address.host, address.port)):
            line = await Line.to(address)
            assert await line.note.remote(0) == 0

    served(use)


def test_calls_of_an_ended_connection_fail_at_once() -> None:
    async def run() -> None:
        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.close()

        server = await asyncio.start_server(leave, "127.0.0.1", 0)
        async with server:
            line = Line(*await asyncio.open_connection(*server.sockets[0].getsockname()))
            for _ in range(2):
                with pytest.raises(ConnectionResetError):
                    await line.note.remote(0)

    asyncio.run(_limited(run()))
