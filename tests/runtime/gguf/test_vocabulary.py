"""Tokenizers made from GGUF metadata against the original tokenizers; hostile metadata.

`scripts/check_vocabularies.py` compares every name of a pre-tokenizer with llama.cpp itself.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.gguf.tokens import ignored_ids
from moeinf.runtime.gguf.vocabulary import tokenizer_files
from moeinf.runtime.gguf.word_patterns import WORDS
from moeinf.runtime.text.tokenizer import Tokenizer as Ours
from moeinf.runtime.text.tokenizer import end_tokens
from moeinf.runtime.text.tokenizer_trial import Trial
from tests.random_texts import random_texts

COUNTS = [2000, pytest.param(10_000, marks=pytest.mark.full)]
CONTROL, USER, UNUSED, BYTE = 3, 4, 5, 6


def metadata_of(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes for a tokenizer."""
    document = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    added = {t["content"]: CONTROL if t["special"] else USER for t in document["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    found = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [
            added.get(token, BYTE if token.startswith("<0x") else 1) for token in tokens
        ],
        "merges": [" ".join(pair) for pair in document["model"]["merges"]],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (found | more).items()}


def byte_level(pattern: str | None) -> Tokenizer:
    """Train the original: byte-level BPE whose words `pattern`, or GPT-2's own, cuts."""
    tokenizer = Tokenizer(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(random_texts(3, 3000), trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "   "])
    return tokenizer


def gemma() -> Tokenizer:
    """Train the original of `gemma4`: BPE on raw text, bytes for unknown characters."""
    bare = GemmaTokenizer()._tokenizer
    letters = [chr(code) for code in range(0x21, 0x7F)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=special, initial_alphabet=letters, limit_alphabet=300,
        show_progress=False,
    )  # fmt: skip
    texts = [text.replace("\n", " ") for text in random_texts(3, 3000)]
    bare.train_from_iterator(texts, trainer)
    model = json.loads(bare.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return GemmaTokenizer(vocab=model["vocab"], merges=merges)._tokenizer


def made_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"].decode())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("pre", "pattern"), [("gpt-2", None), ("olmo", None), ("qwen2", QWEN2), ("qwen35", QWEN35)]
)
def test_byte_level_ids_are_those_of_the_original(
    pre: str, pattern: str | None, count: int
) -> None:
    original = byte_level(pattern)
    ours = made_of(metadata_of(original, pre=pre))
    for text in [*random_texts(5, count), "a<think>b    c<|im_end|>d"]:
        ids = ours.encode(text).ids
        assert ids == original.encode(text).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("count", COUNTS)
def test_raw_ids_are_those_of_gemma(count: int) -> None:
    original = gemma()
    ours = made_of(metadata_of(original, model="gemma4"))
    for text in random_texts(5, count):
        ids = ours.encode(text).ids
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("prefix", [True, False])
def test_ids_of_scores_are_those_of_sentencepiece(prefix: bool, count: int) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the reference is not installed")
    model, texts = io.BytesIO(), random_texts(3, 3000)
    lines = ["".join(c for c in text if c < "\u0530") for text in texts]  # the rest becomes bytes
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2,
        vocab_size=2500, model_type="bpe", byte_fallback=True, character_coverage=1.0,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=prefix, user_defined_symbols=["<|user|>"],
    )  # fmt: skip
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(reference.vocab_size())
    kinds = [
        CONTROL if reference.is_control(i) else BYTE if reference.is_byte(i)
        else 2 if reference.is_unknown(i) else 1 for i in ids
    ]  # fmt: skip
    kinds[reference.piece_to_id("<|user|>")] = USER
    found = {
        "model": "llama",
        "pre": "default",
        "tokens": [reference.id_to_piece(i) for i in ids],
        "scores": [reference.get_score(i) for i in ids],
        "token_type": kinds,
        "add_space_prefix": prefix,
    }
    ours = made_of({f"tokenizer.ggml.{key}": value for key, value in found.items()})
    ours.encode_special_tokens = True
    for text in random_texts(5, count):
        assert ours.encode(text, add_special_tokens=False).ids == reference.encode(text), text


