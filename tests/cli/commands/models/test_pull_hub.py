"""Test `moeinf pull org/name` against the hub stand-in, also in processes that are killed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.library.processes import Registry
from tests.cli.conftest import Result, command_in, environment
from tests.cli.warm import Warm
from tests.hub_server import COMMIT, Answer, Hub, Request, serve

FILES = 3


def cut_demo(folder: Path, files: int) -> None:
    """Write the demo in several files, so that most experts span two or three of them."""
    shutil.copytree(DEMO_CHECKPOINT, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        mine = {
            name: t for i, (name, t) in enumerate(sorted(tensors.items())) if i % files == number
        }
        save_file(mine, folder / file)
        weight_map.update(dict.fromkeys(mine, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a repository with the demo in three files, and files that a pull must not fetch."""
    folder = tmp_path_factory.mktemp("repository")
    cut_demo(folder, FILES)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_evil.EvilConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_evil.py").write_text("raise SystemExit('executed')")
    for stranger in ("consolidated.00.pt", "pytorch_model.bin"):
        (folder / stranger).write_bytes(b"never fetched")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"never fetched")
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    with serve(Hub("Org/Demo-MoE", repository)) as hub:
        yield hub


class Machine:
    """A home and a Hugging Face home, configured for the hub stand-in."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.home = folder / "home"
        self.variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hf")}

    def __call__(self, *arguments: str, **variables: str) -> Result:
        return command_in(self.home)(*arguments, **{**self.variables, **variables})

    def start(self, *arguments: str) -> Warm:
        return Warm(arguments, {**environment(self.home), **self.variables})


@pytest.fixture
def machine(tmp_path: Path, hub: Hub) -> Machine:
    return Machine(tmp_path, hub)


def test_pull_and_run(machine: Machine, hub: Hub) -> None:
    result = machine("pull", "Org/Demo-MoE", "--json", HF_TOKEN="secret")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["name"] == "org--demo-moe"
    assert (document["source"], document["revision"]) == ("hub:Org/Demo-MoE", COMMIT)
    assert hub.tokens == {"hub": {"Bearer secret"}, "files": {None}}
    assert hub.strange == []  # no request that reports usage
    names = {request.file for request in hub.requests}
    assert not any(
        word in name for name in names for word in ("consolidated", ".bin", ".py", "original")
    )
    for file in (f"model-{n}" for n in ("00001", "00002", "00003")):
        name = f"{file}-of-00003.safetensors"
        size = (hub.folder / name).stat().st_size
        header = size - sum(r.stop - r.start for r in hub.requests if r.file == name)
        assert -100_000 < header <= 0  # each byte once; headers twice, for an early check
    hub.requests.clear()
    assert machine("run", "org/demo-moe", "17+25=").out == "42\n"
    assert hub.requests == []
    folder = machine.home / "models/org--demo-moe/q4"
    assert {p.name for p in folder.iterdir()} == {
        "manifest.json", "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "dense.safetensors", "experts",
    }  # fmt: skip
    assert list(folder.parent.iterdir()) == [folder]


def test_pulling_again(machine: Machine, hub: Hub) -> None:
    """An up-to-date model is left alone, even in use. A changed one in use is refused."""
    assert machine("pull", "Org/Demo-MoE").code == 0
    registry = Registry(Settings(machine.home).run)
    registration = registry.register("org--demo-moe:q4", lambda claimed: 0)
    assert registration is not None
    again = machine("pull", "Org/Demo-MoE")
    assert (again.code, "is up to date" in again.err) == (0, True)
    manifest = machine.home / "models/org--demo-moe/q4/manifest.json"
    manifest.write_text(manifest.read_text().replace(COMMIT, COMMIT[::-1]))
    hub.requests.clear()
    refused = machine("pull", "Org/Demo-MoE")
    assert (refused.code, "is in use by process" in refused.err) == (1, True)
    assert sum(r.stop - r.start for r in hub.requests) < 200_000  # headers and config only
    registration.close()
    assert machine("pull", "Org/Demo-MoE").code == 0
    assert json.loads(manifest.read_text())["revision"] == COMMIT
    next(manifest.parent.glob("experts/*/*")).unlink()
    assert "up to date" not in machine("pull", "Org/Demo-MoE").err
    assert machine("verify", "org/demo-moe").code == 0


def test_hub_and_local_folder_give_the_same_files(machine: Machine, repository: Path) -> None:
    assert machine("pull", "Org/Demo-MoE").code == 0
    assert machine("pull", str(repository), "--name", "local").code == 0

    def shas(name: str) -> dict[str, str]:
        manifest = json.loads((machine.home / f"models/{name}/q4/manifest.json").read_text())
        return {file["path"]: file["sha256"] for file in manifest["files"]}

    assert shas("local") == shas("org--demo-moe")


def test_peak_disk_is_the_model_and_two_source_files(tmp_path: Path) -> None:
    """Disk use is measured at every byte request: the next file arrives during a repack."""
    folder = tmp_path / "repository"
    cut_demo(folder, 6)
    largest = max(path.stat().st_size for path in folder.glob("model-*"))
    with serve(Hub("Org/Demo-MoE", folder)) as hub:
        machine = Machine(tmp_path, hub)
        peaks, sources = [], []

        def look(_: Request) -> None:
            partial = machine.home / "models/org--demo-moe/.q4.partial"
            peaks.append(disk_bytes(partial))
            sources.append(len({p.name[:11] for p in partial.glob("source/*model-*")}))

        hub.fault = look
        assert machine("pull", "Org/Demo-MoE").code == 0
    final = disk_bytes(machine.home / "models")
    assert 1 <= max(sources) <= 2
    assert max(peaks) > largest
    assert max(peaks) <= final + 2 * largest + (1 << 20)


def disk_bytes(folder: Path) -> int:
    """Return the disk use of a folder in bytes; files may disappear meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def test_run_pulls_what_is_absent(machine: Machine) -> None:
    result = machine("run", "Org/Demo-MoE", "17+25=")
    assert result.out == "42\n"
    assert "downloading org--demo-moe:q4" in result.err
    assert "repacking org--demo-moe:q4" in result.err


