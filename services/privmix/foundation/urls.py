"""Writes URLs of services, and says whether a proxy stands before one."""

from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def http_url(host: str, port: int) -> str:
    """Returns the URL of a service; an IPv6 address is in brackets there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def proxy_before(url: str) -> str | None:
    """Returns the variable of the environment that names the proxy of a URL; None for this machine, or if none does.

    Raises:
        ValueError: it is no URL.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if _is_loopback(host) or proxy_bypass(host):
        return None
    return next((f"{scheme.upper()}_PROXY" for scheme in (parts.scheme, "all") if scheme in getproxies()), None)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
