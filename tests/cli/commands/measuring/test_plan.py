"""Test `plan` and `run --dry-run`: a verdict, measured speeds beside bounds, models elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.placement import outlook
from tests.cli.conftest import Command, check_document, command_in
from tests.hub_server import Hub, serve
from tests.runtime.generation.test_seq2seq import checkpoint

Usage = namedtuple("Usage", "total used free")
MIB = 1 << 20


@pytest.fixture
def own(tmp_path: Path, demo_home: Path) -> Command:
    """Return the command in a home that the test may change, with the demo pulled."""
    shutil.copytree(demo_home / "models", tmp_path / "models")
    return command_in(tmp_path)


def document(moeinf: Command, *line: str, **variables: str) -> dict[str, Any]:
    result = moeinf(*line, "--json", **variables)
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    check_document("plan", found)
    return found


def tables(text: str) -> dict[str, list[str]]:
    """Return the rows of each table, by its first column's name."""
    found: dict[str, list[str]] = {}
    for part in text.split("\n\n"):
        lines = part.splitlines()
        for number, line in enumerate(lines):
            if line.startswith(("EXPERTS  ", "TAG  ")):
                found[line.split()[0]] = lines[number:]
    return found


def test_the_prefix_cache_is_counted(moeinf: Command) -> None:
    line = ("plan", "demo", "--memory", "25%")
    with_it = document(moeinf, *line, MOEINF_PREFIX_MEMORY="40MiB")
    without = document(moeinf, *line, "--no-prefix-cache", MOEINF_PREFIX_MEMORY="40MiB")
    assert (with_it["prefix_bytes"], without["prefix_bytes"]) == (40 * MIB, 0)
    assert with_it["needed_ram_bytes"] - without["needed_ram_bytes"] == 40 * MIB
    assert document(moeinf, "run", *line[1:], "--dry-run")["prefix_bytes"] > 0


def test_sizes_and_tiers(moeinf: Command) -> None:
    plan = document(moeinf, "plan", "demo")
    assert (plan["model"], plan["tag"], plan["min_memory_bytes"]) == ("demo", "bf16", 393216)
    ram, disk = plan["tiers"]
    assert (ram["name"], ram["experts"], ram["bytes"]) == ("ram", 192, 192 * 49152)
    assert (disk["name"], disk["experts"]) == ("disk", 192)
    assert (plan["runs"], plan["problems"], plan["try"]) == (True, {}, "")
    assert (plan["download_bytes"], plan["extra_disk_bytes"]) == (0, 0)
    assert 10 * MIB < plan["disk_bytes"] < 12 * MIB
    machine = plan["machine"]
    assert 0 < machine["free_disk_bytes"] <= machine["disk_bytes"]
    assert plan["needed_ram_bytes"] < machine["free_ram_bytes"] <= machine["ram_bytes"]
    assert plan["provenance"]["ram_bytes_per_s"] > 1e9
    assert plan["provenance"]["products_per_s"] > 1e9
    text = moeinf("plan", "demo", "--memory", "25%").out
    assert "48 of 192" in text
    assert not re.search(
        r"\d{5,}", text.replace(text.splitlines()[0], "").partition("RAM reads")[0]
    )


def test_a_bound_is_called_a_bound(own: Command) -> None:
    """Nothing was measured: the verdict has bounds, and `expected` has no value."""
    text = own("plan", "demo", "--memory", "25%").out
    figure = r"[\d.]+"
    assert re.match(
        rf"demo:bf16 runs here: at most about {figure} tokens/s, {figure} if routing is random "
        r"\(bounds, not measured\), with 2\.2 MiB for experts\n",
        text,
    )
    assert "expected" not in text
    whole = own("plan", "demo").out.splitlines()[0]
    assert whole.endswith(" tokens/s (a bound, not measured) with 9.0 MiB for experts")
    plan = document(own, "plan", "demo", "--memory", "25%")
    assert plan["expected_tokens_per_s"] is None
    assert plan["provenance"]["expected_tokens_per_s"] == "not measured"
    assert 0 < plan["bound_tokens_per_s"] < plan["most_tokens_per_s"]
    assert plan["prefill"]["measured_tokens_per_s"] is None
    assert plan["prefill"]["prompt_tokens"] == 512  # the demo's whole context
    assert plan["prefill"]["bound_s"] > 0


