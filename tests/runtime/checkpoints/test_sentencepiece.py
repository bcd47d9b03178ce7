"""Converted SentencePiece models against the sentencepiece library; damaged and hostile files."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint
from moeinf.runtime.checkpoints.sentencepiece import BadVocabulary, tokenizer_json
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library as Models
from moeinf.runtime.library.verify import LocalRepair, repair, verify
from moeinf.runtime.text.tokenizer import Tokenizer
from moeinf.runtime.text.tokenizer_trial import convert
from tests.conftest import ignore, pull
from tests.tiny import save_tiny

sentencepiece = pytest.importorskip("sentencepiece", reason="the reference is not installed")

WORDS = (
    "the quick brown fox jumps over lazy dogs while naïve cafés über façade sell 12 apples".split()
)
TEXTS = [
    "the quick brown fox", " two  spaces ", "", " ", "naïve café", "ﬁne ½ Ａ ™", "tabs\tand\nlines",
    "日本語 🙂🏽 z", "a", "</s> <s> <unk> <0x41>", "unknown: ж ж жж", "the" * 30, "e\u0301", "x▁y",
    "12apples",
    "  the", "the  ", "\u00a0nbsp", "<pad>the",
]  # fmt: skip
KINDS = {
    "llama": {
        "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "split_digits": True,
    },
    "bpe-without-bytes": {"model_type": "bpe"},
    "t5": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "lines": {"model_type": "unigram", "normalization_rule_name": "identity"},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False},
}  # fmt: skip


def train(kind: str) -> bytes:
    draw = random.Random(4)
    lines = [" ".join(draw.choices(WORDS, k=9)) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, character_coverage=1.0,
        vocab_size=300 if KINDS[kind].get("byte_fallback") else 48, **KINDS[kind],
    )  # fmt: skip
    return model.getvalue()


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest) -> bytes:
    return train(request.param)


def test_texts_are_cut_as_the_reference_cuts_them(model: bytes) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = Library.from_str(tokenizer_json(model, {}).decode())
    ours.encode_special_tokens = True
    draw = random.Random(9)
    random_texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(50)]
    unknown = reference.unk_id()
    for text in TEXTS + random_texts:
        ids, expected = ours.encode(text, add_special_tokens=False).ids, reference.encode(text)
        if "<" in text:  # split there, so that unknown characters are not joined across it
            ids = [i for n, i in enumerate(ids) if i != unknown or ids[n - 1 : n] != [unknown]]
        assert ids == expected, text


SPACES = ["the", "fox", " ", "  ", "\n", "\r\n", "\t", "▁", "\u00a0", "\u3000", " \n", "\n "]


def test_spaces_at_the_ends_of_lines(model: bytes) -> None:
    """Texts mix words with every kind of space: the end of a line is not the end of the text."""
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = Library.from_str(tokenizer_json(model, {}).decode())
    ours.encode_special_tokens = True
    draw = random.Random(6)
    texts = ["".join(draw.choices(SPACES, k=draw.randint(1, 9))) for _ in range(2073)]
    wrong = [
        text
        for text in texts
        if ours.encode(text, add_special_tokens=False).ids != reference.encode(text)
    ]
    assert wrong == []


def test_decoding(model: bytes) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = Library.from_str(tokenizer_json(model, {}).decode())
    for text in ("the quick brown fox", "naïve cafés"):
        ids = reference.encode(text)
        assert ours.decode(ids) == reference.decode(ids) == text


def test_what_stands_around_a_text_and_what_is_added(tmp_path: Path) -> None:
    data = train("t5")
    about = {"tokenizer_class": "T5Tokenizer", "extra_ids": 3, "eos_token": "</s>"}
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(data, about))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode_text("the fox <extra_id_0> dogs")
    assert ids[-1] == 1  # </s>
    assert tokenizer.token_id("<extra_id_2>") == 48
    assert tokenizer.token_id("<extra_id_0>") == 50
    assert 50 in ids
    llama = train("llama")
    added = {"300": {"content": "<|im_start|>", "special": True}}
    whole = Library.from_str(tokenizer_json(llama, {"added_tokens_decoder": added}).decode())
    ids = whole.encode("<|im_start|>the").ids
    assert ids[:2] == [1, 300]  # <s> and the added one
    wrong = {"999": {"content": "<x>"}}
    with pytest.raises(BadVocabulary, match="token 999 would get another id"):
        tokenizer_json(llama, {"added_tokens_decoder": wrong})


# Characters without a piece become 2, 3 or 4 bytes; also joined ones and a newline.
ALPHABET = [
    "the",
    " ",
    "\n",
    "ж",
    "日",
    "本",
    "က",
    "မ",
    "𐎀",
    "🙂",
    "👩\u200d👩\u200d👧",
    "e\u0301",
    "ü",
    "12",
]


@pytest.mark.parametrize("kind", ["llama", "unigram-bytes"])
def test_a_text_of_many_byte_tokens_streams_whole(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(train(kind), {}))
    tokenizer, draw = Tokenizer(tmp_path), random.Random(2)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randint(1, 40))) for _ in range(150)]
    for text in ["日本語日本語日本語", "🙂\n🙂\n🙂\n", "👩\u200d👩\u200d👧" * 4, *texts]:
        ids = tokenizer.encode_text(text)
        prompt = draw.randint(0, len(ids))
        while tokenizer.decode(ids[:prompt]).endswith("\ufffd"):
            prompt -= 1
        stream = tokenizer.stream(ids[:prompt])
        pieces = [stream.add(token) for token in ids[prompt:]]
        assert tokenizer.decode(ids[:prompt]) + "".join(pieces) == tokenizer.decode(ids)
        assert stream.rest() == ""


def test_a_pull_converts_and_repairs(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_tiny("mixtral", folder)
    (folder / "tokenizer.model").write_bytes(train("t5"))
    settings = Settings(tmp_path / "home")
    manifest = pull(folder, settings, "tiny:f32")
    made = Models(settings).folder(manifest.model)
    path = made / "tokenizer.json"
    before = path.read_bytes()
    assert Tokenizer(made).encode_text("the fox")
    path.unlink()
    damage = verify(made, manifest, ignore)
    assert [d.path for d in damage] == ["tokenizer.json"]
    repair(made, manifest, damage, LocalRepair(open_checkpoint(folder)), ignore)
    assert path.read_bytes() == before


def test_damaged_files_are_refused_by_name(model: bytes) -> None:
    draw = random.Random(1)
    cut = [model[: draw.randrange(len(model))] for _ in range(4)]
    flipped = []
    for _ in range(4):
        data = bytearray(model)
        data[draw.randrange(min(len(data), 4000))] ^= 1 << draw.randrange(8)
        flipped.append(bytes(data))
    refused = 0
    for data in [*cut, *flipped, b"", b"\xff" * 40, b"\x0a\xff\xff\xff\xff\xff\x7f"]:
        try:
            convert({"spiece.model": data}.get)
        except BadCheckpoint as error:
            refused += "spiece.model" in str(error)
    assert refused > 5
    assert convert({}.get) is None
