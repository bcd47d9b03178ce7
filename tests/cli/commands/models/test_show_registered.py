"""Test `moeinf show NAME` for every model that has a short name, before a pull.

The command runs in this process, because there are many names.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.cli.commands.models.show import show
from moeinf.runtime.hub.aliases import Entry, registry
from moeinf.runtime.sizes import format_bytes
from tests.cli.conftest import check_document


@pytest.mark.parametrize("entry", registry().values(), ids=lambda entry: entry.name)
def test_show_before_a_pull(
    entry: Entry,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    for name in (entry.name, *entry.aliases):
        show(name)
        text = capsys.readouterr().out
        assert f"https://huggingface.co/{entry.repo}" in text
        assert f"not pulled: `moeinf pull {entry.name}`" in text
        assert f"{entry.licence} (its repository decides)" in text
        assert format_bytes(entry.sizes()[entry.tag]) in text
        show(name, json=True)
        about = json.loads(capsys.readouterr().out)
        check_document("show-registered", about)
        assert (about["repo"], about["family"], about["pulled"]) == (
            entry.repo,
            entry.family,
            False,
        )
    assert list(tmp_path.iterdir()) == []
