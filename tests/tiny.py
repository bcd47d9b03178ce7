"""Build tiny random-weight models of every family with transformers or tests/arctic.py.

The result looks like a checkpoint from the hub.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.arctic import ArcticConfig, ArcticReference
from tests.tiny_configs import TINY, by_default
from tests.tiny_families import Tiny
from tests.tiny_glm5 import with_vision
from tests.tiny_kimi import KIMI_FAMILIES, config_as_published, name_as_published

__all__ = [
    "TINY",
    "by_default",
    "published_config",
    "save_tiny",
    "tiny_config",
    "tiny_reference",
]

_ATTENTION_GAIN = 1.6  # so that attention is not uniform
_GATES = tuple(
    f"{name}.weight"
    for name in ("mlp.gate", "moe.gate", "gate.wg", "router", "router.proj", "mixer.gate")
)
_MIXED = ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight")
_CENTRED = ("qwen3_5_moe", "qwen3_next", "qwen4_exp")
_LIMITED = {"deepseek_v4": 3.0, "glm5_next": 4.0}  # so much that some factors of SwiGLU exceed 10
_ROUTER_GAIN = 2.5  # so that neither chance nor a single logit chooses the experts


def tiny_config(name: str | Tiny) -> Any:
    """Return the transformers config of TINY[name], or of a configuration of its own."""
    tiny = _tiny(name)
    common = {"vocab_size": 97, "max_position_embeddings": 128, "pad_token_id": None}
    settings = {key: _copied(value) for key, value in {**common, **tiny.settings}.items()}
    if tiny.family == "arctic":  # no class in transformers 5
        return ArcticConfig(**settings)
    return getattr(transformers, tiny.config_class)(**settings)


def published_config(name: str) -> dict[str, Any]:
    """Return the values of the config.json that save_tiny writes."""
    values: dict[str, Any] = tiny_config(name).to_dict()
    family = TINY[name].family
    return config_as_published(family, values) if family in KIMI_FAMILIES else values


def _tiny(name: str | Tiny) -> Tiny:
    return name if isinstance(name, Tiny) else TINY[name]


def tiny_reference(name: str | Tiny, seed: int = 0) -> Any:
    """Return the transformers model with random float32 weights, eager, in eval mode.

    The weights keep hidden states near 1, so routing and attention affect the result.
    """
    torch.manual_seed(seed)
    model = _empty(name)
    draw = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data = _scaled(parameter_name, noise)
        if _tiny(name).family in _CENTRED and _is_centred(parameter_name):
            parameter.data -= 1
        if _tiny(name).family in _LIMITED and ".mlp." in parameter_name:
            parameter.data *= _beyond(parameter_name, _LIMITED[_tiny(name).family])
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            buffer.copy_(_scaled(buffer_name, torch.randn(buffer.shape, generator=draw)))
        if buffer_name.endswith("tid2eid"):  # a token's experts differ
            order = torch.rand(len(buffer), model.config.n_routed_experts, generator=draw)
            buffer.copy_(order.argsort(1)[:, : buffer.shape[1]])
    return model.eval()


def _empty(name: str | Tiny) -> Any:
    config = tiny_config(name)
    if isinstance(config, ArcticConfig):
        return ArcticReference(config)
    if isinstance(config, transformers.Mistral4Config):  # no AutoModel has it
        kind = transformers.Mistral4ForCausalLM
        return kind._from_config(
            config, experts_implementation="eager", attn_implementation="eager"
        )
    if isinstance(config, transformers.Glm5NextTextConfig | transformers.Glm4vMoeTextConfig):
        return with_vision(config)
    with warnings.catch_warnings():  # caused by n_shared_experts = 0
        warnings.filterwarnings("ignore", "Initializing zero-element tensors is a no-op")
        return transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager", attn_implementation="eager"
        )


def save_tiny(
    name: str | Tiny,
    folder: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Any], None] = lambda model: None,
) -> Any:
    """Write config.json and safetensors with hub-style names to `folder`; return the model.

    change: what else happens to its weights.
    """
    model = tiny_reference(name, seed).to(dtype)
    change(model)
    model.save_pretrained(folder)
    if _tiny(name).family in KIMI_FAMILIES:
        name_as_published(_tiny(name).family, folder)
    return model


def _copied(value: Any) -> Any:
    """Copy a dict: transformers changes the dicts that it gets."""
    return copy.deepcopy(value) if isinstance(value, dict) else value


def _is_centred(name: str) -> bool:
    """Return True if a norm of Qwen3.5 stores its weight minus 1."""
    return name.endswith("norm.weight") and not any(x in name for x in (".linear_attn.", "hc_norm"))


def _beyond(name: str, factor: float) -> float:
    """Return the factor of an MLP's weight; the product of all three is half of it."""
    if "gate_up_proj" in name or name.endswith((".gate_proj.weight", ".up_proj.weight")):
        return factor
    return 0.5 / factor if "down_proj" in name else 1.0


def _scaled(name: str, noise: Tensor) -> Tensor:
    if ".forget_gate." in name and noise.dim() == 1:
        return 0.3 * noise - 3 * name.endswith("dt_bias")
    if name.endswith("A_log"):
        return noise - 2.5  # so that a token is remembered for several steps
    if noise.dim() == 1:
        return 0.3 * noise if name.endswith(("bias", ".base")) else 1 + 0.2 * noise
    if "embed" in name:
        return noise
    gain = _ATTENTION_GAIN if "self_attn" in name or name.endswith(_MIXED) else 1.0
    if name.endswith(_GATES):
        gain = _ROUTER_GAIN
    return gain * noise / max(noise.shape[-1], 1) ** 0.5