def test_what_a_run_measured(own: Command) -> None:
    """It is in the verdict and in a column of its own, for about the same memory only."""
    prompt = "sort owl, fig, zebra, ant, " * 3 + "bee"
    for line in (["40917 in words"], [prompt, "--max-tokens", "1"]):
        run = json.loads(own("run", "demo", *line, "--memory", "25%", "--json").out)
        assert "text" in run
    plan = document(own, "plan", "demo", "--memory", "26%")
    measured = plan["expected_tokens_per_s"]
    assert measured > 0
    assert (
        "measured here with 48 experts in RAM on 20"
        in (plan["provenance"]["expected_tokens_per_s"])
    )
    assert [rung["measured_tokens_per_s"] for rung in plan["ladder"]] == [measured, *[None] * 3]
    assert plan["prefill"]["measured_prompt_tokens"] == run["prompt_tokens"] >= 64
    assert plan["prefill"]["measured_tokens_per_s"] > 0
    text = own("plan", "demo", "--memory", "26%").out
    line = r"demo:bf16 runs here: measured ([\d.]+) tokens/s with 2\.3 MiB for experts"
    found = re.match(line, text)
    assert found is not None
    assert abs(float(found[1]) - measured) < 0.1  # the document is rounded to two digits
    assert re.search(r"prefill, measured: [\d.]+ m?s for 512 tokens at [\d.]+ tokens/s with", text)
    header, first, *others = tables(text)["EXPERTS"]
    column = header.index("MEASURED")
    assert first[column:].split()[0] == found[1]
    assert {row[column:].split()[0] for row in others} == {"-"}
    assert document(own, "plan", "demo", "--memory", "50%")["expected_tokens_per_s"] is None


def test_a_ladder_over_memory(moeinf: Command) -> None:
    plan = document(moeinf, "plan", "demo")
    ladder = plan["ladder"]
    assert [rung["experts_in_ram"] for rung in ladder] == [48, 96, 144, 192]
    bounds = [rung["bound_tokens_per_s"] for rung in ladder]
    assert bounds == sorted(set(bounds))
    seconds = [rung["prefill_bound_s"] for rung in ladder]
    assert seconds == sorted(seconds, reverse=True)
    text = moeinf("plan", "demo:f32").out
    rows = tables(text)["EXPERTS"]
    assert [row.split()[0] for row in rows[1:]] == ["25%", "50%", "75%", "100%"]


def test_of_what_is_not_here_yet(tmp_path: Path) -> None:
    """The plan shows every tag, and pulls nothing."""
    moeinf = command_in(tmp_path)
    found = document(moeinf, "plan", "demo", "--memory", "1MiB")
    assert "nothing was pulled" in found["provenance"]["sizes"]
    assert [row["tag"] for row in found["tags"]] == ["q4", "q4d8", "q8", "bf16", "f32"]
    rows = {row["tag"]: row for row in found["tags"]}
    assert rows["f32"]["bound_tokens_per_s"] < rows["bf16"]["bound_tokens_per_s"]
    assert rows["bf16"]["experts_in_ram"] == MIB // 49152
    assert found["bound_tokens_per_s"] == rows["bf16"]["bound_tokens_per_s"]
    assert {row["expected_tokens_per_s"] for row in found["tags"]} == {None}
    dry = moeinf("pull", "demo", "--dry-run", "--json")
    disk = json.loads(dry.out)["disk_bytes"]
    assert {"q4k", "q5k", "q6k", "q3", "q2"} == disk.keys() - rows.keys()  # a plan leaves them out
    assert {tag: row["disk_bytes"] for tag, row in rows.items()}.items() <= disk.items()
    assert not list((tmp_path / "models").glob("*"))
    refused = moeinf("plan", "nothing")
    assert (refused.code, "there is no model 'nothing'" in refused.err) == (1, True)


