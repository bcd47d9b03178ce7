r"""Name the regular expressions that cut a text into words before byte-level BPE.

A GGUF file has only a name, `tokenizer.ggml.pre`. The names are those of llama.cpp's
`src/llama-vocab.cpp`. The expressions are those of the models' own tokenizer.json. llama.cpp
approximates some of them: combining marks (`\p{M}`) are no part of a word in `gpt-4o`, `tekken` and
`kimi-k2`, case does not cut a word in `kimi-k2`, and spaces beyond ASCII match no range in
`deepseek-llm` and `deepseek-coder`. Those of `laguna` are llama.cpp's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeinf.runtime.text.tiktoken import KIMI_WORDS

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
# Letters with case, as DeepSeek's tokenizer.json lists them: first and last of each range.
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386"
    " 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba"
    " 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57"
    " 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb"
    " 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d"
    " 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3"
    " a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a"
    " ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df"
    " 1e900-1e943"
)
_ASIAN = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_HAN_KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_MARKS = (
    r"[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+"  # ASCII, wide
)


def _class_of(ranges: str) -> str:
    """Return the regular expression of one character in ranges of hexadecimal numbers."""
    parts = (part.split("-") for part in ranges.split())
    return "[" + "".join("-".join(f"\\x{{{end}}}" for end in ends) for ends in parts) + "]"


_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Words:
    """The steps from a text to the words in which BPE merges.

    patterns: each cuts the pieces that the ones before it left.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # if tokenizer.ggml.add_bos_token is missing
    raw: bool = False  # SentencePiece's space and <0x0A> for bytes, in place of byte-level letters


_DIGITS, _THREE, _LINES = r"\p{N}", r"\p{N}{1,3}", r"[^\n]+|\n+"
_DIGITS_FIRST = Words((_DIGITS, _GPT2))
_PLAIN = Words((_GPT2,))
_V3 = Words((_THREE, _HAN_KANA, _DEEPSEEK3))
_NAMES: dict[str, Words] = {
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4": _PLAIN,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Words(
        (_LLAMA3,), whole_words=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": Words((_LLAMA3,)),
    "glm4 glm5": Words((_LLAMA3,), whole_words=True),
    "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2": Words((_QWEN2,)),
    "qwen35": Words((_QWEN35,)),
    "deepseek-llm": Words(
        (r"[\r\n]", rf"\s?{_class_of(_CASED)}+", rf"\s?{_MARKS}", r"\s+$", _ASIAN, r"\p{N}+")
    ),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGITS)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _V3,
    "falcon": Words((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _DIGITS_FIRST,
    "tekken": Words((_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": Words((_GPT4O,)),
    "kimi-k2": Words((KIMI_WORDS,)),
    "exaone-moe": Words((_EXAONE_MOE,)),
    "laguna": Words((_LINES, _QWEN2)),
    "bailingmoe bailingmoe2 llada-moe": Words(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "gemma4": Words((_LINES,), adds_bos=True, raw=True),
    "sarvam-moe": Words((_LINES,), raw=True),
}
WORDS = {name: words for names, words in _NAMES.items() for name in names.split()}
