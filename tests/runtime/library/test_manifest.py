"""Manifests that another version of the program wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.offload.format.layout import LAYOUT_VERSIONS
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    DamagedModel,
    NewerModel,
    OlderModel,
    read_manifest,
    write_manifest,
)
from tests.conftest import pull


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
        ({"dtype": "Q9"}, DamagedModel),
        ({"dtype": ["BF16"]}, DamagedModel),
    ],
)
def test_versions(
    text: dict[str, object], change: dict[str, object], error: type, tmp_path: Path
) -> None:
    assert error_of(tmp_path, {**text, **change}) is error


FORMS = [["Q4", "Q8"]] * 6


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return the manifest of demo:q4d8 as JSON."""
    settings = Settings(tmp_path_factory.mktemp("home"))
    manifest = pull(DEMO_CHECKPOINT, settings, "demo:q4d8")
    document: dict[str, object] = json.loads(
        (Library(settings).folder(manifest.model) / MANIFEST).read_text()
    )
    return document


def test_one_pair_stands_for_all_layers(mixed: dict[str, object], tmp_path: Path) -> None:
    assert (mixed["dtype"], mixed["forms"], mixed["layouts"]) == ("Q4", [["Q4", "Q8"]], {"Q8": 2})
    (tmp_path / MANIFEST).write_text(json.dumps({**mixed, "forms": FORMS}))
    manifest = read_manifest(tmp_path)
    assert [tuple(pair) for pair in manifest.forms] == [("Q4", "Q8")] * 6
    assert len({id(layout) for layout in manifest.expert_layouts}) == 1
    assert manifest.expert_bits == 35 / 6
    assert manifest.expert_bytes == manifest.shards()[0].data_bytes == 2 * 4608 + 8704
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_a_model_of_one_format_has_no_new_field(text: dict[str, object]) -> None:
    assert "forms" not in text
    assert "layouts" not in text


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"layouts": {"Q8": LAYOUT_VERSIONS["Q8"] + 1}}, NewerModel),
        ({"layouts": {"Q8": LAYOUT_VERSIONS["Q8"] - 1}}, OlderModel),
        ({"layouts": {"Q8": 2, "Q9": 1}}, DamagedModel),
        ({"layouts": {"Q8": "2"}}, DamagedModel),
        ({"layouts": {"Q8": True}}, DamagedModel),
        ({"layouts": {}}, DamagedModel),
        ({"layouts": [["Q8", 2]]}, DamagedModel),
        ({"forms": []}, DamagedModel),  # then a shard is too large
        ({"forms": FORMS[:5]}, DamagedModel),
        ({"forms": FORMS * 2}, DamagedModel),
        ({"forms": [["Q8", "Q4"]]}, DamagedModel),
        ({"forms": [*FORMS[:5], ["Q4", "Q4"]]}, DamagedModel),
        ({"forms": [["Q4", "Q8", "Q8"]]}, DamagedModel),
        ({"forms": [["Q4"]]}, DamagedModel),
        ({"forms": [["Q4", "MXFP4"]]}, DamagedModel),
        ({"forms": [["Q4", "BF16"]], "layouts": {"BF16": 1}}, DamagedModel),
        ({"forms": ["Q4", "Q8"]}, DamagedModel),
        ({"forms": "Q4Q8"}, DamagedModel),
        ({"forms": [["Q4", None]]}, DamagedModel),
        ({"layers": 1 << 40}, DamagedModel),
    ],
)
def test_hostile_forms(
    mixed: dict[str, object], change: dict[str, object], error: type, tmp_path: Path
) -> None:
    assert error_of(tmp_path, {**mixed, **change}) is error
