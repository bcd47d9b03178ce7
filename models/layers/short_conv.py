"""A gated short convolution: a layer whose memory is the last few inputs of each channel.

Math as in transformers 5.23, modeling_lfm2_moe.py: x makes B, C and u; the output is
C · conv(B · u), before a last product.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moeinf.models.base import Linear, Parts
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.recurrent import CHUNK, RecurrentLayout, RecurrentMemory


def conv_memory(layers: int, hidden: int, kernel: int) -> RecurrentLayout:
    """Return the layout: the convolution's last inputs [kernel - 1, D] of every layer."""
    return RecurrentLayout(layers, ((kernel - 1, hidden),))


class ShortConv:
    """One layer of gated convolution, the `layer`-th of the recurrent layers."""

    def __init__(
        self, layer: int, hidden: int, kernel: int, bias: bool, parts: Parts, prefix: str
    ) -> None:
        self._layer, self._kernel = layer, kernel
        self._in: Linear = parts.linear(f"{prefix}.in_proj", 3 * hidden, hidden, bias)
        self._out: Linear = parts.linear(f"{prefix}.out_proj", hidden, hidden, bias)
        conv = parts.tensor(f"{prefix}.conv.weight", hidden, 1, kernel)
        self._conv = conv[:, 0].T.float().contiguous()  # [kernel, D]
        self._bias = parts.tensor(f"{prefix}.conv.bias", hidden).float() if bias else None

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's next memory."""
        before, after, u = self._in(x).chunk(3, -1)  # [T, D] each
        inputs = before * u
        mixed = torch.empty_like(inputs)
        for span in rows.spans:
            memory, r = span.cache.recurrent, span.rows
            assert memory is not None
            memory.run(span.past, partial(self._run, memory, span.past, inputs[r], mixed[r]))
        return self._out(after * mixed)

    def _run(self, memory: RecurrentMemory, past: int, inputs: Tensor, out: Tensor) -> None:
        """Run one request's n rows, CHUNK tokens at a time; write into out [n, D]."""
        (recent,) = memory.read(self._layer, past)
        for start in range(0, len(inputs), CHUNK):
            if memory.is_mark(past + start):
                memory.mark(self._layer, (recent,))
            r = slice(start, min(start + CHUNK, len(inputs)))
            n = r.stop - r.start
            known = torch.cat((recent, inputs[r].float()))  # [kernel - 1 + n, D]
            mixed = known[:n] * self._conv[0]
            for back in range(1, self._kernel):
                mixed += known[back : back + n] * self._conv[back]
            out[r] = (mixed if self._bias is None else mixed + self._bias).to(out.dtype)
            recent = known[-(self._kernel - 1) :]
        memory.next(self._layer)[0].copy_(recent)
