"""The worker that runs llama.cpp: python -m benchmarks.llama FILE.gguf --setting default …

Runs in the peer's Python: knows numpy and llama_cpp (its low-level calls, so that nothing of its
Python part counts), not moeinf.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from typing import Any

import llama_cpp as api
import numpy as np

from benchmarks.worker import serve

_IMPORTED_AT = time.monotonic()
SETTINGS: dict[str, dict[str, bool]] = {
    "default": {},
    "no-repack": {"use_extra_bufts": False},
    "no-mmap": {"use_mmap": False},
}
_ERROR = 4  # GGML_LOG_LEVEL_ERROR


class LlamaRunner:
    """See worker.Runner."""

    def __init__(self, path: str, setting: str, threads: int, context: int) -> None:
        self._log = api.llama_log_callback(_log)
        api.llama_log_set(self._log, ctypes.c_void_p(0))
        api.llama_backend_init()
        model = api.llama_model_default_params()
        for field, value in SETTINGS[setting].items():
            setattr(model, field, value)
        self._model = api.llama_model_load_from_file(path.encode(), model)
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {path}")
        params = api.llama_context_default_params()
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp gives no context")
        vocab = api.llama_model_get_vocab(self._model)
        self._vocab = api.llama_vocab_n_tokens(vocab)

    def reset(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._context), True)

    def prefill(self, tokens: list[int]) -> float:
        start = time.perf_counter()
        self._pass(tokens)
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
        code = api.llama_decode(self._context, api.llama_batch_get_one(ids, len(tokens)))
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        api.llama_get_logits_ith(self._context, -1)  # waits for the result


def _log(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--setting", choices=list(SETTINGS), default="default")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    o = parser.parse_args()
    runner = LlamaRunner(o.file, o.setting, o.threads, o.context)
    serve(runner, {"imported_at": _IMPORTED_AT, "ready_at": time.monotonic()})


if __name__ == "__main__":
    main()
