"""Implement Snowflake Arctic in plain torch from its published description.

transformers 5 has no class for it. One sequence, no cache, a loop over all experts: slow and
simple. It is built and called like a transformers model, so the tests of all families run on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional


class ArcticConfig:
    """The keys of config.json as attributes."""

    def __init__(self, **settings: Any) -> None:
        self._values = {"model_type": "arctic", "rms_norm_eps": 1e-5, "rope_theta": 1e4, **settings}
        self._values |= {"moe_layer_frequency": 1, "parallel_attn_mlp_res": True}
        for name in ("attention_bias", "tie_word_embeddings"):
            self._values.setdefault(name, False)
        self._values.setdefault("sliding_window", None)
        self.__dict__.update(self._values)

    def get_text_config(self) -> ArcticConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)


class ArcticReference(nn.Module):
    """The whole model; its parameters have the checkpoint's names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        d, head = config.hidden_size, config.hidden_size // config.num_attention_heads
        narrow = config.num_key_value_heads * head
        shapes = {"model.embed_tokens": (config.vocab_size, d), "model.norm": (d,)}
        if not config.tie_word_embeddings:
            shapes["lm_head"] = (config.vocab_size, d)
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"
            for name in ("input", "post_attention", "residual"):
                shapes[f"{at}.{name}_layernorm"] = (d,)
            for name, width in (("q", d), ("k", narrow), ("v", narrow), ("o", d)):
                shapes[f"{at}.self_attn.{name}_proj"] = (width, d)
                if config.attention_bias:
                    shapes[f"{at}.self_attn.{name}_proj.bias"] = (width,)
            for name in ("w1", "w2", "w3"):
                shapes[f"{at}.residual_mlp.{name}"] = (d, d)
            shapes[f"{at}.block_sparse_moe.gate"] = (config.num_local_experts, d)
            for number in range(config.num_local_experts):
                for name in ("w1", "w3"):
                    shape = (config.intermediate_size, d)
                    shapes[f"{at}.block_sparse_moe.experts.{number}.{name}"] = shape
                shapes[f"{at}.block_sparse_moe.experts.{number}.w2"] = shape[::-1]
        # A parameter name must not contain a dot.
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(torch.empty(s)) for name, s in shapes.items()}
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in self.weights.items():
            whole = name.replace("/", ".")
            yield whole if whole.endswith(".bias") else f"{whole}.weight", parameter

    def save_pretrained(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        save_file(tensors, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(self.config.to_dict()))

    def forward(self, ids: Tensor, use_cache: bool = False) -> Any:
        """Map token ids [1, T] to logits [1, T, vocab]."""
        x = self._w("model.embed_tokens")[ids[0]]
        for layer in range(self.config.num_hidden_layers):
            at = f"model.layers.{layer}"
            h = x + self._attention(self._norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
            dense = self._mlp(self._norm(h, f"{at}.residual_layernorm"), f"{at}.residual_mlp")
            read = self._norm(x, f"{at}.post_attention_layernorm")  # x: the input of attention
            x = h + dense + self._experts(read, f"{at}.block_sparse_moe")
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        logits = self._norm(x, "model.norm") @ self._w(head).T
        return SimpleNamespace(logits=logits[None])

    @torch.no_grad()
    def generate(self, ids: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        for _step in range(max_new_tokens):
            ids = torch.cat((ids, self(ids).logits[:, -1:].argmax(-1)), 1)
        return ids

    def _w(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide / (wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return self._w(name) * wide.to(x.dtype)

    def _mlp(self, x: Tensor, at: str) -> Tensor:
        gate, up = (x @ self._w(f"{at}.{name}").T for name in ("w1", "w3"))
        return (functional.silu(gate) * up) @ self._w(f"{at}.w2").T

    def _experts(self, x: Tensor, at: str) -> Tensor:
        scores = (x @ self._w(f"{at}.gate").T).float().softmax(-1)
        out = torch.zeros_like(x)
        for token in range(len(x)):
            best = scores[token].argsort(descending=True)[: self.config.num_experts_per_tok]
            weights = scores[token][best] / scores[token][best].sum()
            for number, weight in zip(best.tolist(), weights, strict=True):
                row = self._mlp(x[token : token + 1], f"{at}.experts.{number}")[0]
                out[token] += (weight * row).to(x.dtype)
        return out

    def _attention(self, x: Tensor, at: str) -> Tensor:
        config, total = self.config, len(x)
        q, k, v = (
            self._projected(x, f"{at}.{name}_proj").view(total, heads, -1).transpose(0, 1)
            for name, heads in (
                ("q", config.num_attention_heads),
                ("k", config.num_key_value_heads),
                ("v", config.num_key_value_heads),
            )
        )  # [heads, T, W]
        shared = config.num_attention_heads // config.num_key_value_heads
        q, k = self._turn(q), self._turn(k).repeat_interleave(shared, 0)
        scores = (q @ k.mT) / q.shape[-1] ** 0.5
        unseen = torch.ones(total, total).triu(1).bool()
        if config.sliding_window is not None:
            unseen |= torch.ones(total, total).tril(-config.sliding_window).bool()
        scores = scores.masked_fill(unseen, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
        out = weights @ v.repeat_interleave(shared, 0)
        return self._projected(out.transpose(0, 1).reshape(total, -1), f"{at}.o_proj")

    def _projected(self, x: Tensor, at: str) -> Tensor:
        out = x @ self._w(at).T
        return out + self._w(f"{at}.bias") if self.config.attention_bias else out

    def _turn(self, x: Tensor) -> Tensor:
        """Apply half-rotation RoPE to [heads, T, W]."""
        width = x.shape[-1]
        speeds = self.config.rope_theta ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(x.shape[1])[:, None] * speeds
        a, b = x[..., : width // 2], x[..., width // 2 :]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
