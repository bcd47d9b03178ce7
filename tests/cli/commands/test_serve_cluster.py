"""Test the options of `moeinf serve --cluster` that need no cluster."""

from __future__ import annotations

import sys

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--router", "prefix"], "--router needs --cluster"),
        (["--replicas", "2"], "--replicas needs --cluster"),
        (["--retry"], "--retry needs --cluster"),
        (["--cluster", "local", "--router", "best"], "--router: 'best' is invalid"),
        (["--cluster", "local", "--replicas", "0"], "--replicas: '0' is invalid"),
        (["--cluster", "local", "--replicas", "4-2"], "--replicas: '4-2' is invalid"),
        (["--cluster", "local", "--replicas", "2-x"], "--replicas: '2-x' is invalid"),
        (["--cluster", "there"], "--cluster: 'there' is invalid"),
        (["--cluster", "ray://"], "--cluster: 'ray://' is invalid"),
        (["--cluster", "ray://head:10001"], "--port: 0 is invalid"),
        (["--cluster", "ray://head:10001", "--port", "1", "--router", "best"], "--router: 'best'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage(moeinf: Command, options: list[str], words: str) -> None:
    run = moeinf("serve", "--quiet", "--port", "0", *options)
    assert run.code == 2
    assert words in " ".join(run.err.split())


def test_without_ray(moeinf: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("moeinf.server.cluster.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    run = moeinf("serve", "--quiet", "--port", "0", "--cluster", "local")
    assert run.code == 2
    assert "pip install 'moeinf[cluster]'" in run.err
