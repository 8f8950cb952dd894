"""Keeps a service from sharing a port with another one on its machine.

HAProxy, which Ray Serve starts, opens its port with SO_REUSEPORT, so that a successor listens before its
predecessor has ended. The same lets a second service listen, too: Linux then divides the connections between both, and
requests reach another corpus. So a service that starts claims its port first.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from privmix.foundation.errors import ConfigurationError

Endpoint = tuple[str, str, int]
"""The setting with the port, the host, and the port."""


@contextmanager
def claimed(endpoint: Endpoint) -> Iterator[None]:
    """Reserves a port until the block ends. In it, processes of this user can open it; other starts are refused.

    Raises:
        ConfigurationError: another program has the port, or it cannot be opened.
    """
    _, host, port = endpoint
    try:
        claim = _claim(host, port)
    except OSError as error:
        raise cannot_listen(endpoint, error) from error
    with claim:
        yield


def cannot_listen(endpoint: Endpoint, cause: BaseException) -> ConfigurationError:
    field, host, port = endpoint
    return ConfigurationError(f"{field}: cannot listen on {host}:{port} ({cause}); free the port or choose another")


def _claim(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not listen. It shares the port with what is opened with SO_REUSEPORT.

    HAProxy opens its port so: without this check two services on one port divide the connections silently.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as alone:
        # Connections that have ended may still hold the port. With SO_REUSEADDR they do not count, listeners do.
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind(address)
    claim = socket.socket(family, kind, protocol)
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    with suppress(OSError):  # an ended connection of a program without SO_REUSEPORT: then listeners alone refuse
        claim.bind(address)  # without SO_REUSEADDR, so that the bind of another start fails
    return claim
