"""Test Phi-3.5-MoE beyond its original context, where transformers needs help with longrope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.fakes import load_resident
from tests.tiny import save_tiny

LENGTH = 100  # the original context is 64


def test_beyond_the_original_context(tmp_path: Path) -> None:
    """A state with room for more than 64 tokens rotates every token by the long factors.

    transformers 5.23 never passes the length of the text to longrope; the test does.
    """
    reference = save_tiny("phimoe-longrope", tmp_path)

    def long(config: Any) -> Any:
        return ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=LENGTH)

    ids = torch.randint(97, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        short = reference(ids, use_cache=False).logits[0]
        reference.model.rotary_emb.rope_init_fn = long
        expected = reference(ids, use_cache=False).logits[0]
    assert (short - expected).abs().max() > 0.1  # the factors matter
    loaded, tokens = load_resident(tmp_path), ids[0].tolist()
    state = loaded.model.new_state(LENGTH)
    parts = [loaded.model.extend([(tokens[:30], state)], loaded.experts, "all")]
    parts += [loaded.model.extend([(tokens[30:75], state)], loaded.experts, "all")]
    parts += [loaded.model.extend([([token], state)], loaded.experts) for token in tokens[75:]]
    error = (torch.cat(parts) - expected).abs().max()
    assert error <= 1e-4 * expected.abs().max()
