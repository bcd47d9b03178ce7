"""Every architecture: a GGUF file gives the config and the bytes of its checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import Checkpoint, open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.library.repacking.shard_writer import all_targets
from scripts.make_checkpoint import byte_tokenizer
from tests.gguf_files import write_gguf
from tests.tiny import save_tiny
from tests.tiny_configs import TINY
from tests.tiny_families import Tiny, kimi_linear, mimo, phimoe

_FACTORS = [1.0, 1.125, 1.25, 1.5, 1.75, 2.0]
LONG = phimoe(
    attention_bias=True,
    lm_head_bias=True,
    router_jitter_noise=0.01,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "short_factor": _FACTORS,  # as in float32
        "long_factor": [2 * factor for factor in _FACTORS],
        "short_mscale": 1.25,
        "long_mscale": 1.25,
    },
)
_HALF = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
MIMO = mimo(
    head_dim=16,
    rope_parameters={
        "full_attention": _HALF,
        "sliding_attention": {**_HALF, "rope_theta": 1e4},
    },
)
HYBRID = TINY["granite-hybrid"].but(max_position_embeddings=1 << 20)  # as in files
KIMI = kimi_linear(linear_num_heads=3)
SAME: list[str | Tiny] = ["olmoe", "qwen3", "mixtral", "mixtral-wide-heads", "mixtral-all-experts"]
SAME += ["gpt-oss", "gpt-oss-one-expert", "deepseek-lite", "deepseek-bare", "deepseek-v3"]
SAME += ["deepseek-v3-bare", "glm4-lite", "qwen2", "glm4", "glm4-head-norms", "glm4-yarn"]
SAME += [
    "granite",
    "granite-shared",
    "phimoe-biased",
    LONG,
    "arctic",
    "arctic-three",
    "qwen3.5",
    "qwen3.5-full-first",
    "gemma4",
    "gemma4-all-experts",
    MIMO,
    KIMI,
    "minimax-m2",
    "dots1",
    "dots1-all-experts",
    "ernie4.5",
    "hunyuan-all-experts",
    "exaone",
    "solar",
    "laguna",
    "qwen3-next",
    "lfm2",
    "lfm2-all-experts",
    HYBRID,
    "nemotron",
    TINY["nemotron-latent"].but(mlp_bias=False),  # llama.cpp has none
    "mistral4-all-experts",
    "v32",
    "glm-dsa",
    "kimi-k2",
    "kimi-k25",
    "glm4v",
]
ROUNDED = ("granitemoehybrid", "kimi_linear", "nemotron_h", "qwen3_5_moe", "qwen3_next")
READ_AS = {"solar_open": "glm4_moe"}  # one architecture of llama.cpp


def stored(checkpoint: Checkpoint, form: str = "F32") -> dict[str, bytes]:
    """Return the content of every file of a pull, without headers."""
    inventory = take_inventory(family_of(checkpoint.config), checkpoint)
    assert inventory.unused == []
    return {
        target.name: b"".join(
            bytes(block) for n in range(len(target.parts)) for block in target.data(n)
        )
        for target in all_targets(inventory, form)
    }


def without_more_tokens(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without layers for further tokens: a file has none."""
    none = {"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 0}
    config = {**checkpoint.config, **none}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **none}
    return replace(checkpoint, config=config)


@pytest.mark.parametrize(
    "name", SAME, ids=lambda name: name if isinstance(name, str) else name.family
)
def test_a_file_is_the_checkpoint_that_it_was_made_of(name: str | Tiny, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "x", seed=3)
    byte_tokenizer().save(str(tmp_path / "x" / "tokenizer.json"))
    theirs = without_more_tokens(open_checkpoint(tmp_path / "x"))
    ours = open_gguf(write_gguf(tmp_path / "x", tmp_path / "x.gguf"))
    family = family_of(theirs.config)
    assert family_of(ours.config).model_type == READ_AS.get(family.model_type, family.model_type)
    assert family_of(ours.config).parse(ours.config) == family.parse(theirs.config)
    assert ours.made is not None
    assert json.loads(ours.made["config.json"]) == ours.config
    mine, others = stored(ours), stored(theirs)
    if family.model_type not in ROUNDED:
        assert mine == others
        return
    # Norms were stored plus 1, decay rates as -exp(A_log): both are rounded.
    assert mine.keys() == others.keys()
    for file, data in others.items():
        found = np.frombuffer(mine[file], np.float32)
        np.testing.assert_allclose(found, np.frombuffer(data, np.float32), rtol=0, atol=1e-6)
