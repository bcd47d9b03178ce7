"""Logits of every family in q8, q4 and MXFP4 against the plain model on widened weights.

The reference multiplies in float32, with activations rounded as native/kernels/tiles.h describes.
tests/models/test_families.py compares its other arithmetic with transformers. Both choose the
reference's experts, with the reference's weights.

The remaining difference is bfloat16. In these narrow models the reference itself differs between 40
tokens at once and one by one. The difference is the same: 0.5 % to 3 % of the logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Activation, Embedding, Experts, Linear, Model, Pending, Phase
from moeinf.models.families import family_of
from moeinf.models.layers import kv_q8
from moeinf.models.layers.moe import Done, combine
from moeinf.models.seq2seq.encoder_decoder import EncoderDecoder
from moeinf.offload.format.layout import ExpertKey
from moeinf.offload.format.quantise import dequantise, quantise
from moeinf.runtime.checkpoints.checkpoint import Checkpoint, SourceTensor, open_checkpoint
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.inventory import Forms, take_inventory
from moeinf.runtime.checkpoints.quantised.ggml import keeps
from moeinf.runtime.checkpoints.quantised.packed_integers import could_keep
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import in_tag
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.encoder_decoders import PAIRS, save_pair
from tests.fakes import DictParts
from tests.tiny import save_tiny
from tests.tiny_mxfp4 import save_mxfp4
from tests.tiny_packed import compressed, integers, nvfp4, save_packed, scheme

# for the 90 % of tokens that err least: the others have a choice changed by rounding
TOLERANCE = 2e-2
KEPT = ("MXFP4", "NVFP4")  # formats of a checkpoint that are not made here
PROMPT, STEPS = 19, 21  # more rows than the one-token kernels take, then tokens one by one
SOURCE = 23  # tokens that an encoder-decoder reads first
CONFIGS = ["arctic", "deepseek-lite", "deepseek-groups", "deepseek-v3", "glm4-head-norms"]
CONFIGS += ["glm4-lite", "gpt-oss", "granite", "mixtral-window", "olmoe-yarn", "phimoe-biased"]
CONFIGS += ["granite-shared", "qwen2", "qwen3-sparse-step", "qwen3.5"]
CONFIGS += ["switch", "nllb"]
BRIEF_TOO = ["minimax-m2", "qwen3-next", "dots1-window", "ernie4.5", "hunyuan", "exaone-groups"]
BRIEF_TOO += ["solar", "lfm2-biased", "mistral4", "laguna", "gemma4"]
BRIEF_TOO += ["deepseek-v4", "glm4v"]
BRIEF_TOO += ["v32-all-experts", "glm-dsa", "mimo", "kimi-linear-full-first"]
BRIEF_TOO += ["granite-hybrid-rope", "nemotron", "nemotron-latent", "glm5-next"]
BRIEF_TOO += ["qwen4", "qwen4-two-tables", "kimi-k2", "kimi-k25"]
BRIEF_TOO += [name for name in PAIRS if name not in CONFIGS]
SHALLOW = {  # four layers in all, as deep as the others: T5's unscaled scores add more rounding
    "num_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_decoder_layers": 2,
    "num_sparse_decoder_layers": 1,
}
CASES: list[Any] = [(name, tag) for name in CONFIGS for tag in ("q8", "q4")]
CASES += [("gpt-oss-blocks", "mxfp4"), ("gpt-oss", "q4d8"), ("olmoe-yarn", "q4d8")]
CASES += [
    pytest.param(name, tag, marks=pytest.mark.full) for name in BRIEF_TOO for tag in ("q8", "q4")
]
CASES += [("int4", "q4"), ("int4", "q8"), ("int8", "q8"), ("nvfp4", "q8"), ("nvfp4", "q4")]


def rounded(x: Tensor) -> Tensor:
    """Round x [..., C] to float32 of the same shape: 127 steps per group of 32."""
    wide = functional.pad(x.float(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    most = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((wide * (127 / most)).round() * (most / 127)).flatten(-2)[..., : x.shape[-1]]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x by a quantised weight [R, C]; return float32 [..., R]."""
    return rounded(x) @ weight.T


