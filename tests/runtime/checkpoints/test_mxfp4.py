"""gpt-oss with MXFP4 experts, compared with transformers on the widened weights."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeinf.models.families import family_of
from moeinf.offload.format.layout import ExpertKey
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.checkpoints.quantised.fused_experts import picked_values
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.names import parse_name
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import endless, ignore, pull
from tests.generating import answering
from tests.scattered import OneByOne, split_scales
from tests.tiny import save_tiny
from tests.tiny_mxfp4 import D, E, F, save_mxfp4


@pytest.fixture(scope="module")
def model_and_checkpoint(tmp_path_factory):
    """Return transformers' model with widened weights and the folder with blocks."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = save_mxfp4(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model, folder


def tokens_of(engine, prompt, count):
    endless(engine)
    answer = answering(engine, prompt, count)
    list(answer)
    return answer.tokens


def test_widened_it_is_transformers_token_for_token(model_and_checkpoint, tmp_path):
    model, folder = model_and_checkpoint
    settings = Settings(tmp_path)
    manifest = pull(folder, settings, "tiny:f32")
    prompt = [(7 * i + 3) % 97 for i in range(23)]
    expected = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=25, eos_token_id=None
    )[0, len(prompt) :].tolist()
    config = EngineConfig(memory=parse_memory("100%"))
    with Engine.open(
        manifest, Library(settings).folder(manifest.model), config, settings
    ) as engine:
        assert tokens_of(engine, prompt, 25) == expected


def test_kept_as_it_is(model_and_checkpoint, tmp_path):
    """Experts have 4.25 bits per weight.

    The logits are the same with any memory and close to the widened reference.
    """
    model, folder = model_and_checkpoint
    settings = Settings(tmp_path)
    manifest = pull(folder, settings, "tiny:mxfp4")
    layout = manifest.expert_layouts[0]
    assert (layout.dtype, layout.activation, layout.biased) == ("MXFP4", "clamped_swiglu", True)
    assert layout.data_bytes == 2 * 2 * 544 + 4 * 544 + 2 * (2 * F + D)  # F is half a tile
    ids = [(5 * i + 1) % 97 for i in range(40)]
    found = []
    for memory in ("100%", str(manifest.slots.min_bytes)):
        config = EngineConfig(memory=parse_memory(memory), threads=1)
        with Engine.open(
            manifest, Library(settings).folder(manifest.model), config, settings
        ) as engine:
            state = engine.new_state()
            parts = [engine.model.extend([(ids[:18], state)], engine.store, "all")]
            parts += [engine.model.extend([([token], state)], engine.store) for token in ids[18:]]
            found.append(torch.cat(parts))
    assert torch.equal(*found)
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0]
    errors = (found[0] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.median() < 0.1  # 8-bit activations and dense weights may choose other experts


def test_routed_experts_are_near_float64_on_the_widened_weights(model_and_checkpoint, tmp_path):
    model, folder = model_and_checkpoint
    settings = Settings(tmp_path)
    manifest = pull(folder, settings, "tiny:mxfp4")
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(19, D, generator=draw).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=draw)[:3] for _ in x])
    weights = torch.rand(19, 3, generator=draw)
    config = EngineConfig(memory=parse_memory("100%"), threads=1)
    with Engine.open(
        manifest, Library(settings).folder(manifest.model), config, settings
    ) as engine:
        engine.store.begin_pass(torch.zeros(19, dtype=torch.int64), "prefill")
        found = engine.store.submit(0, x, ids, weights).result()
        engine.store.end_pass()
    experts, wanted = model.model.layers[0].mlp.experts, torch.zeros(19, D, dtype=torch.float64)
    for t in range(19):
        for k in range(3):
            e = ids[t, k]
            both = x[t].double() @ experts.gate_up_proj[e].double()
            both += experts.gate_up_proj_bias[e].bfloat16().double()
            gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
            middle = (up + 1) * gate / (1 + (-1.702 * gate).exp())
            out = middle @ experts.down_proj[e].double()
            wanted[t] += weights[t, k] * (out + experts.down_proj_bias[e].bfloat16().double())
    assert (found - wanted).norm() / wanted.norm() < 2e-2


def test_a_source_tensor_is_what_it_says(model_and_checkpoint):
    model, folder = model_and_checkpoint
    checkpoint = open_checkpoint(folder)
    inventory = take_inventory(family_of(checkpoint.config), checkpoint)
    assert inventory.has_mxfp4
    parts = inventory.experts[ExpertKey(1, 4)]
    experts = model.model.layers[1].mlp.experts
    assert torch.equal(picked_values(parts["gate"]), experts.gate_up_proj[4, :, ::2].T)
    assert torch.equal(picked_values(parts["up"]), experts.gate_up_proj[4, :, 1::2].T)
    assert torch.equal(picked_values(parts["down"]), experts.down_proj[4].T)
    assert torch.equal(picked_values(parts["up_bias"]), experts.gate_up_proj_bias[4, 1::2])


@pytest.mark.parametrize("tag", ["mxfp4", "q4", "bf16"])
def test_blocks_and_scales_in_different_files(model_and_checkpoint, tmp_path, tag):
    """The shards are the same when files arrive one by one; blocks wait for their scales."""
    _, folder = model_and_checkpoint
    shutil.copytree(folder, tmp_path / "four")
    split_scales(tmp_path / "four", "_scales")
    settings = Settings(tmp_path / "home")
    whole = pull(folder, settings, f"one:{tag}")
    source = OneByOne(open_checkpoint(tmp_path / "four"), "four")
    parts = repack(source, Library(settings), parse_name(f"four:{tag}"), ignore, ignore)
    assert [(f.path, f.sha256) for f in parts.files] == [(f.path, f.sha256) for f in whole.files]
    assert source.most >= 3
    assert source.here == set()


def test_a_checkpoint_without_mxfp4_has_nothing_to_keep(tmp_path):
    save_tiny("gpt-oss", tmp_path / "checkpoint")
    byte_tokenizer().save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    with pytest.raises(BadCheckpoint, match="does not store its experts as MXFP4"):
        pull(tmp_path / "checkpoint", Settings(tmp_path), "tiny:mxfp4")


def test_what_is_no_mxfp4_is_refused(model_and_checkpoint, tmp_path):
    _, folder = model_and_checkpoint
    tensors = load_file(folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())

    def inventory(changed):
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        checkpoint = open_checkpoint(tmp_path)
        return take_inventory(family_of(checkpoint.config), checkpoint)

    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(BadCheckpoint, match="not MXFP4 blocks"):
        inventory(tensors | {f"{name}_blocks": torch.zeros(E, F, D, dtype=torch.bfloat16)})
    with pytest.raises(BadCheckpoint, match="no scales of its shape"):
        inventory(tensors | {f"{name}_scales": torch.zeros(E, D, 2, dtype=torch.uint8)})
    with pytest.raises(BadCheckpoint, match="the config says"):
        inventory(
            tensors
            | {
                f"{name}_scales": torch.zeros(E, D, 2, dtype=torch.uint8),
                f"{name}_blocks": torch.zeros(E, D, 2, 16, dtype=torch.uint8),
            }
        )
