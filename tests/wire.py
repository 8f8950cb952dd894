"""A proxy to a PostgreSQL server that can lose a connection at a commit."""

import socket
import threading
from contextlib import closing, suppress
from pathlib import Path
from select import select
from typing import Literal

_SOCKET = ".s.PGSQL.5432"
_COMMIT = b"COMMIT\0"


class Wire:
    """Forwards data between clients, which use `folder` as the host, and a server.

    With `lose` set, loses the request or the answer of the next commit, and then works normally again.
    """

    def __init__(self, folder: Path, server: Path) -> None:
        self.lose: Literal["request", "answer"] | None = None
        self._server = str(server / _SOCKET)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / _SOCKET))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with closing(client), closing(socket.socket(socket.AF_UNIX)) as server, suppress(OSError):
            server.connect(self._server)
            while self._pass_on(client, server):
                pass

    def _pass_on(self, client: socket.socket, server: socket.socket) -> bool:
        ready, _, _ = select([client, server], [], [])
        for source, sink in ((client, server), (server, client)):
            if source not in ready:
                continue
            message = source.recv(65536)
            if self.lose and _COMMIT in message:
                if self.lose == "answer":
                    server.sendall(message)
                    server.recv(65536)
                self.lose = None
                return False
            if not message:
                return False
            sink.sendall(message)
        return True