def test_tags_that_do_not_fit_keep_their_sizes(tmp_path: Path) -> None:
    moeinf = command_in(tmp_path)
    line = ("plan", "demo:q4", "--memory", "200KiB")
    rows = document(moeinf, *line)["tags"]
    for row in rows:
        fits = row["min_memory_bytes"] <= 200 << 10
        assert row["fits"] == fits == (row["bound_tokens_per_s"] is not None)
        assert ("RAM" in row["problems"]) != fits
        assert row["disk_bytes"] > MIB
    assert [row["fits"] for row in rows] == [True, True, False, False, False]
    header, *shown = tables(moeinf(*line).out)["TAG"]
    assert [row.split()[-1] for row in shown] == ["yes", "yes", "RAM", "RAM", "RAM"]
    assert not any(row[header.index("ON DISK") :].startswith("-") for row in shown)
    refused = moeinf("plan", "demo:bf16", "--memory", "200KiB")
    assert (refused.code, "at least 393216 bytes" in refused.err) == (1, True)


def test_the_tables_fit_eighty_columns(tmp_path: Path) -> None:
    text = command_in(tmp_path)("plan", "demo:q4", "--memory", "200KiB").out
    found = tables(text)
    assert list(found) == ["EXPERTS", "TAG"]
    assert max(len(row) for rows in found.values() for row in rows) <= 80


def test_too_little_ram(own: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "available_bytes", lambda: 40 * MIB)
    lines = own("plan", "demo").out.splitlines()
    assert re.fullmatch(
        r"demo:bf16 does not run here: [\d.]+ MiB of RAM are needed, 40\.0 MiB are free", lines[0]
    )
    assert lines[1] == "Try: the same command after you free some RAM"
    plan = document(own, "plan", "demo")
    assert (plan["runs"], list(plan["problems"])) == (False, ["RAM"])
    assert plan["min_memory_bytes"] == 393216
    assert [rung["fits"] for rung in plan["ladder"]] == [False] * 4
    assert plan["tiers"][1]["bytes"] == 192 * 49152


