"""Test recurrent memory: delta rule and Mamba2 by tokens, marks to return to, failed passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moeinf.models.families import FAMILIES
from moeinf.models.layers.delta_net import Rule, delta_rule
from moeinf.models.layers.kimi_delta import channel_rule
from moeinf.models.layers.mamba2 import state_space
from moeinf.models.layers.recurrent import RecurrentLayout, RecurrentMemory
from moeinf.runtime.checkpoints.inventory import WantedParts
from tests.fakes import WatchedExperts, from_tensors, load_resident
from tests.tiny import TINY, published_config, save_tiny, tiny_reference

LAYOUT = RecurrentLayout(layers=2, shapes=((3,), (2, 2)))
CPU = torch.device("cpu")


@pytest.mark.parametrize("rule", [delta_rule, channel_rule])
def test_many_tokens_at_once_equal_one_after_the_other(rule: Rule) -> None:
    """37 tokens are three systems of the channel rule. Both rules write in place, too."""
    torch.manual_seed(3)
    channels = 5 if rule is channel_rule else 1
    n, heads = 37, 3
    q, k, v = (torch.randn(n, heads, width) for width in (5, 5, 7))
    k = k / k.norm(dim=-1, keepdim=True)
    decay, rate = -torch.rand(n, heads, channels) * 2, torch.rand(n, heads)
    start = torch.randn(heads, 5, 7)
    s, expected = start.clone(), []
    for t in range(n):  # the rule of the paper
        s = s * decay[t].exp()[..., None]
        told = torch.einsum("hkv,hk->hv", s, k[t])
        s = s + torch.einsum("hk,hv->hkv", k[t], rate[t][:, None] * (v[t] - told))
        expected.append(torch.einsum("hkv,hk->hv", s, q[t]))
    given = decay if rule is channel_rule else decay[..., 0]
    out, after = rule(q, k, v, given, rate, start, torch.empty_like(start))
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, s, rtol=1e-4, atol=1e-4)
    single = start.clone()
    for t in range(n):  # in place
        row = slice(t, t + 1)
        out, single = rule(q[row], k[row], v[row], given[row], rate[row], single, single)
        torch.testing.assert_close(out[0], expected[t], rtol=1e-4, atol=1e-4)
    again = start.clone()
    out, after = rule(q, k, v, given, rate, again, again)
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, s, rtol=1e-4, atol=1e-4)


def test_many_tokens_of_mamba_equal_one_after_the_other() -> None:
    """Six heads in two groups; the last result is also written into its own argument."""
    torch.manual_seed(4)
    n, heads = 37, 6
    x, b, c = torch.randn(n, heads, 5), torch.randn(n, 2, 7), torch.randn(n, 2, 7)
    step = torch.rand(n, heads)
    decay = -2 * step * torch.rand(heads)
    start = torch.randn(heads, 5, 7)
    s, expected = start.clone(), []
    for t in range(n):  # the definition, with B and C repeated for each head
        wide, read = b[t].repeat_interleave(3, 0), c[t].repeat_interleave(3, 0)
        fed = step[t][:, None] * x[t]
        s = s * decay[t].exp()[:, None, None] + torch.einsum("hp,hn->hpn", fed, wide)
        expected.append(torch.einsum("hpn,hn->hp", s, read))
    out, after = state_space(x, b, c, decay, step, start, torch.empty_like(start))
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, s, rtol=1e-4, atol=1e-4)
    single = start.clone()
    for t in range(n):  # in place
        row = slice(t, t + 1)
        out, single = state_space(x[row], b[row], c[row], decay[row], step[row], single, single)
        torch.testing.assert_close(out[0], expected[t], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rule", "shape"), [(delta_rule, (40, 1)), (channel_rule, (40, 1, 2))])
def test_a_fast_decay_does_not_overflow(rule: Rule, shape: tuple[int, ...]) -> None:
    """exp(G_i - G_j) for j > i would be e^3000."""
    n = 40
    q = k = torch.ones(n, 1, 2) / 2**0.5
    out, s = rule(
        q, k, torch.ones(n, 1, 1), torch.full(shape, -80.0), torch.ones(n, 1),
        torch.zeros(1, 2, 1), torch.empty(1, 2, 1),
    )  # fmt: skip
    torch.testing.assert_close(out, torch.ones(n, 1, 1))
    assert s.isfinite().all()
    one = torch.ones(n, 1, 1)
    out, s = state_space(one, one, one, one[..., 0] * -80, one[..., 0], s[:, :1], s[:, :1])
    torch.testing.assert_close(out, one)
    assert s.isfinite().all()


def write(memory: RecurrentMemory, past: int, count: int) -> None:
    """Write a pass whose state holds its end, and whose mark its own place, in tokens."""
    memory.begin(past, count)
    at = next((tokens for tokens in range(past + count) if memory.is_mark(tokens)), None)
    for layer in range(2):
        assert all((old == past).all() for old in memory.read(layer, past))
        if at is not None:
            memory.mark(layer, [torch.full(shape, float(at)) for shape in LAYOUT.shapes])
        for tensor in memory.next(layer):
            tensor[:] = past + count
    memory.commit()


def test_the_last_tokens_of_a_pass_can_be_left_out() -> None:
    """Each token adds its number to the state; the steps of accepted tokens are repeated."""
    memory = RecurrentMemory(LAYOUT, CPU)
    write(memory, 0, 7)

    def add(layer: int, past: int, value: float) -> None:
        for old, new in zip(memory.read(layer, past), memory.next(layer), strict=True):
            new.copy_(old + value)

    memory.begin(7, 1)
    memory.keep_steps()
    for layer in range(2):
        for place, value in enumerate((1.0, 20.0, 300.0)):
            memory.run(7 + place, partial(add, layer, 7 + place, value))
    assert {float(x) for t in memory.next(0) for x in t.flatten()} == {328.0}
    memory.repeat(2)
    memory.commit()
    assert held(memory, 9) == {28.0}


def held(memory: RecurrentMemory, length: int) -> set[float]:
    memory.begin(length, 1)
    return {float(x) for layer in range(2) for t in memory.read(layer, length) for x in t.flatten()}


def test_going_back_reaches_the_last_mark_before() -> None:
    memory = RecurrentMemory(LAYOUT, CPU)
    write(memory, 0, 512)  # mark at 448
    write(memory, 512, 100)  # at 576
    for past in range(612, 640):
        write(memory, past, 1)  # no mark
    write(memory, 640, 10)  # mark at 640, the state before the pass
    copy = memory.copy()
    for tokens, reached in ((649, 640), (640, 640), (639, 576), (500, 448), (447, 0)):
        assert memory.rewind(tokens) == reached
        assert held(memory, reached) == {float(reached)}
    assert copy.rewind(645) == 640
    assert held(copy, 640) == {640.0}


def test_only_so_many_marks_are_kept_and_the_latest() -> None:
    memory = RecurrentMemory(LAYOUT, CPU)
    for turn in range(6):
        write(memory, turn * 80, 80)
    assert memory.copy().rewind(479) == 464
    assert memory.copy().rewind(463) == 384
    assert memory.copy().rewind(383) == 304
    assert memory.rewind(303) == 0


def test_a_pass_that_fails_leaves_everything_as_it_was() -> None:
    memory = RecurrentMemory(LAYOUT, CPU)
    write(memory, 0, 100)
    memory.begin(100, 50)
    for tensor in memory.next(0):
        tensor[:] = -1.0
    assert held(memory, 100) == {100.0}


LONG = ["qwen3.5", "qwen3.5-full-first", "kimi-linear", "nemotron", "deepseek-v4", "qwen4"]
LONG_TOO = ["granite-hybrid", "glm5-next", "lfm2", "qwen3-next"]


def test_every_family_with_such_a_memory_is_here() -> None:
    def remembers(name: str) -> bool:
        family, values = FAMILIES[TINY[name].family], published_config(name)
        return family.build(family.parse(values), WantedParts()).state_bytes > 0

    with_memory = {TINY[name].family for name in TINY if remembers(name)}
    assert with_memory == {TINY[name].family for name in (*LONG, *LONG_TOO)}


@pytest.mark.parametrize(
    "name", [*LONG, *(pytest.param(name, marks=pytest.mark.full) for name in LONG_TOO)]
)
def test_long_texts_and_what_is_left_of_them(name: str, tmp_path: Path) -> None:
    """Several chunks in a pass, a return, another end: the same result as in one pass."""
    reference = save_tiny(TINY[name].but(max_position_embeddings=512), tmp_path)
    ours = load_resident(tmp_path)
    ids = torch.randint(97, (300,), generator=torch.Generator().manual_seed(5)).tolist()
    other = ids[:170] + [(i + 1) % 97 for i in ids[170:260]]
    state = ours.model.new_state(512)
    ours.model.extend([(ids[:200], state)], ours.experts)
    for token in ids[200:210]:
        ours.model.extend([([token], state)], ours.experts)
    ours.model.extend([(ids[210:], state)], ours.experts)
    before = state.snapshot()
    state.truncate(170)
    assert state.length == 128
    for kept, text in ((state, other), (before, [*ids, 5])):
        start = kept.length
        logits = ours.model.extend([(text[start:], kept)], ours.experts, "all")
        with torch.no_grad():
            expected = reference(torch.tensor([text]), use_cache=False).logits[0, start:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_a_layer_that_fails_forgets_nothing(make_pair: Callable[[str], Any]) -> None:
    pair = make_pair("qwen3.5")
    model, experts = pair.ours.model, WatchedExperts(pair.ours.experts, fail_in=2)
    state = model.new_state(60)
    model.extend([(pair.ids[:20], state)], pair.ours.experts)
    for tokens in (pair.ids[20:30], pair.ids[20:21]):
        with pytest.raises(RuntimeError, match="the experts are gone"):
            model.extend([(tokens, state)], experts)
        assert state.length == 20
    pair.assert_close(model.extend([(pair.ids[20:25], state)], pair.ours.experts, "all"), 20)


def test_its_size_does_not_depend_on_the_text(make_pair: Callable[[str], Any]) -> None:
    model = make_pair("qwen3.5").ours.model
    channels = 2 * 2 * 6 + 4 * 10
    assert model.state_bytes == 5 * 3 * 4 * (3 * channels + 4 * 6 * 10)
    assert make_pair("qwen3").ours.model.state_bytes == 0


def test_the_text_part_of_a_model_that_also_sees() -> None:
    """The published form: fused experts, names one level deeper, a vision part, an MTP layer."""
    reference = tiny_reference("qwen3.5")
    named = {n: p.detach() for n, p in reference.named_parameters()}
    inner = {n.replace("model.", "model.language_model.", 1): p for n, p in named.items()}
    aside = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(3, 1)}
    aside["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.ones(6, 36, 36)
    text = reference.config.to_dict()
    text.pop("tie_word_embeddings")
    values = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 1}}
    ours = from_tensors(values, inner | aside)
    assert ours.unused == set()
    ids = list(range(40))
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    logits = ours.model.extend([(ids, ours.model.new_state(40))], ours.experts, "all")
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
