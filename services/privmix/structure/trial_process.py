"""Runs as the processes of `Trials`: each translates and compiles one grammar at a time, within limits of the system.

The first process reads the vocabulary and then only forks, so that a process that was killed is replaced at once. Its
standard input is a socket, which brings the tokenizer and then, for each trial, one end of a socket of its own.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from privmix.structure.compiler import begun, probe
from privmix.structure.errors import StructureError
from privmix.structure.grammar import of_kind
from privmix.structure.vocabulary import Vocabulary

TRIALS = 500
"""How many trials a process serves."""
LEFT = 32 << 20
"""The bytes that trials may leave behind in a process, such as in a fragmented heap. With more, it ends."""
STACK = 4 << 20
"""Half of the stack that a thread has where the grammar is compiled afterwards."""
CLOSED = 3
"""The exit code of a process that waited when `Trials` ended."""

_PAGE = resource.getpagesize()


def main() -> None:
    control = socket.socket(fileno=0)
    (length,) = struct.unpack("!Q", _received(control, 8))
    setup = json.loads(_received(control, length))
    try:
        vocabulary = Vocabulary.read(setup["tokenizer"], setup["ends"])
    except StructureError as error:
        control.sendall(str(error).encode())
        return
    limits = setup["limits"]
    del setup
    _never_dump_core()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory that it shares
    control.sendall(b"\n")
    alive = set[int]()
    while True:
        while len(alive) < limits["processes"]:
            process = os.fork()
            if not process:
                _serve(control, vocabulary, limits)
            alive.add(process)
        ended, status = os.wait()
        alive.discard(ended)
        if os.waitstatus_to_exitcode(status) == CLOSED:
            return


def _serve(control: socket.socket, vocabulary: Vocabulary, limits: dict[str, float]) -> None:
    """Tries grammars and ends this process. The system may end it before."""
    code, begun_with = 1, _pages()[1]
    try:
        for _ in range(TRIALS):
            addresses = _pages()[0] * _PAGE + int(limits["memory"])
            resource.setrlimit(resource.RLIMIT_AS, (addresses, resource.RLIM_INFINITY))
            _, descriptors, *_ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                os._exit(CLOSED)
            with socket.socket(fileno=descriptors[0]) as connection, suppress(ConnectionError):
                connection.sendall(b"\n")
                _try_one(connection, vocabulary, limits)
            if (_pages()[1] - begun_with) * _PAGE > LEFT:
                break
        code = 0
    finally:
        os._exit(code)


def _try_one(connection: socket.socket, vocabulary: Vocabulary, limits: dict[str, float]) -> None:
    """Reads a description and answers with its grammar."""
    # These signals end the process, whatever it does. No Python code has to run.
    signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
    signal.setitimer(signal.ITIMER_REAL, limits["wall_s"])
    with connection.makefile("rb") as request:
        text = request.read()
    kind, described = json.loads(text)
    # Only clients' own expressions and rules can lead to more states than an engine may have.
    probed = kind in ("regex",) or b"pattern" in text
    connection.sendall(json.dumps(_answer(partial(of_kind, kind, described), vocabulary, probed=probed)).encode())
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(make: "partial[str]", vocabulary: Vocabulary, *, probed: bool) -> dict[str, Any]:
    """Returns the fields of `Tried`; or a reason, which is empty if a limit was reached; or the name of an error."""
    try:
        grammar = make()
        held, at = _held(), time.process_time()
        matcher, start = begun(grammar, vocabulary)
        cpu_s, memory = time.process_time() - at, max(0, _held() - held)
        if probed:
            probe(matcher, vocabulary)
        del matcher
        found = {"forced": start.forced, "legal": start.legal.hex(), "end": start.end}
        return {"grammar": grammar, **found, "cpu_s": cpu_s, "memory": memory}
    except StructureError as error:
        return {"refused": str(error)}
    except (MemoryError, RecursionError):
        return {"refused": ""}
    except Exception as error:
        return {"fault": type(error).__name__}
    except BaseException:  # the engine's own failures
        return {"refused": "it is invalid, or the grammar engine does not support it"}


class _Mallinfo2(ctypes.Structure):
    """The C library's account of its heap, `man mallinfo`."""

    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]
    MAPPED, USED = "field4", "field7"  # hblkhd and uordblks


def _held() -> int:
    """Returns the bytes that this process has allocated and not freed; those of its own pages where nothing tells."""
    try:
        account = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return _pages()[1] * _PAGE
    account.restype = _Mallinfo2
    heap = account()
    return int(getattr(heap, heap.USED) + getattr(heap, heap.MAPPED))


def _pages() -> tuple[int, int]:
    """Returns the pages of this process's addresses, and those of its own memory, where the system tells them."""
    with suppress(OSError):
        size, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return size, resident - shared
    return 1 << 40, 0


def _never_dump_core() -> None:
    """Keeps clients' text out of dumps, limits the stack, and lets the system end these processes before others."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _received(control: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        piece = control.recv(min(length - len(received), 1 << 20))
        if not piece:
            raise SystemExit
        received += piece
    return bytes(received)


if __name__ == "__main__":
    main()
