"""All cases: those of cases.py, other programs and their files, and several machines."""

from __future__ import annotations

import os

from huggingface_hub import constants

from moeinf.cli.chat.server_check import Found
from moeinf.cli.commands import launch
from moeinf.cli.commands import serve as serve_command
from moeinf.cli.commands.models import list_models
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import Settings
from moeinf.runtime.engine.pipeline.stage import Stage
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.machine.network_home import SharedHome
from moeinf.server.cluster.failures import NoCluster
from tests.errors.cases import CASES, ROUTES, RUN, case
from tests.errors.provoking import Place
from tests.gguf_files import write_gguf
from tests.hub_server import Hub, serve
from tests.runtime.engine.pipeline.stages import Running, config

__all__ = ["CASES"]
PIPELINE = [*RUN, "--experimental-pipeline", "127.0.0.1:1"]
CASES["bad_modelfile"] = lambda _: ["create", "mario", "-f", "none"]


@case("client_missing")
def _(place: Place) -> list[str]:
    place.patch.setattr(launch, "look", lambda *_: Found({"model": "demo:bf16"}))
    place.patch.setenv("PATH", str(place.folder))
    return ["launch", "claude", "demo"]


@case("out_of_threads")
def _(place: Place) -> list[str]:
    place.raising(list_models, "Library", RuntimeError("can't start new thread"))
    return ["list"]


@case("ollama_model_not_found")
def _(place: Place) -> list[str]:
    place.patch.setenv("OLLAMA_MODELS", str(place.folder / "none"))
    return ["pull", "ollama:qwen3"]


@case("bad_local_store")
def _(place: Place) -> list[str]:
    place.patch.setenv("OLLAMA_MODELS", str(place.folder))
    manifest = place.folder / "manifests/registry.ollama.ai/library/qwen3/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    return ["pull", "ollama:qwen3"]


@case("missing_drive")
def _(place: Place) -> list[str]:
    place.patch.setenv("MOEINF_HOME", f"{place.home}{os.pathsep}{place.folder / 'none'}")
    return ["devices"]


@case("other_weights")
def _(place: Place) -> list[str]:
    (place.home / "models").unlink()
    path = write_gguf(DEMO_CHECKPOINT, place.folder / "x.gguf", source="Org/Demo")
    tensor = open_gguf(path).tensors["model.layers.0.self_attn.q_proj.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(bytes(tensor.size_bytes))
    hub = place.later.enter_context(serve(Hub("Org/Demo", DEMO_CHECKPOINT)))
    files = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    place.patch.setattr(constants, "ENDPOINT", hub.endpoint)
    place.patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    return ["pull", "./x.gguf"]


@case("bad_workload")
def _(_place: Place) -> list[str]:
    requests = str(ROUTES.with_name("gpt-oss-20b.npz"))
    return ["simulate", requests, "--replicas", "1", "--load", "0"]


@case("shared_home")
def _(place: Place) -> list[str]:
    shared = SharedHome("MOEINF_HOME /srv/moeinf is on a network file system (nfs4)")
    place.raising(serve_command, "_cluster", shared)
    return ["serve", "--quiet", "--port", "0", "--cluster", "auto"]


@case("no_cluster")
def _(place: Place) -> list[str]:
    gone = NoCluster("--cluster auto: no cluster runs on this machine")
    place.raising(serve_command, "_cluster", gone)
    return ["serve", "--quiet", "--port", "0", "--cluster", "auto"]


CASES["stage_lost"] = lambda _: PIPELINE
CASES["cannot_cut"] = lambda _: [
    *("stage", "demo", "--experimental", "--layers", "4-9", "--listen", "127.0.0.1:0")
]


def _stage(place: Place) -> Running:
    """Run a stage with the demo's second half, until the test ends."""
    settings = Settings(place.home)
    stage = Running(Stage(*Library(settings).read("demo"), 3, 6, config(), settings))
    place.later.callback(stage.close)
    return stage


@case("stages_differ")
def _(place: Place) -> list[str]:
    return [*RUN, "--experimental-pipeline", _stage(place).address, "--kv", "q8"]


@case("stage_failed")
def _(place: Place) -> list[str]:
    running = _stage(place)
    error = ExpertReadError("experts/3/1", "the drive cannot read or write it", "demo:bf16")
    place.raising(running.stage._engine, "compute_stage", error)
    return [*RUN, "--experimental-pipeline", running.address]
