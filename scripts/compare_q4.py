"""Compare quantised formats and four-bit schemes by weight errors and the demo's answers.

Run: python scripts/compare_q4.py [--per-kind 40]
All schemes have groups of 32. KL and top-1 compare the demo in float32 with the same demo after
rounding, on held-out answers. Rounding covers linears and experts (not embedding, head, routers).
The demo's rows are shorter than blocks of 256, so K types round two to four rows as one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from moeinf.offload.format.quantise import dequantise, quantise
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.text.tokenizer import Tokenizer
from tests.fakes import from_tensors

GROUP, SUPER = 32, 8  # weights in a group, groups in a super-block
_KEPT = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")


def nearest(weights: Tensor) -> Tensor:
    """Round symmetrically, with the scale from the largest weight, like GGUF's Q4_0: 4.5 bits."""
    groups = weights.view(-1, GROUP)
    at = groups.abs().argmax(-1, keepdim=True)
    scale = (groups.gather(-1, at) / -8).half().float()
    scale = torch.where(scale == 0, 1.0, scale)
    return ((groups / scale).round().clamp(-8, 7) * scale).view_as(weights)


def written(form: str) -> Callable[[Tensor], Tensor]:
    """Return the rounding to a format that moeinf writes; K types in blocks of 256."""

    def scheme(weights: Tensor) -> Tensor:
        columns = GROUP * SUPER if form.endswith("K") else weights.shape[-1]
        rows = weights.reshape(-1, columns).contiguous()
        return dequantise(quantise(rows, form), form, *rows.shape).view_as(weights)

    return scheme


