"""llama.cpp through its low-level Python calls.

Run: python -m benchmarks.peers.llama_cpp FILE.gguf --setting default …

    --setting experts --device-bytes N      on a GPU: all dense weights, and the experts of all
                                            layers that fit in N bytes of weights; the CPU computes
                                            the others (its --n-cpu-moe)

Imports numpy, gguf and llama_cpp. The low-level calls exclude the cost of its Python layer.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as api  # pyright: ignore[reportMissingImports]
import numpy as np

from benchmarks.peers.base import main
from benchmarks.peers.gguf_sizes import layers_below
from benchmarks.worker import forced_turn

SETTINGS: dict[str, dict[str, int]] = {
    "default": {},
    "no-repack": {"use_extra_bufts": False},
    "no-mmap": {"load_mode": api.LLAMA_LOAD_MODE_NONE},
    "experts": {"n_gpu_layers": -1},
}
_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_MOST_ROWS = 2048  # llama.cpp's default n_batch; it aborts at a pass of more


class LlamaRunner:
    """See worker.Runner."""

    def __init__(self, o: argparse.Namespace) -> None:
        self._log = api.llama_log_callback(_log)
        api.llama_log_set(self._log, ctypes.c_void_p(0))
        api.llama_backend_init()
        model = api.llama_model_default_params()
        known = {name for name, *_ in model._fields_}
        for field, value in SETTINGS[o.setting].items():
            assert field in known, field  # ctypes accepts unknown fields and ignores them
            setattr(model, field, value)
        if o.setting == "experts":
            if not api.llama_supports_gpu_offload():
                raise SystemExit("this llama.cpp was built without CUDA")
            assert o.device_bytes is not None, "--device-bytes"
            self._places = experts_on_cpu(o.model, o.device_bytes)  # read during the load
            model.tensor_buft_overrides = ctypes.cast(self._places, ctypes.c_void_p)
        self._model = api.llama_model_load_from_file(o.model.encode(), model)
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {o.model}")
        params = api.llama_context_default_params()
        params.n_ctx = o.context * o.batch
        params.n_seq_max = o.batch
        params.n_batch = _MOST_ROWS
        params.n_threads = params.n_threads_batch = o.threads
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp gives no context")
        vocab = api.llama_model_get_vocab(self._model)
        self._vocab = api.llama_vocab_n_tokens(vocab)
        self._lengths = [0] * o.batch
        self._batch = api.llama_batch_init(_MOST_ROWS, 0, 1)

    def reset(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        self._lengths = [0] * len(self._lengths)

    def turn(
        self, prompts: list[list[int]], answers: list[list[int]], limit_s: float
    ) -> dict[str, Any]:
        def first() -> None:
            for number, prompt in enumerate(prompts):
                for start in range(0, len(prompt), _MOST_ROWS):
                    self._rows([(number, token) for token in prompt[start : start + _MOST_ROWS]])

        return forced_turn(
            first, lambda column: self._rows(list(enumerate(column))), answers, limit_s
        )

    def prefill(self, tokens: list[int]) -> float:
        start = time.perf_counter()
        for first in range(0, len(tokens), _MOST_ROWS):
            self._pass(tokens[first : first + _MOST_ROWS])
        return time.perf_counter() - start

    def decode(self, tokens: list[int]) -> list[float]:
        return [self.prefill([token]) for token in tokens]

    def logits(self) -> list[float]:
        found = api.llama_get_logits_ith(self._context, -1)
        return [float(value) for value in np.ctypeslib.as_array(found, (self._vocab,))]

    def about(self) -> dict[str, Any]:
        info = api.llama_print_system_info().decode()
        return {"version": f"llama-cpp-python {api.__version__}", "system_info": info}

    def _pass(self, tokens: list[int]) -> None:
        ids = (api.llama_token * len(tokens))(*tokens)
        self._decode(api.llama_batch_get_one(ids, len(tokens)))

    def _rows(self, rows: list[tuple[int, int]]) -> None:
        """Run one pass of (conversation, token) rows, with logits of each conversation's last."""
        last = {number: row for row, (number, _) in enumerate(rows)}
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (number, token) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = self._lengths[number]
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = number
            batch.logits[row] = last[number] == row
            self._lengths[number] += 1
        self._decode(batch)

    def _decode(self, batch: Any) -> None:
        code = api.llama_decode(self._context, batch)
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        api.llama_get_logits_ith(self._context, -1)  # waits for the result


class Place(ctypes.Structure):
    """llama_model_tensor_buft_override: the memory for tensors whose name matches."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def experts_on_cpu(path: str, device_bytes: int) -> ctypes.Array[Place]:
    """Place the experts of the first layers in RAM, so that all other weights fit in device_bytes.

    Raises SystemExit when the dense weights do not fit.
    """
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    below = layers_below(sizes, device_bytes)
    base = ctypes.CDLL(str(next(Path(api.__file__).parent.glob("lib/libggml-base.so"))))
    base.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    ram = base.ggml_backend_cpu_buffer_type()
    patterns = [rb"^blk\.%d\.ffn_(up|down|gate|gate_up)_exps\." % n for n in below]
    return (Place * (len(below) + 1))(*((pattern, ram) for pattern in patterns))  # last is empty


def _log(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


if __name__ == "__main__":
    main(LlamaRunner)
