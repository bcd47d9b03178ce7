"""Test `list`, `show`, `plan`, `rm` and `pull` on real folders."""

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
    assert lines[0].split() == ["NAME", "ID", "SIZE", "QUANT", "MODIFIED"]
    assert {line.split()[0] for line in lines[1:]} == {"demo:bf16", "demo:f32"}
    models = json.loads(moeinf("list", "--json").out)["models"]
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


def test_plan(moeinf: Command) -> None:
    plan = json.loads(moeinf("plan", "demo", "--json").out)
    assert (plan["model"], plan["tag"], plan["min_memory_bytes"]) == ("demo", "bf16", 393216)
    ram, disk = plan["tiers"]
    assert (ram["name"], ram["experts"], ram["bytes"]) == ("ram", 192, 192 * 49152)
    assert (disk["name"], disk["experts"]) == ("disk", 192)
    assert plan["expected_tokens_per_s"] > 0
    assert plan["provenance"]["ram_bytes_per_s"] > 1e9
    text = moeinf("plan", "demo", "--memory", "25%").out
    assert "48 of 192" in text


def test_plan_remembers_what_a_run_measured(own: Command) -> None:
    run = json.loads(own("run", "demo", "40917 in words", "--memory", "25%", "--json").out)
    plan = json.loads(own("plan", "demo", "--memory", "25%", "--json").out)
    assert "measured here" in plan["provenance"]["expected_tokens_per_s"]
    assert plan["expected_tokens_per_s"] == pytest.approx(run["stats"]["tokens_per_s"], abs=0.01)


def test_plan_of_what_is_not_here_yet(tmp_path: Path) -> None:
    """The plan shows every tag, and pulls nothing."""
    moeinf = command_in(tmp_path)
    found = json.loads(moeinf("plan", "demo", "--memory", "1MiB", "--json").out)
    assert "nothing was pulled" in found["provenance"]["sizes"]
    assert [row["tag"] for row in found["tags"]] == ["q4", "q8", "bf16", "f32"]
    rows = {row["tag"]: row for row in found["tags"]}
    assert rows["f32"]["expected_tokens_per_s"] < rows["bf16"]["expected_tokens_per_s"]
    assert rows["bf16"]["experts_in_ram"] == (1 << 20) // 49152
    assert found["expected_tokens_per_s"] == rows["bf16"]["expected_tokens_per_s"]
    little = json.loads(moeinf("plan", "demo:q4", "--memory", "200KiB", "--json").out)
    least = {row["tag"]: row["min_memory_bytes"] for row in little["tags"]}
    unfit = [row["tag"] for row in little["tags"] if row["expected_tokens_per_s"] is None]
    assert unfit == [tag for tag in least if least[tag] > 200 << 10] != []
    assert "does not fit" in moeinf("plan", "demo:q4", "--memory", "200KiB").out
    assert moeinf("run", "demo", "--dry-run").code == 0
    assert not list((tmp_path / "models").glob("*"))
    refused = moeinf("plan", "nothing")
    assert (refused.code, "there is no model 'nothing'" in refused.err) == (1, True)


def test_rm(own: Command) -> None:
    assert own("rm", "demo:f32").out == "deleted 'demo:f32'\n"
    assert own("rm", "demo:f32", "nothing").code == 1
    models = json.loads(own("list", "--json").out)["models"]
    assert [m["tag"] for m in models] == ["bf16"]
    assert own("rm", "demo:bf16", "nothing").code == 1  # all of them or none
    assert own("rm", "demo:bf16").code == 0
    assert own("list").out.split() == ["NAME", "ID", "SIZE", "QUANT", "MODIFIED"]


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
    assert "Try: `moeinf pull --allow-nan`, which goes on" in refused.err
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
    assert "File too large" in done.stderr
    assert own("run", "demo", "17+25=").out == "42\n"
    assert [p.name for p in (tmp_path / "models/demo").iterdir() if "partial" in p.name] == []
