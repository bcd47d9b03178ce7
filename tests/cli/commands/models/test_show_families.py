"""Test the cache sizes of `moeinf show` for a pulled model of every family.

The numbers are counted by hand from the sizes of the tiny models. The command runs in this process,
because there are many families.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.cli.commands.models.show import show
from moeinf.models.families import FAMILIES
from moeinf.runtime.config import Settings
from moeinf.runtime.sizes import format_bytes
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.encoder_decoders import PAIRS, save_pair
from tests.tiny import by_default, save_tiny

# Values per token: layers x keys and values x heads x head size. MLA has one compressed row.
REMEMBERED = {
    "arctic": ("arctic", 2 * 2 * 2 * 8),
    "dots1": ("dots1", 3 * 2 * 2 * 12),
    "ernie4.5": ("ernie4_5_moe", 3 * 2 * 2 * 6),
    "exaone": ("exaone_moe", 3 * 2 * 2 * 12),
    "gemma4": ("gemma4", 2 * 2 * 12 + 2 * 2 * 1 * 16),  # wider heads in two layers
    "hunyuan": ("hunyuan_v1_moe", 2 * 2 * 2 * 12),
    "kimi-linear": ("kimi_linear", 1 * (20 + 8)),  # one layer of four
    "laguna": ("laguna", 3 * 2 * 2 * 12),
    "lfm2": ("lfm2_moe", 1 * 2 * 2 * 6),  # one layer of four
    "mimo": ("mimo_v2_flash", (1 + 2 + 1) * (12 + 10)),  # key heads of each layer
    "minimax-m2": ("minimax_m2", 2 * 2 * 2 * 12),
    "mistral4": ("mistral4", 3 * (20 + 8)),
    "qwen3-next": ("qwen3_next", 1 * 2 * 1 * 16),  # one layer of four
    "v32": ("deepseek_v32", 3 * (20 + 8 + 14)),  # with the indexers' keys
    "glm-dsa": ("glm_moe_dsa", 4 * (20 + 8) + 3 * 14),  # one layer of four has no indexer
    "solar": ("solar_open", 2 * 2 * 2 * 12),
    "deepseek-lite": ("deepseek_v2", 3 * (20 + 8)),
    "deepseek-v3": ("deepseek_v3", 3 * (20 + 8)),
    "deepseek-v4": ("deepseek_v4", 4 * 20 + 2 * (20 + 12) // 4 + 3),  # rounded up from 2.5
    "glm4": ("glm4_moe", 3 * 2 * 2 * 12),
    "glm4-lite": ("glm4_moe_lite", 3 * (20 + 8)),
    "glm5-next": ("glm5_next", 20 + 2 * 14),  # one layer of four, with an indexer
    "gpt-oss": ("gpt_oss", 3 * 2 * 2 * 10),
    "granite": ("granitemoe", 2 * 2 * 2 * 8),
    "granite-hybrid": ("granitemoehybrid", 1 * 2 * 2 * 8),  # one layer of four
    "granite-shared": ("granitemoeshared", 2 * 2 * 2 * 8),
    "mixtral": ("mixtral", 2 * 2 * 2 * 12),
    "nemotron": ("nemotron_h", 1 * 2 * 2 * 12),  # one layer of five
    "nllb": ("nllb-moe", 2 * 4 * 2 * 4 * 8),  # twice: for the answer, and for the source
    "olmoe": ("olmoe", 2 * 2 * 4 * 8),
    "phimoe": ("phimoe", 2 * 2 * 2 * 12),
    "phimoe-longrope": ("phimoe", 2 * 2 * 2 * 12),
    "qwen2": ("qwen2_moe", 2 * 2 * 3 * 12),
    "qwen3": ("qwen3_moe", 2 * 2 * 2 * 12),
    "qwen3.5": ("qwen3_5_moe", 1 * 2 * 1 * 16),  # one layer of four
    "qwen4": ("qwen4_exp", 1 * (2 * 1 * 16 + 8)),  # one layer of four, with an indexer
    "switch": ("switch_transformers", 2 * 4 * 2 * 3 * 10),
}
# slots x recurrent layers x (state of every head + input history of the convolution)
FIXED = {"qwen3.5": 5 * 3 * (4 * 6 * 10 + 3 * (2 * 2 * 6 + 4 * 10))}
# and of an n-gram layer: the inputs of its convolution, the last two tokens
FIXED |= {"qwen4": FIXED["qwen3.5"] + 5 * (3 * 3 * 4 * 36 + 2)}
FIXED |= {"qwen3-next": FIXED["qwen3.5"], "lfm2": 5 * 3 * 2 * 36}
FIXED |= dict.fromkeys(("kimi-linear", "glm5-next"), 5 * 3 * (4 * 6 * 6 + 3 * 3 * 4 * 6))
# vectors and gates of two windows for both compressors of two layers, and of one in a third
FIXED |= {"deepseek-v4": 5 * (2 * 8 * 4 * (20 + 12) + 8 * 2 * 20)}
FIXED |= {"granite-hybrid": 5 * 3 * (4 * 16 * 10 + 3 * (4 * 16 + 2 * 10))}
FIXED |= {"nemotron": 5 * 2 * (6 * 8 * 10 + 3 * (6 * 8 + 2 * 2 * 10))}


def test_all_families_are_here() -> None:
    known = {family.model_type for family in FAMILIES.values()}
    assert {family for family, _ in REMEMBERED.values()} == known


@pytest.mark.parametrize("name", by_default(list(REMEMBERED), least=True))
def test_kv_cache(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, home = tmp_path / "checkpoint", tmp_path / "home"
    if name in PAIRS:
        save_pair(name, folder)
    else:
        save_tiny(name, folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    monkeypatch.setenv("MOEINF_HOME", str(home))
    pull(folder, Settings(home), "tiny:f32")
    family, values = REMEMBERED[name]
    per_token, fixed = 4 * values, 4 * FIXED.get(name, 0)
    capsys.readouterr()
    show("tiny:f32", json=True)
    about = json.loads(capsys.readouterr().out)
    assert about["family"] == family
    assert (about["kv_bytes_per_token"], about["state_bytes"]) == (per_token, fixed)
    show("tiny:f32")
    whole = format_bytes(fixed + per_token * about["max_context"])
    line = f"{format_bytes(fixed)} and " if fixed else ""
    line += f"{format_bytes(per_token)} per token; {whole} for the whole context"
    lines = (text.split(":", 1) for text in capsys.readouterr().out.splitlines())
    shown = {key.strip(): value.strip() for key, value in lines}
    assert shown["KV cache"] == line
    usual = ", 64 unless --ctx asks for more" if name == "phimoe-longrope" else ""
    assert shown["context length"] == f"{about['max_context']} tokens{usual}"
    assert about["usual_context"] == (64 if usual else None)
