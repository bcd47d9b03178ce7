"""The chat template and the tool calls of each family's published models.

A reason stands where the published models have none. A new family fails until it is here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.runtime.text import tool_call_texts as calls


@dataclass(frozen=True)
class Formats:
    """How a family's models speak.

    template: its name in TEMPLATES of test_chat_templates.py. calls: a template of
    tool_call_texts.py, whose texts are those calls. no_template, no_calls: the reason for
    their absence.
    """

    template: str = ""
    calls: str = ""
    no_template: str = ""
    no_calls: str = ""


_CHATML = Formats("chatml", calls.TAGS)
_CODER = Formats("chatml", calls.CODER)
_GLM = Formats("glm", calls.TAGS)
_KIMI = Formats("kimi", calls.KIMI)
_MODE = "an encoder-decoder has no chat"
FORMATS: dict[str, Formats] = {
    "arctic": Formats(
        "chatml",
        no_calls="the template of snowflake-arctic-instruct (tokenizer_config.json) has no tools",
    ),
    "deepseek_v2": Formats(
        "spoken",
        no_calls="the template of DeepSeek-V2-Lite-Chat (tokenizer_config.json) has no tools",
    ),
    "deepseek_v3": Formats("deepseek 3", calls.DEEPSEEK),
    "deepseek_v32": Formats("deepseek 3.2", calls.V32),
    "deepseek_v4": Formats("deepseek 4", calls.V4),
    "dots1": Formats(
        "dots",
        no_calls="the template has the roles system, user and assistant only (llama.cpp, vLLM)",
    ),
    "ernie4_5_moe": Formats("spoken", calls.TAGS),  # ERNIE-4.5-21B-A3B-Thinking (vLLM's docs)
    "exaone_moe": Formats("roles", calls.TAGS),
    "gemma4": Formats("gemma", calls.GEMMA),
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM,
    "glm4v_moe": _GLM,
    "glm5_next": _GLM,
    "glm_moe_dsa": _GLM,
    "gpt_oss": Formats("harmony", calls.HARMONY),
    "granitemoe": Formats("granite", calls.GRANITE),
    "granitemoehybrid": Formats("granite 4", calls.TAGS),
    "granitemoeshared": Formats(
        no_template="only base models are published", no_calls="only base models are published"
    ),
    "hunyuan_v1_moe": Formats("hunyuan", calls.HUNYUAN),  # vLLM's docs
    "kimi_k2": _KIMI,
    "kimi_k25": _KIMI,
    "kimi_linear": _KIMI,
    "laguna": _GLM,
    "lfm2_moe": Formats("lfm2", calls.LFM2),
    "mimo_v2_flash": _CODER,
    "minimax_m2": Formats("minimax", calls.MINIMAX),
    "mistral4": Formats("mistral 3", calls.MISTRAL_NAMED),
    "mixtral": Formats("instruct", calls.MISTRAL),
    "nemotron_h": Formats("nemotron", calls.CODER),
    "nllb-moe": Formats(no_template=_MODE, no_calls=_MODE),
    "olmoe": Formats(
        "roles",
        no_calls="the template of OLMo-7B-SFT (tokenizer_config.json) has no tools",
    ),
    "phimoe": Formats(
        "roles", no_calls="the template of Phi-3.5 has the roles system, user and assistant only"
    ),
    "qwen2_moe": Formats(
        "chatml",
        no_calls="the template of Qwen1.5-MoE is ChatML without tools, which came with Qwen2.5",
    ),
    "qwen3_5_moe": _CODER,
    "qwen3_moe": _CHATML,
    "qwen3_next": _CHATML,
    "qwen4_exp": _CODER,
    "solar_open": Formats("solar", calls.SOLAR),
    "switch_transformers": Formats(no_template=_MODE, no_calls=_MODE),
}
