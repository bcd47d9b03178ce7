"""A quantisation that only hf_quant_config.json names is detected for every source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from moeinf.models.families import family_of
from moeinf.models.quantisation import UnsupportedQuantisation
from moeinf.runtime.checkpoints.checkpoint import QUANTISED, open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.checkpoints.torch_bin import open_folder
from moeinf.runtime.hub.listing import look_up
from moeinf.runtime.hub.repository import HubSource
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.library.sources import LocalSource, Source
from tests.hub_server import Hub, serve

AWQ = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4_AWQ"}}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return the demo with ModelOpt's file beside it, and a config that does not mention it."""
    shutil.copytree(DEMO_CHECKPOINT, tmp_path / "awq")
    (tmp_path / "awq" / QUANTISED).write_text(json.dumps(AWQ))
    return tmp_path / "awq"


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(Hub("org/demo", repository)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        url = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        yield hub


def refused(source: Source) -> str:
    with pytest.raises(UnsupportedQuantisation) as caught:
        take_inventory(family_of(source.checkpoint.config), source.checkpoint)
    return caught.value.method


def test_a_folder(repository: Path) -> None:
    for opened in (open_checkpoint(repository), open_folder(repository)):
        assert refused(LocalSource(opened, "awq")) == "ModelOpt (NVFP4_AWQ)"


@pytest.mark.usefixtures("hub")
def test_a_repository(tmp_path: Path) -> None:
    source = HubSource(look_up("org/demo", None, None), tmp_path / "work", None)
    assert refused(source) == "ModelOpt (NVFP4_AWQ)"


@pytest.mark.usefixtures("hub")
def test_a_cache_that_lacks_the_file(tmp_path: Path) -> None:
    found = look_up("org/demo", None, None)
    source = HubSource(found, tmp_path / "work", None, snapshot=DEMO_CHECKPOINT)
    assert refused(source) == "ModelOpt (NVFP4_AWQ)"


@pytest.mark.parametrize(
    ("beside", "is_quantised"),
    [
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, False),
        ({"quantization": {"quant_algo": "FP8"}}, True),
        ({"quantization": "x"}, True),
        ({}, True),
    ],
)
def test_what_the_file_may_say(repository: Path, beside: Any, is_quantised: bool) -> None:
    (repository / QUANTISED).write_text(json.dumps(beside))
    checkpoint = open_checkpoint(repository)
    assert ("quantization_config" in checkpoint.config) == is_quantised