def test_ram_without_a_reserve(own: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default leaves 1 GiB to other programs. The hint's --memory runs."""
    monkeypatch.setattr(outlook, "available_bytes", lambda: 300 * MIB)
    lines = own("plan", "demo").out.splitlines()
    assert "300 MiB of free RAM leave too little for other programs" in lines[0]
    option = re.match(r"Try: (--memory) (\d+) or ", lines[1])
    assert option is not None
    plan = document(own, "plan", "demo", *option.groups())
    assert (plan["runs"], plan["memory_bytes"]) == (True, 393216)


def test_more_memory_than_is_free(own: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1024 + 70  # MiB: the reserve, and less than all experts need
    monkeypatch.setattr(outlook, "available_bytes", lambda: free * MIB)
    plan = document(own, "plan", "demo", "--memory", "100%")
    assert plan["runs"]
    monkeypatch.setattr(outlook, "available_bytes", lambda: 74 * MIB)
    plan = document(own, "plan", "demo", "--memory", "100%")
    assert "RAM" in plan["problems"]
    assert [rung["fits"] for rung in plan["ladder"]] == [True, True, False, False]


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller tag fits, and is named. An installed model needs no further disk space."""
    moeinf = command_in(tmp_path)
    usage = Usage(100 * MIB, 92 * MIB, 8 * MIB)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    lines = moeinf("plan", "demo").out.splitlines()
    assert lines[0] == (
        "demo:bf16 does not run here: 11.4 MiB of disk are needed, 8.0 MiB are free"
    )
    assert lines[1] == "Try: the tag q4 or the same command after you free some disk"
    plan = document(moeinf, "plan", "demo")
    assert (
        plan["machine"] | {"disk_bytes": 100 * MIB, "free_disk_bytes": 8 * MIB} == (plan["machine"])
    )
    assert {row["tag"]: row["fits"] for row in plan["tags"]} == {
        "q4": True,
        "q4d8": True,
        "q8": True,
        "bf16": False,
        "f32": False,
    }
    assert moeinf("pull", "demo:q8").code == 0
    assert document(moeinf, "plan", "demo:q8")["runs"]


def test_a_drive_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "a folder")

    monkeypatch.setattr("moeinf.runtime.placement.bandwidth.drive_at", full)
    moeinf = command_in(tmp_path)
    text = moeinf("plan", "demo").out
    assert re.search(r"disk reads: +not measured: No space left on device\n", text)
    provenance = document(moeinf, "plan", "demo")["provenance"]
    assert provenance["disk_bytes_per_s"] is None


def test_a_dry_run_prints_the_same_plan(moeinf: Command) -> None:
    varies = re.compile(r"[\d.,]+( [KMGT]?i?B)?| +")
    plan, dry = (moeinf(*line).out for line in (("plan", "demo"), ("run", "demo", "--dry-run")))
    assert varies.sub("N", plan) == varies.sub("N", dry)


@pytest.mark.parametrize(("name", "called"), [("tiny", "tiny"), ("My Model", "checkpoint")])
def test_a_folder(tmp_path: Path, name: str, called: str) -> None:
    shutil.copytree(DEMO_CHECKPOINT, tmp_path / name)
    moeinf = command_in(tmp_path / "home")
    text = moeinf("plan", str(tmp_path / name)).out
    assert text.startswith(f"{called}:q4 runs here: at most about ")
    assert "; nothing to download; disk 4.4 MiB of " in text.splitlines()[0]
    plan = document(moeinf, "run", str(tmp_path / name), "--dry-run")
    assert (plan["model"], plan["tag"], plan["download_bytes"]) == (called, "q4", 0)
    assert [row["tag"] for row in plan["tags"]] == ["q4", "q4d8", "q8", "bf16", "f32"]
    assert not list((tmp_path / "home/models").glob("*"))


def test_a_folder_does_not_take_a_models_speed(own: Command, tmp_path: Path) -> None:
    for parent in ("pulled", "other"):
        shutil.copytree(DEMO_CHECKPOINT, tmp_path / parent / "mine")
    assert own("pull", str(tmp_path / "pulled/mine"), "--name", "mine:bf16").code == 0
    assert own("run", "mine:bf16", "4091 in words").code == 0
    assert document(own, "plan", "mine:bf16")["expected_tokens_per_s"] is not None
    found = document(own, "plan", str(tmp_path / "other/mine"))
    assert found["expected_tokens_per_s"] is None


def test_an_encoder_decoder(tmp_path: Path) -> None:
    """Its least memory is more than a quarter, and its encoder is not part of decoding."""
    checkpoint("switch", tmp_path / "pair")
    moeinf = command_in(tmp_path / "home")
    plan = document(moeinf, "plan", str(tmp_path / "pair"))
    assert plan["runs"]
    assert (plan["model"], plan["tiers"][1]["experts"]) == ("pair", 4 * 5)
    assert plan["prefill"]["prompt_tokens"] == plan["context"] < 1000
    assert plan["prefill"]["bound_s"] > 0
    assert [rung["experts_in_ram"] for rung in plan["ladder"]] == [5, 10, 15, 20]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"model_type": "\x1b[2J"}, "is not supported"),
        ({}, "model_type absent is not supported"),
    ],
)
def test_a_folder_that_is_not_supported(tmp_path: Path, config: dict[str, str], words: str) -> None:
    folder = tmp_path / "other"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    (folder / "config.json").write_text(json.dumps(config))
    refused = command_in(tmp_path / "home")("plan", str(folder))
    assert (refused.code, refused.out) == (1, "")
    assert words in refused.err
    assert "\x1b" not in refused.err
    error = json.loads(command_in(tmp_path / "home")("plan", str(folder), "--json").out)["error"]
    assert error["code"] == "unsupported_model"


def test_a_folder_that_is_absent(tmp_path: Path) -> None:
    refused = command_in(tmp_path)("plan", str(tmp_path / "nothing"))
    assert refused.code == 1
    assert "nothing" in refused.err


def test_a_name_of_the_hub(tmp_path: Path) -> None:
    """Headers are fetched, and no weights. The verdict has the download."""
    with serve(Hub("Org/Tiny", DEMO_CHECKPOINT)) as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        moeinf = command_in(tmp_path / "home")
        text = moeinf("plan", "Org/Tiny:q8", **variables).out.splitlines()[0]
        plan = document(moeinf, "plan", "Org/Tiny:q8", **variables)
        weights = (DEMO_CHECKPOINT / "model.safetensors").stat().st_size
        assert hub.bytes_sent("model.safetensors") < weights / 10
        dense = moeinf("plan", "llama3", **variables)
    assert text.startswith("org--tiny:q8 runs here: at most about ")
    assert re.search(r"; download 10\.\d MiB; disk 6\.8 MiB of [\d.]+ [GT]iB free$", text)
    assert plan["download_bytes"] == weights
    assert not (tmp_path / "home/models/org--tiny/q8").exists()
    assert (dense.code, "is a dense model" in dense.err) == (2, True)
