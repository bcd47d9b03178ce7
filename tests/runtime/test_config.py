"""Durations and other settings from the environment."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from moeinf.runtime.config import (
    EngineConfig,
    parse_duration,
    read_environment,
    read_server_environment,
)
from moeinf.runtime.invalid import InvalidValue


def test_several_homes() -> None:
    settings = read_environment({"MOEINF_HOME": "/a:/b/c::/d"})
    assert settings.models == Path("/a/models")
    assert settings.more_homes == (Path("/b/c"), Path("/d"))
    assert settings.homes == "/a:/b/c:/d"
    assert read_environment({"MOEINF_HOME": "/a"}).more_homes == ()
    for text in (":", "/a:/b:/a", "/a:~no-such-user/b"):
        with pytest.raises(InvalidValue, match="MOEINF_HOME"):
            read_environment({"MOEINF_HOME": text})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("1.5h", 5400), ("10s", 10), ("30", 30),
        ("0", 0), (0, 0), (2.5, 2.5), ("-1", math.inf), (-1, math.inf), ("-5m", math.inf),
        ("inf", math.inf), ("1e400", math.inf), ("9" * 60, float("9" * 60)),
    ],
)  # fmt: skip
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "m", "5 m", "5x", "1h-30m", "--5m", "nan", "5m\n", "1h30", "s" * 9, math.nan,
        10**400, "9" * 40_000, "9" * 40_000 + "m", "1s" * 40_000, "1." * 40_000,
    ],
)  # fmt: skip
def test_what_is_no_duration(text: str | float) -> None:
    """Parsing 40,000 digits once took 32 s."""
    start = time.monotonic()
    with pytest.raises(InvalidValue) as refused:
        parse_duration(text)
    assert len(str(refused.value)) < 200
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MOEINF_NUM_PARALLEL", "17"),
        ("MOEINF_NUM_PARALLEL", "0"),
        ("MOEINF_MAX_QUEUE", "9" * 5000),
        ("MOEINF_KEEP_ALIVE", "soon"),
        ("MOEINF_HOST", "localhost:" + "1" * 5000),
    ],
)
def test_settings_that_are_invalid(name: str, value: str) -> None:
    with pytest.raises(InvalidValue):
        read_server_environment({name: value})


def test_engines_that_cannot_be() -> None:
    with pytest.raises(InvalidValue):
        read_environment({"MOEINF_MEMORY": "much"})
    assert read_environment({"MOEINF_MEMORY": "auto"}).memory is None
    with pytest.raises(InvalidValue, match="MOEINF_KV: 'q9' is invalid"):
        read_environment({"MOEINF_KV": "q9"})
    assert read_environment({"MOEINF_KV": "q8"}).kv == "q8"
    with pytest.raises(InvalidValue):
        EngineConfig(context=0)
