"""Provoke each error code of the command line, with as few planted errors as possible."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from moeinf.cli.chat.repl import Repl
from moeinf.cli.commands.models import list_models
from moeinf.cli.output import Output
from moeinf.models.base import ContextFull
from moeinf.offload.gpu_tier.layer_runner import OutOfMemory
from moeinf.runtime.config import Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.hub import installed
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.library.staging import only_maker
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.text.tokenizer import Tokenizer, TokenizerFailed
from tests.conftest import pull
from tests.errors.provoking import Place, without_locks
from tests.fake_device import FakeDevice
from tests.hub_server import Answer, Hub, serve
from tests.runtime.checkpoints.test_finite import added, demo, one

Case = Callable[[Place], list[str] | Callable[[], int | None]]
RUN = ["run", "demo", "17+25="]
ON_GPU = [*RUN, "--device", "cuda", "--miss", "fetch"]
ROUTES = Path(__file__).parents[1] / "data/traces/qwen3-30b-a3b.route.csv.gz"

CASES: dict[str, Case] = {
    "unsupported_system": without_locks,
    "usage": lambda _: ["stop"],
    "io_error": lambda _: ["eamc", "import", "demo", "gone.eamc"],
    "bad_name": lambda _: ["show", "../x"],
    "model_not_found": lambda _: ["show", "dmo"],
    "unknown_source": lambda _: ["pull", "nothing-like-it"],
    "nothing_found": lambda _: ["search", "zzz"],
    "hub": lambda _: ["pull", "Org/Model"],
    "model_exists": lambda _: ["cp", "demo:bf16", "demo:bf16"],
    "not_running": lambda _: ["stop", "demo"],
    "no_low_copy": lambda _: [*RUN, "--experts", "q2-on-miss"],
    "unusable_draft": lambda _: [*RUN, "--draft", "demo"],
    "no_model_used": lambda _: ["trace", "--dataset", "demo"],
    "no_such_dataset": lambda _: ["trace", "demo", "--dataset", "demo", "--subset", "sums"],
    "dataset_unavailable": lambda _: ["trace", "demo", "--dataset", "bbh"],
    "bad_format": lambda _: [*RUN, "--format", "{"],
    "bad_context": lambda _: [*RUN, "--ctx", "9999"],
    "prompt_too_long": lambda _: ["run", "demo", "x" * 600],
    "bad_language": lambda _: [*RUN, "--tgt", "fra_Latn"],
    "lossy_reproducible": lambda _: [*RUN, "--skip-below", "0.03", "--reproducible"],
    "does_not_fit": lambda _: [*RUN, "--memory", "1%"],
    "device_unavailable": lambda _: ON_GPU,
    "other_shape": lambda _: ["bench", "demo", "--replay", str(ROUTES)],
    "unknown_choice": lambda _: ["simulate", str(ROUTES), "--sweep", "bogus=1"],
    "server": lambda _: [*RUN, "--server"],
}


def case(code: str) -> Callable[[Case], Case]:
    def enter(function: Case) -> Case:
        assert code not in CASES
        return CASES.setdefault(code, function)

    return enter


@case("dense_model")
def _(place: Place) -> list[str]:
    place.patch.setattr(installed, "available_bytes", lambda: 16 << 30)
    return ["pull", "llama3:8b"]


@case("invalid")
def _(place: Place) -> list[str]:
    place.patch.setenv("MOEINF_MEMORY", "x")
    return ["list"]


@case("model_in_use")
def _(place: Place) -> list[str]:
    registration = Registry(place.home / "run").register("demo:bf16", lambda _: 0)
    assert registration is not None
    place.later.callback(registration.close)
    return ["rm", "demo:bf16"]


@case("not_stopped")
def _(place: Place) -> list[str]:
    text = (
        "import signal, sys, time; from pathlib import Path; "
        "from moeinf.runtime.library.processes import Registry; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "_ = Registry(Path(sys.argv[1])).register('demo:bf16', lambda _: 0); "
        "print(flush=True); time.sleep(60)"
    )
    line = [sys.executable, "-c", text, str(place.home / "run")]
    child = place.later.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE))
    place.later.callback(child.kill)
    assert child.stdout is not None
    child.stdout.readline()
    place.patch.setattr(Registry.stop, "__defaults__", (None, 0.1))
    return ["stop", "demo"]


@case("pull_in_progress")
def _(place: Place) -> list[str]:
    settings = Settings(place.home)
    (place.home / "models").unlink()
    place.later.enter_context(only_maker(settings.models / "x" / "q4", settings.run))
    shutil.copytree(DEMO_CHECKPOINT, place.folder / "x")
    return ["pull", "./x"]


@case("file_exists")
def _(place: Place) -> list[str]:
    (place.folder / "demo.gguf").write_text("mine")
    return ["export", "demo", "--gguf", "demo.gguf"]


@case("cannot_export")
def _(place: Place) -> list[str]:
    source = place.folder / "x"
    shutil.copytree(DEMO_CHECKPOINT, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))
    (place.home / "models").unlink()
    pull(source, Settings(place.home), "x:bf16")
    return ["export", "x:bf16", "--gguf", "x.gguf"]


@case("cannot_repair")
def _(place: Place) -> list[str]:
    shutil.copytree(DEMO_CHECKPOINT, place.folder / "source")
    (place.home / "models").unlink()
    pull(place.folder / "source", Settings(place.home), "mine:q4")
    (place.home / "models/mine/q4/config.json").write_text("{}")
    config = place.folder / "source/config.json"
    config.write_text(config.read_text() + " ")
    return ["verify", "mine:q4", "--repair"]


@case("damaged_model")
def _(place: Place) -> list[str]:
    (place.own_demo() / "manifest.json").write_text("{}")
    return RUN


@case("cannot_route")
def _(place: Place) -> list[str]:
    manifest = place.own_demo() / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "top_k": 1}))
    return [*RUN, "--route", "cache-aware=0.2"]


@case("newer_model")
def _(place: Place) -> list[str]:
    (place.home / "models").unlink()
    pull(DEMO_CHECKPOINT, Settings(place.home), "demo:q4")
    manifest = place.home / "models/demo/q4/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "layout": 9}))
    return ["run", "demo:q4", "x"]


@case("older_model")
def _(place: Place) -> list[str]:
    (place.home / "models").unlink()
    pull(DEMO_CHECKPOINT, Settings(place.home), "demo:q4")
    manifest = place.home / "models/demo/q4/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "layout": 1}))
    return ["run", "demo:q4", "x"]


@case("unreadable_shard")
def _(place: Place) -> list[str]:
    for shard in (place.own_demo() / "experts").rglob("*.safetensors"):
        raw = bytearray(shard.read_bytes())
        raw[7777] ^= 4
        shard.write_bytes(raw)
    return [*RUN, "--memory", "30%"]


@case("broken_weights")
def _(place: Place) -> list[str]:
    demo(place.folder / "spoilt", one("model.norm.weight", float("nan"), 5))
    return ["pull", "./spoilt", "--name", "x:q8"]


@case("not_finite")
def _(place: Place) -> list[str]:
    demo(place.home.parent / "spoilt", one("model.norm.weight", float("nan"), 5))
    (place.home / "models").unlink()
    added(place.home.parent / "spoilt", "x:q8", allow_nan=True)
    return ["run", "x:q8", "17+25="]


@case("bad_checkpoint")
def _(place: Place) -> list[str]:
    (place.folder / "empty").mkdir()
    return ["pull", "./empty", "--name", "x"]


def with_config(place: Place, **changed: object) -> list[str]:
    folder = place.folder / "x"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    return ["pull", "./x"]


@case("unsupported_model")
def _(place: Place) -> list[str]:
    return with_config(place, model_type="bert")


@case("unsupported_quantisation")
def _(place: Place) -> list[str]:
    return with_config(place, quantization_config={"quant_method": "gptq"})


@case("download_failed")
def _(place: Place) -> list[str]:
    (place.home / "models").unlink()
    hub = place.later.enter_context(serve(Hub("Org/Demo", DEMO_CHECKPOINT)))
    hub.fault = lambda asked: Answer(404) if asked.stop - asked.start > 100_000 else None
    files = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    place.patch.setattr(constants, "ENDPOINT", hub.endpoint)
    place.patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    return ["pull", "Org/Demo"]


@case("bad_dataset")
def _(place: Place) -> list[str]:
    Path("x.jsonl").write_text("nonsense\n")
    return ["trace", "demo", "--dataset", "x.jsonl"]


@case("foreign_eamc")
def _(place: Place) -> list[str]:
    Path("x.txt").write_text("something else")
    return ["eamc", "import", "demo", "x.txt"]


def nonsense(name: str) -> Case:
    def make(_: Place) -> list[str]:
        Path(name).write_text("nonsense")
        return ["simulate", name]

    return make


CASES |= {"bad_trace": nonsense("x.eam"), "bad_route_trace": nonsense("x.csv.gz")}


@case("no_matplotlib")
def _(place: Place) -> list[str]:
    from moeinf.cli.main import answer

    assert answer([*RUN, "--quiet"]) == 0  # fills the EAMC
    place.patch.setitem(sys.modules, "matplotlib.figure", None)
    return ["eamc", "show", "demo", "--plot", "x.png"]


@case("cannot_compare")
def _(place: Place) -> list[str]:
    Path("x.txt").write_text("")
    return ["eval", "demo", "--file", "x.txt"]


@case("bad_template")
def _(place: Place) -> list[str]:
    folder = place.folder / "x"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    template = "{{ raise_exception('roles must alternate') }}"
    (folder / "chat_template.jinja").write_text(template)
    (place.home / "models").unlink()
    pull(folder, Settings(place.home), "x:bf16")
    return ["run", "x:bf16", "hello"]


@case("bad_tokenizer")
def _(place: Place) -> list[str]:
    for name in ("encode_text", "encode_rendered"):
        place.raising(Tokenizer, name, TokenizerFailed("the model's tokenizer cannot encode this"))
    return RUN


@case("cannot_listen")
def _(place: Place) -> list[str]:
    taken = place.later.enter_context(socket.create_server(("127.0.0.1", 0)))
    return ["serve", "--quiet", "--port", str(taken.getsockname()[1])]


@case("output_failed")
def _(place: Place) -> list[str]:
    if sys.platform != "linux":
        pytest.skip("needs Linux: writes to /dev/full")
    full = place.later.enter_context(open("/dev/full", "w"))  # noqa: PTH123, SIM115
    place.patch.setattr(sys, "stdout", full)
    return ["list", "--json"]


def planted(error: BaseException) -> Case:
    def command(place: Place) -> list[str]:
        place.raising(list_models, "Library", error)
        return ["list"]

    return command


case("disk_full")(planted(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "models/x.partial")))
case("out_of_memory")(planted(MemoryError("8 GiB")))
case("internal")(planted(KeyError("x")))


@case("context_full")
def _(place: Place) -> list[str]:
    place.raising(Engine, "extend_all", ContextFull("the context of 512 tokens is full"))
    return RUN


def with_gpu(place: Place) -> Any:
    fake = place.request.getfixturevalue("fake")
    place.request.getfixturevalue("new_to_gpus")
    fake.reset("mode=deferred,seed=9,memory=2000000000")
    place.patch.setenv("MOEINF_LIBCUDA", fake.path)
    place.patch.setattr(gpus, "missing_for_kernels", lambda: None)
    place.patch.setattr(gpus, "torch_device", lambda *_: FakeDevice(fake))
    return fake


@case("no_kernels")
def _(place: Place) -> list[str]:
    with_gpu(place)
    place.patch.setattr(gpus, "missing_for_kernels", lambda: "this torch does not support it")
    return ON_GPU


@case("device_not_chosen")
def _(place: Place) -> list[str]:
    with_gpu(place)
    return [*RUN, "--device-memory", "600MiB"]


@case("device_does_not_fit")
def _(place: Place) -> list[str]:
    with_gpu(place)
    return [*ON_GPU, "--device-memory", "512MiB"]


@case("device_failed")
def _(place: Place) -> list[str]:
    with_gpu(place).configure("fail=cuMemcpyHtoDAsync:9:700:1")
    return ON_GPU


@case("out_of_device_memory")
def _(place: Place) -> list[str]:
    with_gpu(place).configure("fail=cuMemAlloc:0:2:-1")
    return ON_GPU


@case("no_workspace")
def _(place: Place) -> list[str]:
    place.raising(Engine, "extend_all", OutOfMemory("no device memory is left for a pass"))
    return RUN


def typed(place: Place, *lines: str) -> Callable[[], None]:
    """Return a function that holds a conversation: it types the lines, then /bye."""

    def talk() -> None:
        settings = Settings(place.home)
        partner: Any = SimpleNamespace(ready=True, load=Library(settings).find)
        with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
            keys.send_text("".join(f"{line}\r" for line in (*lines, "/bye")))
            Repl(partner, SamplingOptions(), Limits(), settings, Output(), verbose=False).loop()

    return talk


case("bad_command")(lambda place: typed(place, "/bogus"))
case("bad_conversation")(lambda place: typed(place, "/load nothing"))