def _fit(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, offset and codes 0 … 15 of each group, with the least squared error found."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    found = (low, low, groups)
    for shrink_low in (1.0, 0.95, 0.9, 0.85, 0.8):
        for shrink_high in (1.0, 0.95, 0.9, 0.85, 0.8):
            middle = (low + high) / 2
            a, b = middle + (low - middle) * shrink_low, middle + (high - middle) * shrink_high
            step = ((b - a) / 15).clamp_min(1e-12)
            codes = ((groups - a) / step).round().clamp(0, 15)
            mean, mean_codes = groups.mean(-1, keepdim=True), codes.mean(-1, keepdim=True)
            spread = (codes - mean_codes).square().sum(-1, keepdim=True).clamp_min(1e-12)
            step = ((codes - mean_codes) * (groups - mean)).sum(-1, keepdim=True) / spread
            offset = mean - step * mean_codes
            error = (step * codes + offset - groups).square().sum(-1, keepdim=True)
            better = error < best
            best = torch.where(better, error, best)
            found = tuple(
                torch.where(better, new, old)
                for new, old in zip((step, offset, codes), found, strict=True)
            )
    return found


def _coded(groups: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    safe = torch.where(step == 0, 1.0, step)
    return step * ((groups - offset) / safe).round().clamp(0, 15) + offset


def asymmetric(weights: Tensor) -> Tensor:
    """Round with a searched scale and offset, float16 each: 5 bits."""
    groups = weights.view(-1, GROUP)
    step, offset, _ = _fit(groups)
    return _coded(groups, step.half().float(), offset.half().float()).view_as(weights)


def asymmetric_small(weights: Tensor) -> Tensor:
    """Round with 6-bit scale and offset under two float16 per 256 weights: 4.5 bits.

    GGUF's Q4_K does the same.
    """
    lacking = -weights.numel() % (GROUP * SUPER)
    flat = torch.cat((weights.flatten(), weights.new_zeros(lacking)))
    groups = flat.view(-1, GROUP)
    step, offset, _ = _fit(groups)
    step, offset = step.clamp_min(0).view(-1, SUPER), offset.clamp_max(0).view(-1, SUPER)
    for_step = (step.amax(-1, keepdim=True) / 63).half().float().clamp_min(1e-7)
    for_offset = (offset.amin(-1, keepdim=True) / 63).half().float().clamp_max(-1e-7)
    step = (step / for_step).round().clamp(0, 63) * for_step
    offset = (offset / for_offset).round().clamp(0, 63) * for_offset
    values = _coded(groups, step.view(-1, 1), offset.view(-1, 1))
    return values.view(-1)[: weights.numel()].view_as(weights)


SCHEMES: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "symmetric, largest": (4.5, nearest),
    "asymmetric, 6-bit scales": (4.5, asymmetric_small),
    "asymmetric": (5.0, asymmetric),
    "q4": (4.5, written("Q4")),
    "q4k": (4.5, written("Q4K")),
    "q5k": (5.5, written("Q5K")),
    "q6k": (6.5625, written("Q6K")),
    "q8": (8.5, written("Q8")),
}
DOWN = {"q4d8": ("q4", "q8"), "q4k, down in q6k": ("q4k", "q6k")}  # (rest, experts' down_proj)
_DOWN_SHARE = 1 / 3  # of an expert's weights


def error_of(scheme: Callable[[Tensor], Tensor], weights: Tensor) -> float:
    return float((scheme(weights) - weights).norm() / weights.norm())


def rounded(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    rest, down = DOWN.get(name, (name, name))
    return {
        key: t
        if t.dim() == 1 or key.endswith(_KEPT)
        else SCHEMES[down if key.endswith("down_proj.weight") else rest][1](t)
        for key, t in tensors.items()
    }


def exercises(per_kind: int) -> Iterator[tuple[str, str]]:
    counts: Counter[str] = Counter()
    for line in (DEMO_CHECKPOINT / "heldout.jsonl").read_text().splitlines():
        item = json.loads(line)
        counts[item["kind"]] += 1
        if counts[item["kind"]] <= per_kind:
            yield f"<|user|>{item['prompt']}<|assistant|>", item["answer"] + "<|end|>"


def logits(tensors: dict[str, Tensor], per_kind: int) -> Tensor:
    """Return the logits of every token of every answer, after correct words: [tokens, vocab]."""
    loaded = from_tensors(json.loads((DEMO_CHECKPOINT / "config.json").read_text()), tensors)
    tokenizer = Tokenizer(DEMO_CHECKPOINT)
    found = []
    for prompt, answer in exercises(per_kind):
        before = tokenizer.encode_text(prompt)
        whole = tokenizer.encode_text(prompt + answer)[:-1]
        out = loaded.model.extend([(whole, loaded.model.new_state(512))], loaded.experts, "all")
        found.append(out[len(before) - 1 :].double())
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-kind", type=int, default=40)
    options = parser.parse_args()
    draw = torch.Generator().manual_seed(1)
    normal = torch.randn(512, 2048, generator=draw)
    chi = torch.randn(5, 512, 2048, generator=draw).square().mean(0).sqrt()
    student = torch.randn(512, 2048, generator=draw) / chi  # five degrees of freedom
    tensors = {n: t.float() for n, t in load_file(DEMO_CHECKPOINT / "model.safetensors").items()}
    reference = logits(tensors, options.per_kind).log_softmax(-1)
    print(f"{len(reference)} tokens of answers")
    for name in (*SCHEMES, *DOWN):
        rest, down = DOWN.get(name, (name, name))
        bits, scheme = SCHEMES[rest]
        bits += _DOWN_SHARE * (SCHEMES[down][0] - bits)
        errors = f"normal {error_of(scheme, normal):.2%}, t5 {error_of(scheme, student):.2%}"
        found = logits(rounded(tensors, name), options.per_kind).log_softmax(-1)
        divergences = (reference.exp() * (reference - found)).sum(-1)
        mean, spread = float(divergences.mean()), float(divergences.std()) / len(found) ** 0.5
        same = float((found.argmax(-1) == reference.argmax(-1)).double().mean())
        print(f"{name:25} {bits:.2f} bits  {errors}", end="  ")
        print(f"KL {mean:.5f} ± {spread:.5f}  top-1 {same:.2%}", flush=True)


if __name__ == "__main__":
    main()
