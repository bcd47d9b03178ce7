"""Read the headers Host and Origin strictly, as RFC 9110 and browsers write them.

Text with more in it than a name and a port is invalid: two readers could see two hosts in it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?:\[(?P<v6>[0-9a-f:.]{{2,45}})\]|(?P<name>{_LABEL}(?:\.{_LABEL})*))", re.A)
_PORT = re.compile(r":[0-9]{1,5}", re.A)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,40})://", re.A)
_MOST_CHARACTERS = 300


@dataclass(frozen=True)
class Origin:
    """scheme and host of an Origin, in lower case. host: empty for a scheme of files."""

    scheme: str
    host: str


def host_of(text: str) -> str | None:
    """Return a Host's name in lower case, or its address without brackets; None: it is invalid."""
    text = text.lower()
    found = _HOST.match(text) if len(text) <= _MOST_CHARACTERS else None
    if found is None:
        return None
    port = text[found.end() :]
    if port and not (_PORT.fullmatch(port) and int(port[1:]) < 1 << 16):
        return None
    address = found["v6"]
    return found["name"] if address is None else address if is_address(address) else None


def origin_of(text: str) -> Origin | None:
    """Return an Origin's parts; None: it is invalid, has no scheme, or is `null`."""
    found = _SCHEME.match(text.lower())
    if found is None:
        return None
    rest = text[found.end() :]
    host = host_of(rest) if rest else ""
    return None if host is None else Origin(found[1], host)


def is_address(host: str) -> bool:
    """Return True for an IP address without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