@pytest.mark.parametrize("pause", [0.0, 0.1, 0.3, 0.6])
def test_kill_and_rerun(pause: float, machine: Machine, hub: Hub) -> None:
    """The rerun completes a pull that was killed after its first request for weights."""
    process = machine.start("pull", "Org/Demo-MoE")
    while not any(r.stop - r.start > 500_000 for r in hub.requests):
        time.sleep(0.01)
        assert process.poll() is None
    time.sleep(pause)
    process.kill()
    process.wait()
    listed = json.loads(machine("list", "--json").out)["models"]
    if not listed:
        partials = json.loads(machine("prune", "--list-partials", "--json").out)["partials"]
        assert [p["name"] for p in partials] == ["org--demo-moe:q4"]
    assert machine("pull", "Org/Demo-MoE").code == 0
    assert machine("run", "org/demo-moe", "17+25=").out == "42\n"
    assert json.loads(machine("prune", "--list-partials", "--json").out)["partials"] == []


def test_two_pulls_at_once(machine: Machine, hub: Hub) -> None:
    """One pulls; the other reports it and changes nothing. Each byte is fetched once."""
    first = machine.start("pull", "Org/Demo-MoE")
    while not any(r.stop - r.start > 500_000 for r in hub.requests):
        time.sleep(0.01)
    second = machine("pull", "Org/Demo-MoE")
    assert first.wait() == 0
    if second.code:  # else it started after the end of the first, and pulled again
        assert "another process is pulling org--demo-moe:q4" in second.err
        weights = [r for r in hub.requests if r.stop - r.start > 500_000]
        assert len({(r.file, r.start) for r in weights}) == len(weights)
    assert machine("verify", "org--demo-moe").code == 0


def test_a_rerun_asks_only_for_what_is_missing(machine: Machine, hub: Hub) -> None:
    second = "model-00002-of-00003.safetensors"

    hub.fault = lambda r: (
        Answer(status=404) if r.file == second and r.stop - r.start > 500_000 else None
    )
    failed = machine("pull", "Org/Demo-MoE")
    assert failed.code == 1
    assert f"{second}: the server answers 404" in failed.err
    assert "downloaded data is kept" in failed.err
    hub.fault = lambda _: None
    hub.requests.clear()
    assert machine("pull", "Org/Demo-MoE").code == 0
    first = [r for r in hub.requests if r.file.startswith("model-00001")]
    assert all(r.stop - r.start < 100_000 for r in first)  # its header again, and nothing else


@pytest.mark.parametrize(
    ("gate", "words"),
    [(401, "no repository"), (403, "accept its terms"), (404, "no repository"), (500, "refuses")],
)
def test_refusals_are_explained(gate: int, words: str, machine: Machine, hub: Hub) -> None:
    hub.gate = gate
    result = machine("pull", "Org/Demo-MoE")
    assert result.code == 1
    assert words in result.err
    assert "Traceback" not in result.err
    assert not (machine.home / "models").exists()


