"""Refuses requests that a web page may have sent. Where there are no keys, nothing else shows who sends a request.

A browser lets any page send requests to `localhost`. It names the page in `Origin`, and in `Host` the name by which the
page called the service: a page whose own name suddenly resolves to this machine (DNS rebinding) has the same name in
both. So the name must be one that only this machine or its operator gives. An address in numbers cannot be rebound.
"""

import re
from collections.abc import Collection
from ipaddress import ip_address

from starlette.requests import HTTPConnection

from privmix.gateway.errors import ApiError

ALL = "*"
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(?::[0-9]{1,5})?")


def check_sender(connection: HTTPConnection, allowed_hosts: Collection[str], origins: Collection[str]) -> None:
    """Checks that a request without a key comes from a program, or from a page of this service or of `origins`.

    Args:
        allowed_hosts: names of the service besides `localhost` and addresses; `*` allows all.
        origins: the origins of other pages that may call the service; `*` allows all.

    Raises:
        ApiError: 403, the name of the service or the page is a foreign one.
    """
    hosts, senders = connection.headers.getlist("host"), connection.headers.getlist("origin")
    if len(hosts) != 1 or not (ALL in allowed_hosts or _is_own(_name(hosts[0]), allowed_hosts)):
        fix = "call it as localhost or by its address, or its operator adds the name to http.allowed_hosts"
        raise _refused("host_not_allowed", fix)
    for origin in senders:
        if ALL not in origins and origin not in origins and origin.partition("://")[2] != hosts[0]:
            raise _refused("origin_not_allowed", "its operator adds the page's origin to http.cors_origins")


def _name(host: str) -> str:
    """Returns the name or the address of a header `Host`, without its port and the brackets of IPv6."""
    match = _HOST.fullmatch(host)
    return "" if match is None else match["address"] or match["name"]


def _is_own(name: str, allowed: Collection[str]) -> bool:
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost") or name in {other.lower() for other in allowed}:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _refused(code: str, fix: str) -> ApiError:
    message = f"this service has no keys, so it does not answer to web pages of others: create a key, or {fix}"
    return ApiError(403, message, code=code)
