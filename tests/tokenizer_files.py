"""Small tokenizer.json files: valid ones, and a generated corpus of hostile ones."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = [chr(b) for b in BYTES] + [chr(0x100 + n) for n in range(256 - len(BYTES))]
WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def token(number: int, content: str, **about: Any) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **plain, **about}


def document(**parts: Any) -> dict[str, Any]:
    """Return a byte-level tokenizer with two special tokens; `parts` replace its parts."""
    found: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token(256, "<s>"), token(257, "</s>")],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": {c: n for n, c in enumerate(LETTERS)}, "merges": [],
        },
    }  # fmt: skip
    return {**found, **parts}


def unigram(**about: Any) -> dict[str, Any]:
    vocabulary = [["<unk>", 0.0], ["<s>", 0.0], *([c, -float(n)] for n, c in enumerate(LETTERS, 1))]
    return document(
        added_tokens=[token(0, "<unk>"), token(1, "<s>")],
        pre_tokenizer=None,
        decoder=None,
        model={"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False} | about,
    )


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False
    }  # fmt: skip


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(key: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def template(*single: Any, **special: list[int]) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": list(single),
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": ids, "tokens": [name]} for name, ids in special.items()
        },
    }


def good() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield valid files."""
    yield "byte-level", document()
    yield (
        "words",
        document(
            pre_tokenizer=sequence("pretokenizers", split(WORDS), document()["pre_tokenizer"])
        ),
    )
    yield "unigram", unigram()
    yield "lower", document(normalizer={"type": "Lowercase"})
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    yield "begins", document(post_processor=template(begin, text, **{"<s>": [256]}))
    yield "cut", document(truncation=truncation(3), padding=padding(40))


def truncation(length: int, stride: int = 0, **about: Any) -> dict[str, Any]:
    return {
        "direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": stride
    } | about  # fmt: skip