def test_unknown_revisions_and_repositories(machine: Machine) -> None:
    assert "no revision 'v9'" in machine("pull", "Org/Demo-MoE", "--revision", "v9").err
    assert "no repository Org/Other" in machine("pull", "Org/Other").err
    assert machine("pull", "Org/Demo-MoE", "--revision", COMMIT).code == 0


def test_dry_run_fetches_no_weights(machine: Machine, hub: Hub) -> None:
    result = machine("pull", "Org/Demo-MoE", "--dry-run", "--json")
    sizes = json.loads(result.out)
    assert len(sizes["files"]) == FILES
    assert 10_000_000 < sizes["download_bytes"] < 11_000_000
    assert sizes["disk_bytes"]["f32"] > 1.8 * sizes["disk_bytes"]["bf16"]
    assert sum(r.stop - r.start for r in hub.requests) < 300_000
    assert "model-00001-of-00003" in machine("pull", "Org/Demo-MoE", "--dry-run").out
    assert not (machine.home / "models").exists()


def fill_cache(hub: Hub, folder: Path) -> Path:
    """Copy the repository into the Hugging Face cache of the machine in `folder`."""
    cache = folder / "hf/hub/models--Org--Demo-MoE"
    shutil.copytree(hub.folder, cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    return cache / "snapshots" / COMMIT


def headers_only(hub: Hub) -> set[str]:
    """Check that only headers of weight files were requested; return the other files."""
    weights = [r for r in hub.requests if r.file.endswith(".safetensors")]
    assert weights
    assert all(r.stop < 100_000 for r in weights)
    return {r.file for r in hub.requests} - {r.file for r in weights}


def test_a_checkpoint_in_the_hugging_face_cache_is_used_in_place(
    machine: Machine, hub: Hub, tmp_path: Path
) -> None:
    fill_cache(hub, tmp_path)
    result = machine("pull", "Org/Demo-MoE", HF_HUB_OFFLINE="1")
    assert result.code == 0, result.err
    assert "is used from there" in result.err
    assert hub.requests == []
    sizes = json.loads(
        machine("pull", "Org/Demo-MoE:q5k", "--name", "y", "--dry-run", "--json").out
    )
    assert (sizes["name"], sizes["tag"]) == ("y", "q5k")
    assert machine("pull", "Org/Demo-MoE", "--name", "again").code == 0
    assert headers_only(hub) == set()
    assert machine("run", "again", "17+25=").out == "42\n"
    about = json.loads(machine("show", "again", "--json").out)
    assert (about["source"], about["revision"]) == ("hub:Org/Demo-MoE", COMMIT)


def test_what_the_hugging_face_cache_lacks_comes_from_the_hub(
    machine: Machine, hub: Hub, tmp_path: Path
) -> None:
    """Another program has fetched only the weights into the cache."""
    snapshot = fill_cache(hub, tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (snapshot / name).unlink()
    offline = machine("pull", "Org/Demo-MoE", HF_HUB_OFFLINE="1")
    assert offline.code == 1
    assert "has no tokenizer.json, special_tokens_map.json, chat_template.jinja;" in offline.err
    result = machine("pull", "Org/Demo-MoE")
    assert result.code == 0, result.err
    assert "is used from there" in result.err
    assert headers_only(hub) == {"tokenizer.json", "chat_template.jinja"}
    assert machine("run", "org/demo-moe", "17+25=").out == "42\n"
    made = machine.home / "models/org--demo-moe/q4"
    assert not (made / "source").exists()
    (made / "chat_template.jinja").unlink()
    assert machine("verify", "org/demo-moe", "--repair", HF_HUB_OFFLINE="1").code == 1
    assert machine("verify", "org/demo-moe", "--repair").code == 0
    assert (made / "chat_template.jinja").read_bytes()


def test_offline_and_not_in_the_cache(machine: Machine) -> None:
    result = machine("pull", "Org/Demo-MoE", HF_HUB_OFFLINE="1")
    assert result.code == 1
    assert "HF_HUB_OFFLINE is set" in result.err


def test_a_hostile_index_fetches_nothing(machine: Machine, hub: Hub, tmp_path: Path) -> None:
    hub.folder = tmp_path / "evil"
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text('{"model_type": "olmoe"}')
    index = {"weight_map": {"a": "../../../../etc/passwd.safetensors"}}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    result = machine("pull", "Org/Demo-MoE")
    assert result.code == 1
    assert "names an invalid file" in result.err
    assert not (machine.home / "models").exists()
