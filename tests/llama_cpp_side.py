"""Run a GGUF file in llama.cpp, and compare its logits with those of our engine.

Import it only where llama_cpp can be imported: `pip install llama-cpp-python` compiles it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
from torch import Tensor

from moeinf.models import phimoe
from moeinf.models.base import Parts
from moeinf.models.layers import decoder
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter
from moeinf.runtime.engine.engine import Engine
from tests.exported import CONTEXT

_F32 = 0  # ggml's number, of the KV cache: by default llama.cpp rounds it to 16 bits
TYPES = {  # llama.cpp's own quantisations, by llama_ftype
    "Q4_0": 2,
    "Q8_0": 7,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "MXFP4_MOE": 38,
}
_default_params = llama_cpp.llama_model_default_params
_quiet = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))


def _plain_params() -> Any:
    """Return llama.cpp's defaults without repacked weights, whose AMX path can crash."""
    params = _default_params()
    params.use_extra_bufts = False
    return params


class Llama:
    """One file, open in llama.cpp on one thread of the CPU."""

    def __init__(self, file: Path, context: int) -> None:
        with mock.patch.object(llama_cpp.llama_cpp, "llama_model_default_params", _plain_params):
            self._model: Any = llama_cpp.Llama(
                str(file),
                n_gpu_layers=0,
                n_ctx=context,
                n_threads=1,
                n_threads_batch=1,
                logits_all=True,
                type_k=_F32,
                type_v=_F32,
                flash_attn=False,
                verbose=False,
            )

    def close(self) -> None:
        self._model.close()

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text in which special tokens count, as llama.cpp finds them."""
        found: list[int] = self._model.tokenize(text.encode(), add_bos=False, special=True)
        return found

    def chat(self, text: str, count: int) -> str:
        """Return the greedy answer to a message, through the template of the file."""
        messages = [{"role": "user", "content": text}]
        found = self._model.create_chat_completion(messages, temperature=0, max_tokens=count)
        answer: str = found["choices"][0]["message"]["content"]
        return answer

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return [tokens, vocabulary] float32: the logits after every token of one text."""
        self._model.reset()
        self._model.eval(list(ids))
        return torch.from_numpy(np.array(self._model.scores[: len(ids)], np.float32))


@contextmanager
def llama(file: Path, context: int = CONTEXT) -> Iterator[Llama]:
    """Open a file in llama.cpp."""
    opened = Llama(file, context)
    try:
        yield opened
    finally:
        opened.close()


@dataclass(frozen=True)
class Difference:
    """How far our logits are from llama.cpp's at some positions."""

    positions: int
    kl: float  # of llama.cpp's distribution to ours: mean, and the worst position
    worst_kl: float
    largest: float  # difference of a logit, both with mean 0 at each position
    changed: int  # positions with another most probable token
    gap: float  # largest lead of our most probable token over llama.cpp's, where they differ


def difference(ours: Tensor, theirs: Tensor) -> Difference:
    """Compare logits [tokens, vocabulary] of the same texts."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    a, b = ours.double(), theirs.double()
    p, q = b.log_softmax(-1), a.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    best, other = a.argmax(-1), b.argmax(-1)
    leads = (a.gather(1, best[:, None]) - a.gather(1, other[:, None])).flatten()
    centred = (a - a.mean(-1, keepdim=True)) - (b - b.mean(-1, keepdim=True))
    return Difference(
        len(a),
        float(kl.mean()),
        float(kl.max()),
        float(centred.abs().max()),
        int((best != other).sum()),
        float(leads.max()),
    )


def quantised(file: Path, form: str) -> Path:
    """Return a copy of an f32 file in which llama.cpp has quantised the matrices."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[form], 1
    made = file.with_name(f"{form}.gguf")
    given = (str(file).encode(), str(made).encode(), ctypes.byref(params))
    assert llama_cpp.llama_model_quantize(*given) == 0, form
    return made


@contextmanager
def computed_as_there(family: str) -> Iterator[None]:
    """Give our phimoe llama.cpp's norms and router, to compare everything else.

    It runs phimoe with RMSNorm, which keeps the mean, and weights from a softmax over all experts.
    Both are approximations: transformers and we compute LayerNorm and the sparse mixer.
    """

    def norm(parts: Parts, prefix: str, width: int, eps: float) -> Callable[[Tensor], Tensor]:
        weight, bias = (parts.tensor(f"{prefix}.{name}", width) for name in ("weight", "bias"))
        return lambda x: RmsNorm(weight, eps)(x) + bias

    def router(gate: Tensor, jitter: float) -> SoftmaxRouter:
        return SoftmaxRouter(gate, 2, renormalise=True)

    with ExitStack() as patches:
        if family == "phimoe":
            for place, value in (
                (phimoe, ("layer_norm", norm)),
                (decoder, ("layer_norm", norm)),
                (phimoe, ("SparseMixer", router)),
            ):
                patches.enter_context(mock.patch.object(place, *value))
        yield


def our_logits(engine: Engine, ids: Sequence[int]) -> Tensor:
    """Return [tokens, vocabulary] float32: our logits after every token of one text."""
    return engine.all_logits(engine.new_state(), list(ids)).float()