def padding(length: int, multiple: int | None = None) -> dict[str, Any]:
    return {
        "strategy": {"Fixed": length}, "direction": "Right", "pad_to_multiple_of": multiple,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip


PATTERNS = (
    "(a+)+$", "(a*)*b", "(a|aa)+$", "(.*)*x", "(x+x+)+y", "([a-zA-Z]+)*$", "(a|a?)+$",
    "^(a?){40}a{40}", r"(\s+)+$", r"(\s*\s*)*x", r"\s+$", "a+$", "a*a*a*a*$", r"(?=(a+))a*b\1",
    r"(\w+\s?)*$", "(((((a*)*)*)*)*)*b", "(", "[", "a{100000}", "(a{1000}){1000}", "(?<=a+)b",
    "\\", "", "(?R)", "(" * 5000 + ")" * 5000, r"\p{L", "|".join(["a" * 50] * 2000),
    r"(?<n>a\g<n>?b|a)+$",
)  # fmt: skip
CHARSMAPS = (
    b"", b"\0", b"\1\0\0\0", b"\xff\xff\xff\xff", b"\4\0\0\0\0\0\0\0", b"\4\0\0\0abcd",
    b"\0\4\0\0" + b"\xff" * 1024 + b"abc", b"\0\4\0\0" + bytes(range(256)) * 4, b"\0" * 5000,
    b"\0\0\0\1" + bytes(64),
)  # fmt: skip
UNIGRAMS: tuple[dict[str, Any], ...] = (
    {"unk_id": 1 << 40}, {"unk_id": None}, {"vocab": []}, {"vocab": [["", 0.0]]},
    {"vocab": [["a", 1e308], ["aa", -1e308]]}, {"byte_fallback": True},
)  # fmt: skip
BPES: tuple[dict[str, Any], ...] = (
    {"merges": [["a", "nothing"]]}, {"merges": ["a"]}, {"vocab": {}}, {"dropout": 7.0},
    {"unk_token": "nothing"}, {"continuing_subword_prefix": "aaaa"}, {"vocab": {"a": 1 << 40}},
    {"continuing_subword_prefix": "##", "merges": [["a", "b"]]}, {"end_of_word_suffix": "</w>"},
    {"vocab": {"a" * (1 << 20): 0}}, {"vocab": {"a": (1 << 32) - 1}},
)  # fmt: skip


def hostile() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield files that can make the library panic, abort or run without end."""
    for number, pattern in enumerate(PATTERNS):
        yield f"split {pattern[:20]}", document(pre_tokenizer=split(pattern))
        if number % 4 == 0:
            yield f"replace {pattern[:20]}", document(normalizer=replace({"Regex": pattern}, "y"))
    for behavior in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        yield f"empty {behavior}", document(pre_tokenizer=split("", behavior))
    yield "fixed length 0", document(pre_tokenizer={"type": "FixedLength", "length": 0})
    yield "replace nothing", document(normalizer=replace({"String": ""}, "x"))
    yield "replace nothing by much", document(normalizer=replace({"String": ""}, "x" * 1000))
    yield "replace by much", document(normalizer=replace({"String": "QXZ"}, "x" * (1 << 20)))
    grows = [replace({"String": "a"}, "aa")] * 40
    yield "doubles", document(normalizer=sequence("normalizers", *grows))
    yield "doubles what is decoded", document(decoder=sequence("decoders", *grows))
    yield "prepends much", document(normalizer={"type": "Prepend", "prepend": "x" * (1 << 20)})
    deep: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(400):
        deep = sequence("normalizers", deep)
    yield "deep", document(normalizer=deep)
    for name, text in {
        "none": {"Sequence": {"id": "B", "type_id": 0}},
        "unknown": {"SpecialToken": {"id": "<nowhere>", "type_id": 0}},
    }.items():
        yield f"template {name}", document(post_processor=template(text))
    yield (
        "template as text",
        document(post_processor={"type": "TemplateProcessing", "single": "[$B]"}),
    )
    around = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 50_000
    yield "template of many", document(post_processor=template(*around, **{"<s>": [256]}))
    yield "template of ids", document(post_processor=template(around[0], **{"<s>": [256] * 50_000}))
    for direction in ("Left", "Right"):
        for stride in (2, 3, 100):
            cut = truncation(2, stride, direction=direction)
            yield f"stride {stride} {direction}", document(truncation=cut)
    yield "truncated to nothing", document(truncation=truncation(0))
    yield "padded much", document(padding=padding(1 << 40))
    yield "padded to multiples", document(padding=padding(3, 0))
    for start, stop in ((5, 0), (0, 5), (3, 3), (1 << 40, 0), (1 << 63, 1 << 63)):
        strip = {"type": "Strip", "content": "a", "start": start, "stop": stop}
        yield f"strip {start} {stop}", document(decoder=strip)
        yield (
            f"strip bytes {start} {stop}",
            document(decoder=sequence("decoders", {"type": "ByteFallback"}, strip)),
        )
    for data in CHARSMAPS:
        charsmap = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
        yield f"charsmap {data[:6].hex()}", document(normalizer=charsmap)
    for about in UNIGRAMS:
        yield f"unigram {str(about)[:30]}", unigram(**about)
    model = document()["model"]
    for about in BPES:
        yield f"bpe {str(about)[:30]}", document(model=model | about)
    yield (
        "word level",
        document(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}),
    )
    for prefix, most in (("##", 0), ("", 1 << 60)):
        yield f"word piece {most}", document(
            model={
                "type": "WordPiece", "vocab": {"a": 0}, "unk_token": "none",
                "continuing_subword_prefix": prefix, "max_input_chars_per_word": most,
            }
        )  # fmt: skip
    yield "empty special", document(added_tokens=[token(256, "")])
    yield "spaces", document(added_tokens=[token(256, " ", lstrip=True, rstrip=True)])
    yield "huge special", document(added_tokens=[token(256, "x" * (1 << 16))])
    yield "far special", document(added_tokens=[token(1 << 31, "<s>")])
    yield "many specials", document(added_tokens=[token(256 + n, f"<{n}>") for n in range(20_000)])
    yield (
        "metaspace",
        document(
            pre_tokenizer={
                "type": "Metaspace",
                "replacement": "",
                "prepend_scheme": "always",
                "split": True,
            }
        ),
    )
    yield "no model", {"version": "1.0"}
