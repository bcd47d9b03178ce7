"""An encoder-decoder from the stand-in for the hub, pulled and asked as processes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import command_in
from tests.hub_server import Hub, serve
from tests.runtime.test_encoder_decoders import checkpoint


def test_pull_and_run(tmp_path: Path) -> None:
    checkpoint("switch", tmp_path / "repository")
    with serve(Hub("Org/Tiny-Switch", tmp_path / "repository")) as hub:
        machine = command_in(tmp_path / "home")
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        pulled = machine("pull", "Org/Tiny-Switch:q8", "--name", "tiny:q8", **variables)
    assert pulled.code == 0, pulled.err
    asked = machine("run", "tiny:q8", "--json", "--max-tokens", "5", "Fill <extra_id_0> in")
    assert asked.code == 0, asked.err
    answer = json.loads(asked.out)
    assert answer["prompt_tokens"] == 9
    assert 1 <= answer["tokens"] <= 5
    refused = machine("run", "tiny:q8", "--tgt", "fra_Latn", "Hello")
    assert refused.code == 1
    assert "does not take languages" in refused.err
