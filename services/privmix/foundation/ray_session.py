"""Connects a command to an existing Ray cluster, or starts a local one for the duration of the command.

A client of a Ray cluster can run code in it and read the models' rows. So a cluster that a command starts accepts only
clients with its token, and listens only on the loopback interface.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import ray
from ray._private import ray_constants, services
from ray._private.authentication import authentication_token_setup as authentication
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token

from privmix.foundation.errors import WorkError

_SETTINGS, _SHARED = "PRIVMIX_", ("PRIVMIX_CACHE",)
"""The prefix of the variables that override the configuration, and those that workers read themselves."""


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Connects this process to a Ray cluster until the block ends.

    Uses the current connection of this process, or else the cluster at `address`, or else the one at `RAY_ADDRESS`.
    Otherwise it starts a cluster that stops at the end of the block.

    Raises:
        WorkError: the cluster cannot be reached or started.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    address = None if address == "local" else address  # as if it were not set, so that it listens on loopback alone
    if address:
        wait_for(address)
    local = {} if address else {"include_dashboard": False}
    try:
        os.environ.setdefault("HOME", str(Path.home()))  # Ray's processes look for the token there
        secure(address)
        with _without_settings():
            ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False, **local)
    except Exception as error:  # Ray 2.60 raises plain ones too: for a node that does not start in time
        how = (
            f"reached at {address}"
            if address
            else "started, with its files in RAY_TMPDIR or TMPDIR and its token in HOME"
        )
        raise WorkError(f"Ray could not be {how}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def wait_for(address: str, patience_s: float = 30.0) -> None:
    """Waits until something listens at the address of a cluster. Ray itself would wait for 14 minutes, silently.

    Raises:
        WorkError: nothing does after `patience_s`.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    deadline = time.monotonic() + patience_s
    while port.isdigit():  # not `auto`, which Ray finds at once or not at all
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise WorkError(
                    f"Ray could not be reached at {address} (--address or RAY_ADDRESS): {error}; start the cluster, or "
                    "leave the address out"
                ) from error
        time.sleep(0.5)


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Connects to the cluster of a running service. What Ray prints, from the connecting on, goes to standard error:
    standard output is for the result, which is printed after this."""
    with redirect_stdout(sys.stderr), connected(address):
        yield


@contextmanager
def _without_settings() -> Iterator[None]:
    """Hides the settings of the configuration that are in the environment from the processes that the block starts.

    Ray's processes pass their environment on to every worker and its children. The actors that need a key, a URL or a
    password have it among their arguments.
    """
    hidden = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS) and name not in _SHARED}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def secure(address: str | None) -> None:
    """Prepares `ray.init(address)`; None starts a cluster.

    The token of a started cluster is stored in ~/.ray/auth_token for later commands, readable only by this user. The
    environment overrides it: RAY_AUTH_MODE=disabled uses no token.
    """
    logging.getLogger(authentication.__name__).setLevel(logging.ERROR)
    if address is None:
        _create_token()  # Ray requires it by default
    elif not _is_loopback(address):
        return
    else:
        authentication.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    # Ray 2.60 has this switch for Windows and macOS. `get_node_ip_address` reads it at each call, and the GCS, the
    # raylet and all workers listen on the address that it returns.
    ray_constants.ENABLE_RAY_CLUSTER = False


def _is_loopback(address: str) -> bool:
    """Returns whether the address belongs to a local cluster on the loopback interface; `auto` finds its processes."""
    local = {gcs_address for gcs_address in services.find_gcs_addresses() if gcs_address.startswith("127.")}
    return address in local or (address == "auto" and bool(local))


def _create_token() -> None:
    """Creates the token file, readable only by this user. Ray would create it with the permissions of the umask."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as created:
            created.write(generate_new_authentication_token())
    except FileExistsError:
        file.chmod(0o600)
