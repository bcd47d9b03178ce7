"""Every family from checkpoint to tokens: shards, slots, and the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import endless, pull
from tests.generating import answering
from tests.tiny import by_default, save_tiny, tiny_reference

CONFIGS = ["mixtral", "mixtral-window", "deepseek-lite", "deepseek-groups", "olmoe-yarn"]
CONFIGS += ["deepseek-v3", "glm4", "glm4-head-norms", "glm4-lite-layers"]
CONFIGS += ["gpt-oss", "gpt-oss-all-experts", "gpt-oss-one-expert"]
CONFIGS += ["arctic", "granite", "granite-shared", "phimoe", "phimoe-biased", "phimoe-longrope"]
CONFIGS += ["qwen3.5", "qwen3.5-full-first"]
CONFIGS += ["minimax-m2", "minimax-m2-yarn", "qwen3-next", "qwen3-next-dense-ends", "dots1"]
CONFIGS += ["dots1-window", "ernie4.5", "ernie4.5-intervals", "hunyuan", "hunyuan-one-expert"]
CONFIGS += ["exaone", "exaone-groups", "solar", "solar-one-expert", "lfm2", "lfm2-biased"]
CONFIGS += ["mistral4", "mistral4-groups", "laguna", "laguna-elements", "gemma4"]
CONFIGS += ["gemma4-own-values"]
CONFIGS += ["glm4v", "glm4v-dense-first"]
CONFIGS += ["v32", "v32-all-experts", "glm-dsa", "glm-dsa-one-indexer"]
CONFIGS += ["deepseek-v4", "deepseek-v4-heavy"]
CONFIGS += ["mimo", "mimo-wide-values", "kimi-linear", "kimi-linear-full-first"]
CONFIGS += ["granite-hybrid", "granite-hybrid-rope", "nemotron", "nemotron-alone"]
CONFIGS += ["nemotron-latent", "glm5-next", "glm5-next-shared", "glm5-next-all-experts"]
CONFIGS += ["qwen4", "qwen4-two-tables", "kimi-k2", "kimi-k25", "kimi-k25-one-expert"]
CONFIGS += ["qwen2", "qwen2-window", "qwen3", "qwen3-sparse-step", "qwen3-window"]
GREEDY = SamplingOptions(temperature=0)


def pulled(name: str, folder: Path, count: int) -> tuple[Settings, Manifest, list[int], list[int]]:
    """Pull a tiny float32 model; return it with a prompt and transformers' continuation."""
    save_tiny(name, folder / "checkpoint", seed=3, dtype=torch.float32)
    byte_tokenizer().save(str(folder / "checkpoint" / "tokenizer.json"))
    settings = Settings(folder / "home")
    manifest = pull(folder / "checkpoint", settings, "tiny:f32")
    model = tiny_reference(name, seed=3)
    prompt = [(7 * i + 3) % model.config.get_text_config().vocab_size for i in range(23)]
    expected = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, eos_token_id=None
    )[0, len(prompt) :].tolist()
    return settings, manifest, prompt, expected


@pytest.mark.parametrize("name", by_default(CONFIGS))
def test_float32_equals_transformers_token_for_token(name: str, tmp_path: Path) -> None:
    settings, manifest, prompt, expected = pulled(name, tmp_path, 30)
    for memory in ("100%", str(manifest.slots.min_bytes)):
        config = EngineConfig(memory=parse_memory(memory))
        folder = Library(settings).folder(manifest.model)
        with Engine.open(manifest, folder, config, settings) as engine:
            assert engine.info.placement.kv_bytes == manifest.kv_bytes(engine.info.context) > 0
            endless(engine)
            answer = answering(engine, prompt, 30)
            list(answer)
            assert answer.tokens == expected
