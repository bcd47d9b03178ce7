"""Encoder-decoders from checkpoint to tokens: shards, slots, and the reference's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from moeinf.runtime.checkpoints.torch_bin import open_folder
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.seq2seq import BadLanguage, Languages, converse
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.names import parse_name
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import endless, pull
from tests.encoder_decoders import pair_reference, save_pair

GREEDY = SamplingOptions(temperature=0)
TEXT = "Fill <extra_id_0> in"
_SIZES = {"vocab_size": 300}


def checkpoint(name: str, folder: Path, **settings: Any) -> None:
    """Write a tiny checkpoint with a byte tokenizer and one sentinel."""
    save_pair(name, folder, seed=3, **_SIZES, **settings)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<extra_id_0>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, dict[str, Manifest]]:
    folder = tmp_path_factory.mktemp("switch")
    checkpoint("switch", folder / "checkpoint", eos_token_id=None)
    settings = Settings(folder / "home")
    tags = ("f32", "bf16", "q8")
    return settings, {tag: pull(folder / "checkpoint", settings, f"tiny:{tag}") for tag in tags}


def answer_of(settings: Settings, manifest: Manifest, memory: str, text: str = TEXT) -> list[int]:
    config = EngineConfig(memory=parse_memory(memory))
    with Engine.open(
        manifest, Library(settings).folder(manifest.model), config, settings
    ) as engine:
        answer = converse(engine).ask(text, GREEDY, Limits(30))
        list(answer)
        return answer.tokens


def test_float32_equals_transformers_token_for_token(
    switch: tuple[Settings, dict[str, Manifest]],
) -> None:
    settings, manifests = switch
    manifest = manifests["f32"]
    assert (manifest.layers, manifest.encoder_layers) == (4, 2)
    reference = pair_reference("switch", seed=3, eos_token_id=None, **_SIZES)
    with Engine.open(
        manifest, Library(settings).folder(manifest.model), EngineConfig(), settings
    ) as engine:
        source = engine.tokenizer.encode_text(TEXT)
        assert engine.tokenizer.token_id("<extra_id_0>") in source
    expected = reference.generate(torch.tensor([source]), do_sample=False, max_new_tokens=30)
    for memory in ("100%", str(manifest.slots.min_bytes)):
        assert answer_of(settings, manifest, memory) == expected[0, 1:].tolist()


@pytest.mark.parametrize("tag", ["bf16", "q8"])
def test_memory_does_not_matter(switch: tuple[Settings, dict[str, Manifest]], tag: str) -> None:
    settings, manifests = switch
    manifest = manifests[tag]
    answers = [answer_of(settings, manifest, m) for m in ("100%", str(manifest.slots.min_bytes))]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 30


def test_requests_stand_alone_and_are_traced(
    switch: tuple[Settings, dict[str, Manifest]],
) -> None:
    """The second answer equals the one without the first.

    The EAMs count the encoder's rows in prefill.
    """
    settings, manifests = switch
    manifest = manifests["f32"]
    alone = answer_of(settings, manifest, "100%", "Another text")
    folder = Library(settings).folder(manifest.model)
    with Engine.open(manifest, folder, EngineConfig(), settings) as engine:
        recording = engine.record("two")
        requests = converse(engine)
        list(requests.ask(TEXT, GREEDY, Limits(5)))
        second = requests.ask("Another text", GREEDY, Limits(30))
        list(second)
    assert second.tokens == alone
    assert second.prompt_tokens == len("Another text")
    assert [m.content for m in requests.messages] == ["Another text", second.text]
    assert recording.shape.encoder_layers == 2
    assert [p.phase for p in recording.passes[:3]] == ["encode", "prefill", "decode"]
    eam = recording.request_eams()[second.request]
    assert eam.prefill.sum(1).tolist() == [12, 12, 1, 1]
    assert eam.decode.sum(1).tolist() == [0, 0, 29, 29]


def test_languages_are_refused(switch: tuple[Settings, dict[str, Manifest]]) -> None:
    settings, manifests = switch
    manifest = manifests["f32"]
    folder = Library(settings).folder(manifest.model)
    with (
        Engine.open(manifest, folder, EngineConfig(), settings) as engine,
        pytest.raises(BadLanguage, match="does not translate"),
    ):
        converse(engine, languages=Languages(target="fra_Latn"))


@pytest.fixture(scope="module")
def nllb(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, dict[str, Manifest]]:
    """Pull nllb in its published form.

    It has `.bin` files, and names without the prefix that transformers saves.
    """
    folder = tmp_path_factory.mktemp("nllb")
    model = save_pair("nllb", folder / "checkpoint", seed=3, eos_token_id=None, **_SIZES)
    (folder / "checkpoint/model.safetensors").unlink()
    state = {name.removeprefix("model."): t for name, t in model.state_dict().items()}
    torch.save(state, folder / "checkpoint/pytorch_model.bin")
    tokenizer = byte_tokenizer()
    codes = ["eng_Latn", "fra_Latn", "</s>"]
    tokenizer.add_special_tokens([AddedToken(code, special=True) for code in codes])
    tokenizer.save(str(folder / "checkpoint/tokenizer.json"))
    (folder / "checkpoint/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    settings = Settings(folder / "home")
    source = LocalSource(open_folder(folder / "checkpoint"), "tiny")
    made = {
        tag: repack(source, Library(settings), parse_name(f"tiny:{tag}"), _ignore, _ignore)
        for tag in ("f32", "q8")
    }
    return settings, made


def _ignore(*_: object) -> None: ...


def test_a_translation_begins_with_the_language(
    nllb: tuple[Settings, dict[str, Manifest]],
) -> None:
    settings, manifests = nllb
    manifest = manifests["f32"]
    reference = pair_reference("nllb", seed=3, eos_token_id=None, **_SIZES)
    folder = Library(settings).folder(manifest.model)
    for memory in ("100%", str(manifest.slots.min_bytes)):
        config = EngineConfig(memory=parse_memory(memory))
        with Engine.open(manifest, folder, config, settings) as engine:
            endless(engine)
            answer = converse(engine, languages=Languages(target="fra_Latn")).ask(
                "Hello <extra>", GREEDY, Limits(25)
            )
            list(answer)
            token = engine.tokenizer.token_id
            source = [token("eng_Latn"), *engine.tokenizer.encode_text("Hello <extra>")]
            source.append(token("</s>"))
            french = token("fra_Latn")
        assert answer.prompt_tokens == len(source)
        expected = reference.generate(
            torch.tensor([source]), do_sample=False, max_new_tokens=26, forced_bos_token_id=french
        )[0].tolist()
        assert expected[:2] == [2, french]
        assert answer.tokens == expected[2:]


def test_quantised_memory_does_not_matter(nllb: tuple[Settings, dict[str, Manifest]]) -> None:
    settings, manifests = nllb
    manifest = manifests["q8"]
    folder, answers = Library(settings).folder(manifest.model), []
    for memory in ("100%", str(manifest.slots.min_bytes)):
        config = EngineConfig(memory=parse_memory(memory))
        with Engine.open(manifest, folder, config, settings) as engine:
            endless(engine)
            requests = converse(engine, languages=Languages("fra_Latn", "eng_Latn"))
            answer = requests.ask("Bonjour", GREEDY, Limits(20))
            list(answer)
            answers.append(answer.tokens)
    assert len(answers[0]) == 20
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("languages", "problem"),
    [
        (Languages(), "--tgt fra_Latn"),
        (Languages(target="fra_Latin"), "nearest: fra_Latn"),
        (Languages("</s>", "fra_Latn"), "'</s>' is not a language"),
    ],
)
def test_unknown_languages(
    nllb: tuple[Settings, dict[str, Manifest]], languages: Languages, problem: str
) -> None:
    settings, manifests = nllb
    manifest = manifests["f32"]
    folder = Library(settings).folder(manifest.model)
    with (
        Engine.open(manifest, folder, EngineConfig(), settings) as engine,
        pytest.raises(BadLanguage, match=problem),
    ):
        converse(engine, languages=languages)


def test_a_long_source_reads_each_expert_once(
    switch: tuple[Settings, dict[str, Manifest]],
) -> None:
    """A source longer than a chunk of a prompt is one pass: same bits, each expert once at most."""
    settings, manifests = switch
    manifest, found = manifests["bf16"], []
    source = [(37 * place + place // 7) % 97 for place in range(PREFILL_CHUNK + 150)]
    slots = manifest.slots
    all_but_one = slots.max_bytes - slots.slot_bytes  # with all, they are read ahead
    for memory in map(str, (all_but_one, slots.min_bytes)):
        config = EngineConfig(memory=parse_memory(memory), policy="lru", trace=False)
        folder = Library(settings).folder(manifest.model)
        with Engine.open(manifest, folder, config, settings) as engine:
            state = engine.new_state()
            assert len(source) <= engine.info.context
            for _ in range(2):  # the second finds the experts of the last layers
                before = engine.store.stats.loads
                engine.encode(state, source)
                read = engine.store.stats.loads - before
                found.append((read, engine.extend(state, [0]).tobytes()))
    (used, bits), again, *short = found
    assert again == (0, bits)
    encoder = manifest.encoder_layers * manifest.experts
    assert used <= encoder
    for read, others in short:
        assert others == bits
        assert 0 < read <= used
