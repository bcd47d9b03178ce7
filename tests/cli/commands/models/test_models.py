"""Test `list`, `show`, `rm` and `pull` on real folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.library.processes import Registry
from tests.cli.conftest import COMMAND, Command, command_in, environment
from tests.runtime.checkpoints.test_finite import demo, one


@pytest.fixture
def own(tmp_path: Path, demo_home: Path) -> Command:
    """Return the command in a home that the test may change."""
    shutil.copytree(demo_home / "models", tmp_path / "models")
    return command_in(tmp_path)


def test_list(moeinf: Command) -> None:
    lines = moeinf("list").out.splitlines()
    assert lines[0].split() == ["NAME", "ID", "SIZE", "QUANT", "BITS", "MODIFIED"]
    assert {line.split()[0] for line in lines[1:]} == {"demo:bf16", "demo:f32"}
    assert {tuple(line.split()[4:6]) for line in lines[1:]} == {("bf16", "16"), ("f32", "32")}
    models = json.loads(moeinf("list", "--json").out)["models"]
    assert {m["tag"]: m["expert_bits_per_weight"] for m in models} == {"bf16": 16, "f32": 32}
    bf16 = next(m for m in models if m["tag"] == "bf16")
    assert (bf16["family"], bf16["layers"], bf16["experts_per_layer"]) == ("olmoe", 6, 32)
    assert 10 << 20 < bf16["size_bytes"] < 12 << 20
    ids = {line.split()[0]: line.split()[1] for line in lines[1:]}
    assert ids == {f"demo:{m['tag']}": m["digest"][:12] for m in models}
    assert len(set(ids.values())) == 2


def test_show(moeinf: Command) -> None:
    text = moeinf("show", "demo").out
    assert "32 per layer, 4 per token" in text
    assert "393216" in text
    assert "KV cache" in text
    about = json.loads(moeinf("show", "demo:f32", "--json").out)
    assert (about["dtype"], about["expert_bytes"], about["top_k"]) == ("F32", 98304, 4)


def test_rm(own: Command) -> None:
    assert own("rm", "demo:f32").out == "deleted 'demo:f32'\n"
    assert own("rm", "demo:f32", "nothing").code == 1
    models = json.loads(own("list", "--json").out)["models"]
    assert [m["tag"] for m in models] == ["bf16"]
    assert own("rm", "demo:bf16", "nothing").code == 1  # all of them or none
    assert own("rm", "demo:bf16").code == 0
    assert own("list").out.split() == ["NAME", "ID", "SIZE", "QUANT", "BITS", "MODIFIED"]


def test_a_model_in_use_stays(own: Command, tmp_path: Path) -> None:
    registration = Registry(Settings(tmp_path).run).register("demo:bf16", lambda claimed: 0)
    assert registration is not None
    for command in ("rm", "pull"):
        refused = own(command, "demo:bf16")
        assert refused.code == 1
        assert f"in use by process {os.getpid()}" in refused.err
    registration.close()
    assert own("rm", "demo:bf16").code == 0


def test_pull_a_local_folder(own: Command, tmp_path: Path) -> None:
    folder = tmp_path / "My Model"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    result = own("pull", str(folder), "--name", "mine:f32", "--json")
    assert json.loads(result.out)["name"] == "mine"
    only = own("run", "mine", "17+25=")
    assert (only.out, only.err) == ("42\n", "mine: only mine:f32 is on this machine\n")
    other = own("run", "mine:q4", "17+25=")
    assert other.code == 1
    assert "no model 'mine:q4' on this machine, only mine:f32" in other.err
    assert "Try: mine:f32, or `moeinf pull mine:q4`, which adds the other" in other.err
    assert own("run", "mine:f32", "17+25=").out == "42\n"
    unnamed = own("pull", str(folder))
    assert unnamed.code == 2
    assert "is not a model name" in unnamed.err


def test_pull_and_run_of_a_model_with_nan(own: Command, tmp_path: Path) -> None:
    name = demo(tmp_path / "spoilt", one("model.norm.weight", float("nan"), 5))
    pull = ("pull", str(tmp_path / "spoilt"), "--name", "x:q8")
    refused = own(*pull)
    assert refused.code == 1
    assert name in refused.err
    assert "Try: `moeinf pull --allow-nan`, which continues" in refused.err
    assert own(*pull, "--allow-nan").code == 0
    for temperature in ("0", "1"):
        result = own("run", "x:q8", "17+25=", "--temperature", temperature)
        assert (result.code, result.out) == (1, "")
        assert "the model computed NaN or infinity" in result.err


def test_pull_says_when_bits_are_lost(own: Command, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "wide"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    assert "more bits than bf16 keeps" in own("pull", str(folder), "--name", "wide:bf16").err
    assert own("pull", str(folder), "--name", "wide:f32").code == 0
    assert "more bits" not in own("pull", str(folder), "--name", "wide:f32").err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"num_experts": 33}, "the config says [33, 128]"),
        ({"num_hidden_layers": 7}, "lacks model.layers.6"),
        ({"hidden_size": 64}, "the config says"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_experts_per_tok": 64}, "64"),
    ],
)
def test_pull_refuses_what_it_cannot_run(
    change: dict[str, object], words: str, own: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    result = own("pull", str(folder), "--name", "odd")
    assert result.code == 1
    assert words in result.err
    assert len(result.err.splitlines()) <= 2
    assert not (tmp_path / "models" / "odd").exists()


def test_a_pull_that_cannot_write_leaves_the_old_model(own: Command, tmp_path: Path) -> None:
    """A limit on file size simulates a full disk: a write fails in the middle."""
    script = 'ulimit -f 256; exec "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "-", *COMMAND, "pull", "demo"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the file is larger than the system permits" in done.stderr
    assert own("run", "demo", "17+25=").out == "42\n"
    assert own("pull", "demo").code == 0  # it continues, and nothing unfinished stays
    assert sorted(p.name for p in (tmp_path / "models/demo").iterdir()) == ["bf16", "f32"]


def test_pull_of_a_folder_that_is_up_to_date(own: Command, tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_CHECKPOINT, tmp_path / "checkpoint")
    pull = ("pull", str(folder), "--name", "mine:bf16")
    first = json.loads(own(*pull, "--json").out)
    place = tmp_path / "models/mine/bf16"
    before = {path: path.stat().st_mtime_ns for path in (place, *place.rglob("*"))}
    again = own(*pull)
    assert (again.code, again.err.splitlines()[0]) == (0, "mine:bf16 is up to date")
    assert json.loads(own(*pull, "--json").out) == first
    assert {path: path.stat().st_mtime_ns for path in (place, *place.rglob("*"))} == before
    assert f"{folder}\n" in own("show", "mine:bf16").out  # without the hash
    (folder / "generation_config.json").touch()
    changed = own(*pull)
    assert (changed.code, "up to date" in changed.err) == (0, False)
    assert json.loads(own(*pull, "--json").out)["revision"] != first["revision"]
    next(place.glob("experts/*/*")).unlink()
    assert "up to date" not in own(*pull).err
    assert own("verify", "mine:bf16").code == 0


def test_pull_of_the_demo_that_is_up_to_date(tmp_path: Path) -> None:
    moeinf = command_in(tmp_path)
    assert "up to date" not in moeinf("pull", "demo").err
    assert "demo:bf16 is up to date" in moeinf("pull", "demo").err
    assert "up to date" not in moeinf("pull", "demo:q8").err


def test_another_model_under_a_name(own: Command, tmp_path: Path) -> None:
    folder, other = tmp_path / "checkpoint", tmp_path / "demo"
    for place in (folder, other):
        shutil.copytree(DEMO_CHECKPOINT, place)
    pull = ("pull", str(folder), "--name")
    assert "replaces" not in own(*pull, "mine:bf16").err
    for taken in (
        own(*pull, "demo"),
        own(*pull, "demo:q8"),
        own("pull", str(other)),
        own("cp", "mine:bf16", "demo"),
    ):
        assert taken.code in (1, 2)
    refused = own("pull", str(other), "--json")
    assert json.loads(refused.out)["error"]["code"] == "bad_name"
    assert "--name NAME" in json.loads(refused.out)["error"]["hint"]
    assert json.loads(own("show", "demo", "--json").out)["source"] == str(DEMO_CHECKPOINT)
    shutil.rmtree(tmp_path / "models/demo")
    assert own("cp", "mine:bf16", "demo").code == 2
    replaced = own("pull", str(other), "--name", "mine:bf16")
    assert replaced.code == 0
    assert f"mine:bf16 was made from {folder}; this pull replaces it" in replaced.err
