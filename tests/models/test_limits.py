"""The tiny models with a limited SwiGLU reach its limit, so that their logits depend on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moeinf.models.layers.ffn import GatedMlp, LimitedMlp
from moeinf.models.layers.moe import ResidentExperts
from tests.models.conftest import Pair


@pytest.mark.parametrize("which", ["routed", "shared"])
@pytest.mark.parametrize("name", ["deepseek-v4", "glm5-next"])
def test_without_the_limit_logits_differ(
    name: str, which: str, make_pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(name)
    model, experts = pair.ours.model, pair.ours.experts
    if which == "routed":
        experts = ResidentExperts(experts._weights, "swiglu")
    else:
        monkeypatch.setattr(LimitedMlp, "__call__", GatedMlp.__call__)
    found = model.extend([(pair.ids, model.new_state(60))], experts, "all")
    assert float((found - pair.logits).abs().max()) > 10 * pair.tolerance()
