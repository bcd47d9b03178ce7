"""Test encoder-decoders from the hub stand-in: pull, run and repair in separate processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moeinf.runtime.config import Settings
from scripts.make_checkpoint import byte_tokenizer
from tests.cli.conftest import command_in
from tests.conftest import pull
from tests.encoder_decoders import save_pair
from tests.hub_server import Hub, serve
from tests.runtime.generation.test_seq2seq import checkpoint


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    checkpoint("switch", folder)
    return folder


def bin_repository(source: Path, folder: Path, files: int) -> Path:
    """Write the checkpoint as published: one `.bin` file, or several and an index."""
    shutil.copytree(source, folder)
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(files):
        name = f"pytorch_model-{number + 1:05d}-of-{files:05d}.bin"
        name = "pytorch_model.bin" if files == 1 else name
        mine = dict(tensors[number::files])
        torch.save(mine, folder / name)
        weight_map.update(dict.fromkeys(mine, name))
    if files > 1:
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_pull_and_run(tmp_path: Path, repository: Path) -> None:
    with serve(Hub("Org/Tiny", bin_repository(repository, tmp_path / "bin", 1))) as hub:
        machine = command_in(tmp_path / "home")
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        pulled = machine("pull", "Org/Tiny:q8", "--name", "tiny:q8", **variables)
    assert pulled.code == 0, pulled.err
    asked = machine("run", "tiny:q8", "--json", "--max-tokens", "5", "Fill <extra_id_0> in")
    assert asked.code == 0, asked.err
    answer = json.loads(asked.out)
    assert answer["prompt_tokens"] == 9
    assert 1 <= answer["tokens"] <= 5
    refused = machine("run", "tiny:q8", "--tgt", "fra_Latn", "Hello")
    assert refused.code == 1
    assert "does not translate" in refused.err


def test_trace_a_translator(tmp_path: Path) -> None:
    folder, machine = tmp_path / "checkpoint", command_in(tmp_path / "home")
    save_pair("nllb", folder, vocab_size=300)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["eng_Latn", "fra_Latn", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    pull(folder, Settings(tmp_path / "home"), "tiny:f32")
    (tmp_path / "texts.txt").write_text("Hello\nGood bye\n")
    trace = ("trace", "tiny:f32", "--dataset", str(tmp_path / "texts.txt"), "--json")
    refused = machine(*trace)
    assert refused.code == 1
    assert "--tgt fra_Latn" in refused.out
    done = machine(*trace, "--src", "eng_Latn", "--tgt", "fra_Latn", "--max-tokens", "3")
    assert done.code == 0, done.err
    about = json.loads(done.out)
    assert about["requests"] == 2
    assert about["prompt_tokens"] == len("Hello") + len("Good bye") + 2 * len(("eng_Latn", "</s>"))


def test_bin_files_become_what_safetensors_do(tmp_path: Path, repository: Path) -> None:
    """Every byte except the tables is fetched once; a damaged file is fetched again."""
    pull(repository, Settings(tmp_path / "plain"), "tiny:q8")
    machine = command_in(tmp_path / "home")
    with serve(Hub("Org/Tiny", bin_repository(repository, tmp_path / "bin", 3))) as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        pulled = machine("pull", "Org/Tiny:q8", "--name", "tiny:q8", **variables)
        assert pulled.code == 0, pulled.err
        for file in hub.folder.glob("*.bin"):
            size = file.stat().st_size
            asked = sum(r.stop - r.start for r in hub.requests if r.file == file.name)
            assert size <= asked < size + 60_000
        plain, made = (tmp_path / home / "models/tiny/q8" for home in ("plain", "home"))
        shards = [p.relative_to(plain) for p in plain.glob("experts/**/*") if p.is_file()]
        assert len(shards) == 4 * 5
        for shard in (Path("dense.safetensors"), *shards):
            assert (plain / shard).read_bytes() == (made / shard).read_bytes()
        assert sorted(p.name for p in made.parent.iterdir()) == ["q8"]
        (made / shards[0]).write_bytes(b"damaged")
        repaired = machine("verify", "tiny:q8", "--repair", **variables)
        assert repaired.code == 0, repaired.err
    assert (plain / shards[0]).read_bytes() == (made / shards[0]).read_bytes()


@pytest.mark.parametrize(
    ("name", "family", "repo"),
    [
        ("switch-base-8", "switch_transformers", "google/switch-base-8"),
        ("nllb-moe", "nllb-moe", "facebook/nllb-moe-54b"),
    ],
)
def test_shown_before_they_are_pulled(tmp_path: Path, name: str, family: str, repo: str) -> None:
    machine = command_in(tmp_path / "home")
    text = machine("show", name)
    assert text.code == 0, text.err
    assert f"moeinf pull {name}" in text.out
    about = json.loads(machine("show", name, "--json").out)
    assert (about["family"], about["repo"]) == (family, repo)
    assert about["pulled"] is False
