"""`moeinf export`: what it writes, what it refuses, and what it leaves after a failure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFReader

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.cli.conftest import COMMAND, Command, command_in, environment


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_of_the_demo(moeinf: Command, tmp_path: Path) -> None:
    file = tmp_path / "demo.gguf"
    result = moeinf("export", "demo", "--gguf", str(file))
    assert result.code == 0
    assert result.out == f"exported 'demo:bf16' to {file}, 10.0 MiB\n"
    assert names(tmp_path) == ["demo.gguf"]
    reader = GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "olmoe"
    assert (keys["olmoe.block_count"], keys["olmoe.expert_count"]) == (6, 32)
    assert keys["olmoe.rope.freq_base"] == 10000
    assert keys["tokenizer.ggml.bos_token_id"] == 1
    assert keys["tokenizer.ggml.eos_token_id"] == 4
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert len(keys["tokenizer.ggml.tokens"]) == 272
    template = (DEMO_CHECKPOINT / "chat_template.jinja").read_text()
    assert keys["tokenizer.chat_template"] == template


def test_the_experts_are_in_their_order(moeinf: Command, tmp_path: Path) -> None:
    """Every expert's matrix has the bytes of the checkpoint, at its own place."""
    assert moeinf("export", "demo", "--gguf", str(tmp_path / "x")).code == 0
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "x").tensors}
    raw = (DEMO_CHECKPOINT / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def source(name: str) -> bytes:
        start, end = header[name]["data_offsets"]
        return raw[8 + length + start : 8 + length + end]

    for layer, expert, role in ((0, 0, "gate"), (3, 17, "up"), (5, 31, "down")):
        stack = tensors[f"blk.{layer}.ffn_{role}_exps.weight"].data
        wanted = source(f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight")
        assert stack[expert].tobytes() == wanted
    assert tensors["blk.2.attn_q.weight"].data.tobytes() == source(
        "model.layers.2.self_attn.q_proj.weight"
    )


def test_an_existing_file(moeinf: Command, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_text("mine")
    refused = moeinf("export", "demo", "--gguf", str(file), "--json")
    assert refused.code == 1
    assert json.loads(refused.out)["error"]["code"] == "file_exists"
    assert file.read_text() == "mine"
    assert moeinf("export", "demo", "--gguf", str(file), "--force").code == 0
    assert file.stat().st_size > 1 << 20
    assert names(tmp_path) == ["x.gguf"]


def test_a_family_without_a_counterpart(tmp_path: Path, demo_home: Path) -> None:
    shutil.copytree(demo_home / "models/demo/bf16", tmp_path / "models/x/bf16")
    own = command_in(tmp_path)
    file = tmp_path / "x.gguf"
    _edit(tmp_path / "models/x/bf16", clip_qkv=5.0)
    refused = own("export", "x:bf16", "--gguf", str(file), "--json")
    assert refused.code == 1
    error = json.loads(refused.out)["error"]
    assert error["code"] == "cannot_export"
    assert "clip_qkv" in error["message"]
    assert not file.exists()


def _edit(folder: Path, **values: object) -> None:
    """Change the config of a model, as if it had been pulled so."""
    from msgspec.structs import replace

    from moeinf.offload.format.shards import write_file
    from moeinf.runtime.library.manifest import read_manifest, write_manifest

    manifest = read_manifest(folder)
    config = {**json.loads((folder / "config.json").read_text()), **values}
    record = write_file(folder, "config.json", b"", [memoryview(json.dumps(config).encode())])
    files = tuple(record if file.path == record.path else file for file in manifest.files)
    write_manifest(folder, replace(manifest, files=files))


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[7777] ^= 4
    path.write_bytes(raw)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("damage", [_flip, _cut, Path.unlink])
@pytest.mark.parametrize("name", ["experts/L003/E017.safetensors", "dense.safetensors"])
def test_a_damaged_model(
    damage: Callable[[Path], object], name: str, tmp_path: Path, demo_home: Path
) -> None:
    shutil.copytree(demo_home / "models", tmp_path / "models")
    damage(tmp_path / "models/demo/bf16" / name)
    result = command_in(tmp_path)("export", "demo", "--gguf", str(tmp_path / "x.gguf"), "--json")
    error = json.loads(result.out)["error"]
    assert (result.code, error["code"]) == (1, "damaged_model")
    assert name in error["message"]
    assert names(tmp_path) == ["models"]


def test_no_such_folder(moeinf: Command, tmp_path: Path) -> None:
    result = moeinf("export", "demo", "--gguf", str(tmp_path / "none/x.gguf"), "--json")
    assert result.code == 1
    assert json.loads(result.out)["error"]["code"] == "io_error"


def test_a_folder_is_not_replaced(moeinf: Command, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    result = moeinf("export", "demo", "--gguf", str(tmp_path / "x"), "--force", "--json")
    assert result.code == 1
    assert json.loads(result.out)["error"]["code"] == "io_error"
    assert names(tmp_path) == ["x"]


def test_a_full_disk(tmp_path: Path, demo_home: Path) -> None:
    """A limit of the file's size stands for the disk; no half file stays."""
    resource = pytest.importorskip("resource", reason="needs limits of files, which Windows lacks")

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run(
        [*COMMAND, "export", "demo", "--gguf", "x.gguf"],
        cwd=tmp_path,
        env=environment(demo_home),
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 1
    assert "x.gguf" in done.stderr
    assert names(tmp_path) == []


def test_ctrl_c_leaves_nothing(
    moeinf: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeinf.runtime.jobs import export_gguf

    (tmp_path / "x.gguf").write_text("mine")
    real, calls = os.pwrite, []

    def interrupted(*given: object) -> int:
        calls.append(given)
        if len(calls) > 9:
            raise KeyboardInterrupt
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(export_gguf.os, "pwrite", interrupted)
    assert moeinf("export", "demo", "--gguf", str(tmp_path / "x.gguf"), "--force").code == 130
    assert len(calls) == 10
    assert names(tmp_path) == ["x.gguf"]
    assert (tmp_path / "x.gguf").read_text() == "mine"