def act(activation: Activation, inner: Mapping[str, Tensor]) -> Tensor:
    up = inner["up"]
    if activation == "relu":
        return up.relu()
    if activation == "relu2":
        return up.relu().square()
    gate = inner["gate"]
    if activation == "swiglu":
        return gate * gate.sigmoid() * up
    if activation == "swiglu10":
        return functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    if activation == "geglu":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


class WidenedParts(DictParts):
    """Linears of widened weights in float32; all other parts in bfloat16."""

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        weight = self._tensors[f"{prefix}.weight"]
        assert weight.shape == (out_features, in_features)
        offset = self.tensor(f"{prefix}.bias", out_features) if bias else None

        def apply(x: Tensor) -> Tensor:
            out = product(x, weight).to(x.dtype)
            return out if offset is None else out + offset

        return apply

    def embedding(self, prefix: str, count: int, width: int) -> Embedding:
        return Embedding.of(self.tensor(f"{prefix}.weight", count, width).bfloat16())


class WidenedExperts:
    """`Experts` that widens every expert and records its calls."""

    wants_hints = False

    def __init__(
        self, experts: Mapping[ExpertKey, Mapping[str, Tensor]], activation: Activation
    ) -> None:
        self._experts, self._activation = experts, activation
        self.routes: list[tuple[Tensor, Tensor]] = []

    def begin_pass(self, rows: Tensor, phase: Phase) -> None:
        """Do nothing: nothing needs preparation."""

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Done:
        self.routes.append((ids, weights))
        rows = torch.stack([
            torch.stack([self._run(layer, e, row) if e >= 0 else 0 * row for e in chosen])
            for row, chosen in zip(x, ids.tolist(), strict=True)
        ])  # fmt: skip
        return Done(combine(rows.to(x.dtype), weights))

    def _run(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """Map [D] to [D], float32 throughout."""
        parts = self._experts[ExpertKey(layer, expert)]
        inner = {
            role: product(x, parts[role]) + parts.get(f"{role}_bias", torch.zeros(()))
            for role in ("gate", "up")
            if role in parts
        }
        middle = act(self._activation, inner)
        return product(middle, parts["down"]) + parts.get("down_bias", torch.zeros(()))

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """Do nothing: all experts are in memory."""

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        """Do nothing: nothing is recorded."""


class Routed:
    """`Experts` that runs the routing another model chose."""

    wants_hints = False

    def __init__(self, experts: Experts, routes: list[tuple[Tensor, Tensor]]) -> None:
        self._experts, self._routes = experts, iter(routes)

    def begin_pass(self, rows: Tensor, phase: Phase) -> None:
        self._experts.begin_pass(rows, phase)

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        ids, weights = next(self._routes)
        return self._experts.submit(layer, x, ids, weights)

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        raise AssertionError("nobody wants hints")

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        self._experts.end_pass(accepted_rows)


def drafts_like_tokens(engine: Engine, ids: list[int]) -> None:
    """Compare tokens in one pass, of which the state keeps some, with the same ones alone."""
    alone, state = engine.new_state(), engine.new_state()
    for one in (alone, state):
        engine.extend(one, ids[:PROMPT])
    single = [engine.extend(alone, [token]).copy() for token in ids[PROMPT:]]
    at = 0
    for count, kept in ((2, 1), (5, 5), (8, 3), (12, 12)):

        def accept(rows: Tensor, at: int = at, kept: int = kept) -> int:
            for row, expected in zip(rows, single[at:], strict=False):
                assert torch.equal(row, torch.from_numpy(expected))
            return kept

        engine.check(state, ids[PROMPT + at : PROMPT + at + count], accept)
        at += kept
        assert state.length == PROMPT + at


def widened(tensor: SourceTensor, form: str) -> Tensor:
    """Return the tensor's value after it was stored as `form`."""
    as_torch = torch.float32 if form in ("Q4", "Q8", *KEPT, "F32") else torch.bfloat16
    source = b"".join(encoded(tensor, "BF16" if as_torch == torch.bfloat16 else "F32"))
    values = torch.frombuffer(bytearray(source), dtype=as_torch).view(tensor.shape)
    kept = form in KEPT or could_keep(tensor, form) or keeps(tensor.dtype, form)
    if form not in ("Q4", "Q8") or kept:
        return values
    return dequantise(quantise(values, form), form, *tensor.shape)


def in_rows(tensor: SourceTensor) -> Tensor:
    """Return a piece of a table after it was stored as rows of q8."""
    source = bytearray(b"".join(encoded(tensor, "F32")))
    values = torch.frombuffer(source, dtype=torch.float32).view(tensor.shape)
    return kv_q8.widened(kv_q8.quantised(values), tensor.shape[1], torch.bfloat16)


def reference(
    stored: Path | Checkpoint, tag: str, forms: Forms | None = None
) -> tuple[Model, WidenedExperts]:
    """Return the model with a checkpoint's weights as the tag, or `forms`, stores them."""
    checkpoint = open_checkpoint(stored) if isinstance(stored, Path) else stored
    family = family_of(checkpoint.config)
    inventory, dtype = in_tag(take_inventory(family, checkpoint), tag)
    if forms is not None:
        inventory = replace(inventory, forms=forms)
    layouts = inventory.expert_layouts(dtype)

    def form_of(key: ExpertKey, role: str) -> str:
        layout = layouts[key.layer * inventory.moe.experts + key.expert]
        return layout.down if role == "down" else layout.dtype

    dense = {n: widened(t, inventory.form_of(n, dtype)) for n, t in inventory.dense.items()}
    experts = {
        key: {
            role: widened(t, form_of(key, role) if len(t.shape) == 2 else "BF16")
            for role, t in parts.items()
        }
        for key, parts in inventory.experts.items()
    }
    for name, parts in inventory.tables.items():
        dense |= {f"{name}.shard_{n}.weight": in_rows(part) for n, part in enumerate(parts)}
    model = family.build(family.parse(checkpoint.config), WidenedParts(dense))
    return model, WidenedExperts(experts, inventory.moe.activation)


def logits(model: Model, experts: Experts, ids: list[int], state: Any) -> Tensor:
    """Return logits [T, vocab] of ids [T].

    An encoder-decoder reads the first SOURCE ids reversed.
    """
    if isinstance(model, EncoderDecoder):
        model.encode(ids[SOURCE - 1 :: -1], state, experts)
    parts = [model.extend([(ids[:PROMPT], state)], experts, "all")]
    parts += [model.extend([([token], state)], experts) for token in ids[PROMPT:]]
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "tag"), CASES)
def test_near_the_reference(name: str, tag: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    if tag == "mxfp4":
        save_mxfp4(folder)
    elif name in ("int4", "int8"):
        bits = int(name.removeprefix("int"))
        save_packed(folder, compressed(scheme(bits)), lambda _: integers(bits))
    elif name == "nvfp4":
        modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        save_packed(folder, modelopt, lambda _: nvfp4(divides=False), "qwen3_moe")
    elif name in PAIRS:
        shallow = SHALLOW if name in ("switch", "switch-full") else {}
        save_pair(name, folder, 3, **shallow)
    else:
        save_tiny(name, folder, 3, torch.bfloat16)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = Settings(tmp_path / "home")
    manifest = pull(folder, settings, f"tiny:{tag}")
    plain, experts = reference(folder, tag)
    assert near_the_reference(manifest, settings, plain, experts) < TOLERANCE


def near_the_reference(
    manifest: Manifest, settings: Settings, plain: Model, experts: WidenedExperts
) -> float:
    """Return the typical error of an engine's logits with the least memory."""
    folder = Library(settings).folder(manifest.model)
    values = json.loads((folder / "config.json").read_text())
    vocab = values.get("text_config", values)["vocab_size"]
    ids = [(11 * i + 5) % vocab for i in range(PROMPT + STEPS)]
    wanted = logits(plain, experts, ids, plain.new_state(len(ids)))
    config = EngineConfig(memory=parse_memory(str(manifest.slots.min_bytes)), threads=1)
    with Engine.open(manifest, folder, config, settings) as engine:
        found = logits(engine.model, Routed(engine.store, experts.routes), ids, engine.new_state())
        if not isinstance(engine.model, EncoderDecoder):
            assert engine.info.drafts
        if engine.info.drafts:
            drafts_like_tokens(engine, ids)
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)  # [tokens]
    return float(error.square().sort().values[: len(error) * 9 // 10].mean().sqrt())