TEXT = "He'S DON'T camelCase 12345 x²! (=+) 日本語です हिन्दी\n\n  a\r\n ///\n"
WORDS_OF_TEXT = {
    "default": "He|'|S| DON|'|T| camelCase| |123|45| x|²|!| |(=+)"
    "| 日本語です| ह|ि|न|्|द|ी|\n\n | a|\r\n |///|\n",
    "gpt-2": "He|'|S| DON|'|T| camelCase| 12345| x|²|!| (=+)"
    "| 日本語です| ह|ि|न|्|द|ी|\n\n | a|\r\n| ///|\n",
    "llama-bpe": "He|'S| DON|'T| camelCase| |123|45| x|²|!| (=+)"
    "| 日本語です| ह|िन|्द|ी\n\n| | a|\r\n| ///\n",
    "qwen2": "He|'S| DON|'T| camelCase| |1|2|3|4|5| x|²|!| (=+)"
    "| 日本語です| ह|िन|्द|ी\n\n| | a|\r\n| ///\n",
    "qwen35": "He|'S| DON|'T| camelCase| |1|2|3|4|5| x|²|!| (=+)"
    "| 日本語です| हिन्दी|\n\n| | a|\r\n| ///\n",
    "deepseek-llm": "He|'|S| DON|'|T| camelCase| |12345| x|²|!| (=+)"
    "| |日本語です| |हिन्दी|\n|\n| | a|\r|\n| ///|\n",
    "deepseek-coder": "He|'|S| DON|'|T| camelCase| |1|2|3|4|5| x|²|!| (|=+|)"
    "| |日本語です| |ह|ि|न|्|द|ी|\n|\n| | a|\r|\n| ///|\n",
    "deepseek-v3": "He|'S| DON|'T| camelCase| |123|45| x|²|!| (=+)"
    "| |日本語です| हिन्दी|\n\n| | a|\r\n| ///\n",
    "refact": "He|'|S| DON|'|T| camelCase| |1|2|3|4|5| x|²|!| (=+)"
    "| 日本語です| ह|ि|न|्|द|ी|\n\n | a|\r\n| ///|\n",
    "tekken": "He|'S| DON|'T| camel|Case| |1|2|3|4|5| x|²|!| (=+)"
    "| 日本語です| हिन्दी|\n\n| | a|\r\n| ///\n",
    "gpt-4o": "He'S| DON'T| camel|Case| |123|45| x|²|!| (=+)"
    "| 日本語です| हिन्दी|\n\n| | a|\r\n| ///\n",
    "kimi-k2": "He'S| DON'T| camel|Case| |123|45| x|²|!| (=+)"
    "| |日本語|です| हिन्दी|\n\n| | a|\r\n| ///\n",
    "bailingmoe2": "He|'S| DON|'T| camelCase| |1|2|3|4|5| x|²|!| (=+)"
    "| 日本語です| ह|िन|्द|ी\n\n| | a|\r\n| ///\n",
    "falcon": "He|'|S| DON|'|T| camelCase| |123|45| x|²|!| |(=+)"
    "| 日本語です| ह|ि|न|्|द|ी|\n\n | a|\r\n |///|\n",
}


def words_of(pre: str, text: str) -> list[str]:
    """Return the words that a name of a pre-tokenizer cuts a text into."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    kept = {"tokens": sorted(letters), "token_type": [1] * len(letters), "merges": []}
    metadata = {"model": "gpt2", "pre": pre} | kept
    ours = made_of({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert ours.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in ours.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", WORDS_OF_TEXT)
def test_words_of_a_hard_text(pre: str) -> None:
    assert "|".join(words_of(pre, TEXT)) == WORDS_OF_TEXT[pre]


def test_every_pattern_takes_linear_time(tmp_path: Path) -> None:
    """The trial refuses a tokenizer whose time grows with the square of a text."""
    original = metadata_of(byte_level(None))
    different = {words: name for name, words in WORDS.items()}
    with Trial() as trial:
        for name in different.values():
            path = tmp_path / f"{name}.json"
            metadata = original | {"tokenizer.ggml.pre": name}
            path.write_bytes(tokenizer_files(metadata)["tokenizer.json"])
            trial.of_file(path)


TOKENS = {
    "<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, "<|im_end|>": 1, "<|end|>": CONTROL,
    "<think>": USER, "[PAD7]": UNUSED, "": UNUSED, "a": 1, "b": 1, "ab": 1, "Ġ": 1, "\u2581": 1,
    "<0x0A>": BYTE,
}  # fmt: skip


def small(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a tiny vocabulary; None removes a key."""
    found = {
        "model": "gpt2", "pre": "qwen2", "tokens": list(TOKENS), "merges": ["a b"],
        "token_type": list(TOKENS.values()), "scores": [-float(n) for n in range(len(TOKENS))],
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    found |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def folder_of(metadata: dict[str, Any], folder: Path) -> Path:
    for name, data in tokenizer_files(metadata).items():
        (folder / name).write_bytes(data)
    return folder


def test_the_files_of_a_model(tmp_path: Path) -> None:
    more = {"tokenizer.chat_template": "{{ bos_token }}", "tokenizer.chat_template.tool_use": "no"}
    metadata = small(add_bos_token=True, padding_token_id=7, unknown_token_id=0) | more
    ours = Ours(folder_of(metadata, tmp_path))
    assert ours.encode_text("ab<s><think>") == [1, 10, 1, 5]
    assert ours.encode_text("[PAD7]") == [1]  # unused: its letters are unknown
    assert ours.chat_template == "{{ bos_token }}"
    assert set(ours.special_tokens) == {"<unk>", "<s>", "</s>", "<|im_end|>", "<|end|>"}
    assert ours.decode([10, 5, 11, 1]) == "ab<think> "
    assert end_tokens(tmp_path, ours) == {2, 3, 4}
    about = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (about["pad_token"], about["unk_token"]) == ("[EMPTY_7]", "<unk>")


def test_a_users_text_cannot_end_a_turn_that_a_file_marks_as_text(tmp_path: Path) -> None:
    ours = Ours(folder_of(small(), tmp_path))
    assert 3 not in ours.encode_text("a<|im_end|>b", plain=True)
    assert 3 in ours.encode_rendered("a<|im_end|>b")


@pytest.mark.parametrize(
    ("replaced", "ends"),
    [
        ({"<think>": "<|call|>", "[PAD7]": "<|return|>"}, [2, 3, 5, 6]),  # not <|end|>
        ({"<think>": "<|tool_response>"}, [5, 3, 4]),  # not </s>
        ({"ab": "[EOS]", "a": "[", "b": "EOS]"}, [2, 3, 4]),  # a word that merges make
    ],
)
def test_which_tokens_end_an_answer(replaced: dict[str, str], ends: list[int]) -> None:
    tokens = [replaced.get(token, token) for token in TOKENS]
    merges = ["[ EOS]"] if "ab" in replaced else ["a b"]
    eos = 5 if "<|tool_response>" in tokens else 2
    files = tokenizer_files(small(tokens=tokens, merges=merges, eos_token_id=eos))
    assert json.loads(files["generation_config.json"])["eos_token_id"] == ends


def test_eot_and_eom_end_an_answer() -> None:
    files = tokenizer_files(small(eot_token_id=8, eom_token_id=9))
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2, 8, 9, 3, 4]


