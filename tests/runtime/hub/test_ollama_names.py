"""Names as Ollama publishes them lead to the same model, with the bits that their tag names."""

from __future__ import annotations

import pytest

from moeinf.runtime.hub.aliases import entry_of
from moeinf.runtime.names import BadName, parse_name


@pytest.mark.parametrize(
    ("typed", "repo", "tag"),
    [
        ("gpt-oss:20b", "openai/gpt-oss-20b", "mxfp4"),
        ("gpt-oss:120b", "openai/gpt-oss-120b", "mxfp4"),
        ("qwen3:30b-a3b", "Qwen/Qwen3-30B-A3B", "q4"),
        ("qwen3:30b-a3b-q4_K_M", "Qwen/Qwen3-30B-A3B", "q4"),
        ("qwen3:30b-a3b-fp16", "Qwen/Qwen3-30B-A3B", "bf16"),
        ("qwen3:30b-a3b-instruct-2507-q8_0", "Qwen/Qwen3-30B-A3B-Instruct-2507", "q8"),
        ("qwen3:235b-thinking", "Qwen/Qwen3-235B-A22B-Thinking-2507", "q4"),
        ("qwen3-coder:30b", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "q4"),
        ("qwen3-coder:30b-a3b-q8_0", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "q8"),
        ("qwen3-coder:480b", "Qwen/Qwen3-Coder-480B-A35B-Instruct", "q4"),
        ("qwen3-coder-next:q8_0", "Qwen/Qwen3-Coder-Next", "q8"),
        ("qwen3-next:80b", "Qwen/Qwen3-Next-80B-A3B-Instruct", "q4"),
        ("qwen3-next:80b-a3b-thinking-q8_0", "Qwen/Qwen3-Next-80B-A3B-Thinking", "q8"),
        ("qwen3.5:35b", "Qwen/Qwen3.5-35B-A3B", "q4"),
        ("qwen3.5:397b-a17b", "Qwen/Qwen3.5-397B-A17B", "q4"),
        ("mixtral:8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1", "q4"),
        ("deepseek-v2:16b", "deepseek-ai/DeepSeek-V2-Lite-Chat", "q4"),
        ("deepseek-v3.1:671b", "deepseek-ai/DeepSeek-V3.1", "q4"),
        ("deepseek-v3.1:671b-terminus-q8_0", "deepseek-ai/DeepSeek-V3.1-Terminus", "q8"),
        ("deepseek-r1:671b", "deepseek-ai/DeepSeek-R1", "q4"),
        ("gemma4:26b", "google/gemma-4-26B-A4B-it", "q4"),
        ("gemma4:26b-a4b-it-q4_K_M", "google/gemma-4-26B-A4B-it", "q4"),
        ("gemma4:26b-a4b-it-q8_0", "google/gemma-4-26B-A4B-it", "q8"),
        ("gemma4:26b-a4b-it-qat", "google/gemma-4-26B-A4B-it-qat-q4_0-gguf", "q4"),
        ("deepseek-v3.2:latest", "deepseek-ai/DeepSeek-V3.2", "q4"),
        ("deepseek-v4-flash", "deepseek-ai/DeepSeek-V4-Flash", "mxfp4"),
        ("glm-5", "zai-org/GLM-5", "q4"),
        ("glm-4.7-flash", "zai-org/GLM-4.7-Flash", "q4"),
        ("glm-4.7-flash:latest", "zai-org/GLM-4.7-Flash", "q4"),
        ("glm-4.7-flash:q4_K_M", "zai-org/GLM-4.7-Flash", "q4"),
        ("glm-4.7-flash:q8_0", "zai-org/GLM-4.7-Flash", "q8"),
        ("GLM-4.7-Flash:bf16", "zai-org/GLM-4.7-Flash", "bf16"),
        ("glm-5.3-flash:latest", "zai-org/GLM-5.3-Flash", "q4"),
        ("granite4:small-h", "ibm-granite/granite-4.0-h-small", "q4"),
        ("granite4:32b-a9b-h", "ibm-granite/granite-4.0-h-small", "q4"),
        ("nemotron-3-nano:30b", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "q4"),
        ("nemotron-3-nano:30b-a3b-q8_0", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "q8"),
        ("nemotron-3-super:120b", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "q4"),
        ("minimax-m2:latest", "MiniMaxAI/MiniMax-M2", "q4"),
        ("kimi-k2:1t", "moonshotai/Kimi-K2-Instruct", "q4"),
        ("kimi-linear:48b", "moonshotai/Kimi-Linear-48B-A3B-Instruct", "q4"),
        ("qwen3.8-flash-next", "Qwen/Qwen3.8-Flash-Next", "q4"),
    ],
)
def test_ollamas_names(typed: str, repo: str, tag: str) -> None:
    entry = entry_of(typed)
    assert entry is not None
    assert (entry.repo, parse_name(typed).tag) == (repo, tag)
    assert parse_name(typed).name in (entry.name, *entry.aliases)


@pytest.mark.parametrize(
    "typed", ["gpt-oss:garbage", "gpt-oss:7b", "glm-4.7-flash:q9_0", "mixtral:q4_K_M", "x:8x7b"]
)
def test_tags_that_no_model_has(typed: str) -> None:
    tag = typed.rpartition(":")[2].lower()
    with pytest.raises(BadName, match=f"the tag '{tag}' is invalid"):
        parse_name(typed)
    assert entry_of(typed) is None


@pytest.mark.parametrize(
    ("typed", "here"), [("gpt-oss:120b-cloud", "gpt-oss:120b"), ("glm-4.6:cloud", "glm-4.6")]
)
def test_models_on_ollamas_servers(typed: str, here: str) -> None:
    with pytest.raises(BadName, match=rf"runs on Ollama's servers only .* as {here}\)"):
        parse_name(typed)
    assert entry_of(typed) is None
    assert entry_of(here) is not None
