"""A Ray cluster for the time of a command: one that exists, or one of this machine's own.

A client that reaches a Ray cluster can run code in it and read the models' rows. A cluster that a command starts
therefore accepts only clients with its token, and listens on the loopback interface alone.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import ray
from ray._private import ray_constants, services
from ray._private.authentication import authentication_token_setup as authentication
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token

from services.errors import WorkError

_DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Connect this process to a Ray cluster until the block ends.

    Uses the cluster that this process is connected to, else the one at `address`, else the one that `RAY_ADDRESS`
    names, else starts one that ends with the block.

    Raises:
        WorkError: the cluster cannot be reached or started.
    """
    if ray.is_initialized():
        yield
        return
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = address or os.environ.get("RAY_ADDRESS")
    secure(address)
    local = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False, **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkError(f"Ray could not be {'reached at ' + address if address else 'started'}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Connects to the cluster of a running service. What Ray prints goes to standard error: standard output is for the
    result, which is printed after this."""
    with connected(address), redirect_stdout(sys.stderr):
        yield


def secure(address: str | None) -> None:
    """Prepare `ray.init(address)`; None starts a cluster.

    The token of a cluster that is started is kept in ~/.ray/auth_token, readable by this user alone, for later
    commands. The environment wins: RAY_AUTH_MODE=disabled goes without a token.
    """
    logging.getLogger(authentication.__name__).setLevel(logging.ERROR)
    if address is None:
        _make_token()  # Ray asks for it by default
    elif not _is_loopback(address):
        return
    else:
        authentication.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    # Ray 2.60 has this switch for Windows and macOS. `get_node_ip_address` reads it whenever it is asked; the GCS, the
    # raylet and every worker listen on the address that it returns.
    ray_constants.ENABLE_RAY_CLUSTER = False


def _is_loopback(address: str) -> bool:
    """Whether this is a cluster that listens on the loopback interface, which `auto` finds by its processes."""
    found = {one for one in services.find_gcs_addresses() if one.startswith("127.")}
    return address in found or (address == "auto" and bool(found))


def _make_token() -> None:
    """Ray would make the file readable by every user that the umask allows."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as created:
            created.write(generate_new_authentication_token())
    except FileExistsError:
        file.chmod(0o600)
