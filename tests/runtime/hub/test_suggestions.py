"""Names of dense models, near names, and models that fit a machine."""

from __future__ import annotations

import pytest

from moeinf.runtime.hub.aliases import registry
from moeinf.runtime.hub.suggestions import fitting, is_dense, matching, nearest

DENSE = (
    "llama3 llama3:8b Llama3.2:3b llama-3.1 mistral mistral-nemo gemma3:27b phi4 phi-4 qwen2.5:7b "
    "qwen2.5-coder:32b qwen3:8b qwen3:0.6b qwen3:32b deepseek-r1:7b deepseek-r1:70b smollm2:135m"
).split()
NOT_DENSE = (
    "demo mixtral mixtral:8x7b qwen3:30b qwen3:30b-a3b qwen3:235b-a22b deepseek-r1:671b "
    "gpt-oss:20b phi-3.5-moe llamas mistral4 gemma4:26b my-llama3 org/llama3"
).split()


@pytest.mark.parametrize("name", DENSE)
def test_dense_names(name: str) -> None:
    assert is_dense(name)


@pytest.mark.parametrize("name", NOT_DENSE)
def test_other_names(name: str) -> None:
    assert not is_dense(name)


def test_no_short_name_is_dense() -> None:
    names = [n for entry in registry().values() for n in (entry.name, *entry.aliases)]
    assert [name for name in names if is_dense(name)] == []


def test_near_names() -> None:
    assert nearest("mixtra")[0] == "mixtral"
    assert nearest("Org/gptoss:20b")[0] == "gpt-oss"
    assert nearest("zzzz") == []
    assert len(nearest("qwen3")) <= 3


def test_what_fits_comes_first_and_is_large() -> None:
    one, two = fitting(16 << 30)
    assert one.family != two.family
    assert two.disk_bytes <= one.disk_bytes <= 16 << 30
    larger = [e for e in registry().values() if one.disk_bytes < e.disk_bytes <= 16 << 30]
    assert larger == []
    smallest = fitting(0)
    assert smallest[0].name == "granite-3.1-1b-a400m"
    assert len(smallest) == 2


def test_words() -> None:
    assert [entry.name for entry in matching("GPT")] == ["gpt-oss", "gpt-oss-120b"]
    assert len(matching("")) == len(registry())
    assert matching("zzz") == []
    oss = matching("gpt-oss")[0]
    assert oss.download_bytes == pytest.approx(oss.disk_bytes, rel=0.01)  # kept as published