def test_ids_of_absent_tokens_are_ignored_where_a_file_can_do_without(tmp_path: Path) -> None:
    absent = {"eot_token_id": 14, "padding_token_id": 4294967295, "unknown_token_id": -1}
    files = tokenizer_files(small(**absent))
    assert files == tokenizer_files(small())
    assert ignored_ids(small(**absent)) == [
        f"tokenizer.ggml.{key} {n}" for key, n in absent.items()
    ]


def test_scores_have_llama_cpps_defaults(tmp_path: Path) -> None:
    metadata = small(model="llama", pre=None, bos_token_id=None, eos_token_id=None)
    ours = Ours(folder_of(metadata, tmp_path))
    assert ours.encode_text("ab") == [1, 12, 10]  # begin token, space, ab
    assert (ours.bos, ours.eos) == ("<s>", "</s>")
    assert ours.decode([12, 10]) == "ab"


def test_spaces_after_phi_3s_special_tokens_belong_to_them() -> None:
    for name, expected in (("Phi-3 mini", [4, 12, 8]), ("Other", [4, 12, 12, 8])):
        metadata = small(model="llama") | {"general.name": name}
        assert made_of(metadata).encode("<|end|> a", add_special_tokens=False).ids == expected


HOSTILE = {
    "model": [None, "bert", "t5", 7, ["gpt2"]],
    "pre": [None, "", "never-seen", 7],
    "tokens": [
        None, [], "abc", ["a"] * 14, [7] * 14, [b"a"], [*list(TOKENS)[:-1], "a" * (1 << 24)],
        list(TOKENS)[:-1],
    ],
    "token_type": [None, [1], ["1"] * 14, [True] * 14, [1.0] * 14],
    "merges": [
        None, ["ab"], ["a c"], ["a  b"], ["a b", 7], ["b a"], ["a b c"], [""], [" "], ["a "], "a b",
    ],
    "bos_token_id": [-1, 14, 1 << 63, "1", 1.0, True, [1]],
    "eos_token_id": [14],
    "eot_token_id": ["14"],
    "padding_token_id": [1.5],
    "add_bos_token": [1, "true"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in HOSTILE.items() for value in values]
)
def test_damaged_metadata_is_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.ggml\.\w+") as error:
        tokenizer_files(small(**{key: value}))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "scores", [None, [0.0], ["a"] * 14, [float("nan")] * 14, [float("inf")] * 14, [1e300] * 14]
)
def test_damaged_scores_are_refused(scores: object) -> None:
    with pytest.raises(BadCheckpoint, match="scores"):
        tokenizer_files(small(model="llama", scores=scores))


def test_a_piece_too_long_to_split_is_refused() -> None:
    tokens = [*list(TOKENS)[:-1], "a" * 600]
    with pytest.raises(BadCheckpoint, match="tokens"):
        tokenizer_files(small(model="llama", tokens=tokens))


def test_an_unknown_pre_tokenizer_is_refused_by_its_name() -> None:
    with pytest.raises(BadCheckpoint, match="'never-seen' is unknown"):
        tokenizer_files(small(pre="never-seen"))


def test_a_template_that_is_no_text_is_refused() -> None:
    for template in (7, ["a"], "a" * ((4 << 20) + 1)):
        with pytest.raises(BadCheckpoint, match="chat_template"):
            tokenizer_files(small() | {"tokenizer.chat_template": template})


def test_a_begin_token_that_is_wanted_but_unnamed_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="add_bos_token"):
        tokenizer_files(small(bos_token_id=None, add_bos_token=True))
