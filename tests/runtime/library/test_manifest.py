"""Manifests that another version of the program wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.offload.format.layout import LAYOUT_VERSIONS
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    DamagedModel,
    NewerModel,
    OlderModel,
    read_manifest,
)


@pytest.fixture
def text(demo_home: Path) -> dict[str, object]:
    """Return the manifest of demo:bf16 as JSON."""
    folder = Library(Settings(demo_home)).read("demo")[1]
    document: dict[str, object] = json.loads((folder / MANIFEST).read_text())
    return document


def error_of(folder: Path, document: dict[str, object]) -> type[DamagedModel]:
    (folder / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(DamagedModel) as caught:
        read_manifest(folder)
    return caught.type


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"layout": LAYOUT_VERSIONS["BF16"] + 1}, NewerModel),
        ({"format": FORMAT_VERSION + 1}, NewerModel),
        ({"dtype": "Q4", "layout": LAYOUT_VERSIONS["Q4"] - 1}, OlderModel),
        ({"dtype": "Q8", "layout": 1}, OlderModel),
        ({"layout": 0}, DamagedModel),
        ({"layout": True}, DamagedModel),
        ({"layout": None}, DamagedModel),
        ({"format": "1"}, DamagedModel),
        ({"dtype": "Q3"}, DamagedModel),
        ({"dtype": ["BF16"]}, DamagedModel),
    ],
)
def test_versions(
    text: dict[str, object], change: dict[str, object], error: type, tmp_path: Path
) -> None:
    assert error_of(tmp_path, {**text, **change}) is error
