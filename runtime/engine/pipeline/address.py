"""Where a stage is. The command line parses it without what a connection needs."""

from __future__ import annotations

from moeinf.runtime.config import ServerSettings
from moeinf.runtime.invalid import InvalidValue

LEAST_KEY = 16  # characters


def parse_address(option: str, text: str, key: str | None) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [V6]:PORT.

    Raises InvalidValue, also for an address beyond this machine without a key.
    """
    host, _, port = text.strip().rpartition(":")
    number = int(port) if port.isdecimal() and len(port) <= 5 else -1
    if not host or not 0 <= number < 1 << 16:
        raise InvalidValue(f"{option}: {text[:80]!r} is invalid (expected HOST:PORT)")
    host = host.strip("[]")
    if not ServerSettings(host=host).on_loopback and len(key or "") < LEAST_KEY:
        error = InvalidValue(
            f"{option}: {text[:80]!r} is another machine's or open to others, and MOEINF_STAGE_KEY "
            f"has fewer than {LEAST_KEY} characters"
        )
        error.hint = "`export MOEINF_STAGE_KEY=$(openssl rand -hex 16)`, the same for all stages"
        raise error
    return host, number
