"""Parse model names: name[:tag] or org/name[:tag], and the folder name that they map to."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moeinf.errors import InvalidInput

KEPT_TAGS = ("mxfp4", "nvfp4")  # only of checkpoints that have this format
TAGS = ("q2", "q3", "q4", "q4k", "q4d8", "q5k", "q6k", "q8", *KEPT_TAGS, "bf16", "f32")
DEFAULT_TAG = "q4"
LEAST_BITS, MOST_BITS = 2.5, 8.5  # of a tag b<bits>, such as b3.5
DEMO = "demo"  # the model in the package
DEMO_EXAMPLES = ("17+25=", "sort dog, cat, cow", "spell ollama")
_NATIVE_MXFP4 = {  # as published, by organisation
    "openai": ("gpt-oss", "gpt-oss-20b", "gpt-oss-120b"),
    "deepseek-ai": ("deepseek-v4-flash", "deepseek-v4-flash-284b", "deepseek-v4-pro"),
}
_DEFAULT_TAGS = {
    DEMO: "bf16",  # it is small, and bf16 is the trained format
    **{
        name: "mxfp4"
        for owner, names in _NATIVE_MXFP4.items()
        for short in names
        for name in (short, f"{owner}--{short}")
    },
}
_MOST_CHARACTERS = 512  # of a name, also as a page's address
_PART = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,94}[a-z0-9])?")
_RESERVED = {"con", "prn", "aux", "nul"}  # device names on other systems
_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_HUB_END = re.compile(r"(?:/tree/main)?/?(?=:|$)")  # of a page's address
_LATEST = "latest"
_BITS_TAG = re.compile(r"b(\d(?:\.\d{1,2})?)")
_QUANT = re.compile(r"(?:ud-)?i?q\d(?:_[a-z0-9]++)*+|mxfp4_moe|f16|fp16|tq\d_0")  # of a GGUF file
# Ollama writes a model's size as its tag; the short name here.
_OLLAMA = {
    "gpt-oss:20b": "gpt-oss",
    "gpt-oss:120b": "gpt-oss-120b",
    "gemma4:26b": "gemma-4-26b-a4b",
    "gemma4:26b-a4b": "gemma-4-26b-a4b",
    "gemma4:26b-a4b-it": "gemma-4-26b-a4b",
    "gemma4:26b-a4b-it-qat": "gemma-4-26b-a4b-qat",
    "mixtral:8x7b": "mixtral",
    "mixtral:8x22b": "mixtral-8x22b",
    "qwen3:30b": "qwen3-30b-a3b",
    "qwen3:30b-a3b": "qwen3-30b-a3b",
    "qwen3:30b-instruct": "qwen3-30b-a3b-2507",
    "qwen3:30b-a3b-instruct-2507": "qwen3-30b-a3b-2507",
    "qwen3:30b-thinking": "qwen3-30b-a3b-thinking",
    "qwen3:30b-a3b-thinking-2507": "qwen3-30b-a3b-thinking",
    "qwen3:235b": "qwen3-235b-a22b",
    "qwen3:235b-a22b": "qwen3-235b-a22b",
    "qwen3:235b-instruct": "qwen3-235b-a22b-2507",
    "qwen3:235b-a22b-instruct-2507": "qwen3-235b-a22b-2507",
    "qwen3:235b-thinking": "qwen3-235b-a22b-thinking",
    "qwen3:235b-a22b-thinking-2507": "qwen3-235b-a22b-thinking",
    "qwen3-coder:30b": "qwen3-coder-30b-a3b",
    "qwen3-coder:30b-a3b": "qwen3-coder-30b-a3b",
    "qwen3-coder:480b": "qwen3-coder-480b-a35b",
    "qwen3-coder:480b-a35b": "qwen3-coder-480b-a35b",
    "qwen3-next:80b": "qwen3-next-80b-a3b",
    "qwen3-next:80b-a3b-instruct": "qwen3-next-80b-a3b",
    "qwen3-next:80b-a3b-thinking": "qwen3-next-80b-a3b-thinking",
    "qwen3.5:35b": "qwen3.5-35b-a3b",
    "qwen3.5:122b": "qwen3.5-122b-a10b",
    "qwen3.5:122b-a10b": "qwen3.5-122b-a10b",
    "qwen3.5:397b": "qwen3.5-397b-a17b",
    "qwen3.5:397b-a17b": "qwen3.5-397b-a17b",
    "qwen3.5:35b-a3b": "qwen3.5-35b-a3b",
    "qwen3.6:35b": "qwen3.6-35b-a3b",
    "qwen3.6:35b-a3b": "qwen3.6-35b-a3b",
    "deepseek-v2:16b": "deepseek-v2-lite",
    "deepseek-v2:236b": "deepseek-v2",
    "deepseek-v3:671b": "deepseek-v3",
    "deepseek-v3.1:671b": "deepseek-v3.1",
    "deepseek-v3.1:671b-terminus": "deepseek-v3.1-terminus",
    "deepseek-r1:671b": "deepseek-r1",
    "granite3.1-moe:1b": "granite-3.1-1b-a400m",
    "granite3.1-moe:3b": "granite-3.1-3b-a800m",
    "granite4:tiny-h": "granite-4.0-h-tiny",
    "granite4:7b-a1b-h": "granite-4.0-h-tiny",
    "granite4:small-h": "granite-4.0-h-small",
    "granite4:32b-a9b-h": "granite-4.0-h-small",
    "nemotron-3-nano:30b": "nemotron-3-nano-30b-a3b",
    "nemotron-3-nano:30b-a3b": "nemotron-3-nano-30b-a3b",
    "nemotron-3-super:120b": "nemotron-3-super-120b-a12b",
    "nemotron-3-super:120b-a12b": "nemotron-3-super-120b-a12b",
    "kimi-k2:1t": "kimi-k2",
    "kimi-linear:48b": "kimi-linear-48b-a3b",
}
_OLLAMA_UNSIZED = ("glm-4.7-flash", "qwen3-coder-next")  # with tags of bits alone
_OLLAMA_CLOUD = re.compile(r"(?:.*-)?cloud")
_OLLAMA_BITS = {"q4_k_m": "", "q8_0": ":q8", "fp16": ":bf16", "bf16": ":bf16"}
OLLAMA = "ollama:"  # before the name of a model in Ollama's store
MACHINE_STATE = "devices.json"  # in state/, beside the folders of models


def bits_tag(bits: float) -> str:
    """Return the tag of a model with this mean of bits per weight, such as b3.5."""
    return f"b{bits:g}"


def bits_of_tag(tag: str) -> float | None:
    """Return the mean of bits per weight of a tag such as b3.5; None for other tags."""
    found = _BITS_TAG.fullmatch(tag)
    bits = float(found[1]) if found else 0.0
    return bits if LEAST_BITS <= bits <= MOST_BITS and bits_tag(bits) == tag else None


def is_tag(text: str) -> bool:
    return text in TAGS or bits_of_tag(text) is not None


class BadName(InvalidInput, ValueError):
    """A text is not a model name, or its tag is unknown."""

    code = "bad_name"
    hint = "`moeinf list`, which shows the names on this machine"


@dataclass(frozen=True, order=True)
class ModelName:
    """name:tag in lower case. The hub id org/name is stored as org--name."""

    name: str
    tag: str

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


def is_path(text: str) -> bool:
    """Return True if MODEL is the path of a local checkpoint, or ollama:NAME, which has one."""
    return text in (".", "..", "~") or text.startswith(("./", "../", "/", "~/", OLLAMA))


def default_tag(name: str) -> str:
    """Return the tag of a name without a tag."""
    return _DEFAULT_TAGS.get(name, DEFAULT_TAG)


def plain(text: str) -> str:
    """Return another spelling of a model as `name[:tag]` or `org/name[:tag]`, in its case.

    These are the hub's addresses (hf.co/org/name, https://huggingface.co/org/name), Ollama's tag
    `latest`, and its tags for sizes (gpt-oss:20b), for bits (glm-4.7-flash:q8_0) and for both
    (qwen3:30b-a3b-q8_0).
    """
    text = text.strip()
    if address := _HUB.match(text):
        text = _HUB_END.sub("", text[address.end() :], count=1)
    if text.lower().endswith(f":{_LATEST}"):
        text = text[: -len(_LATEST) - 1]
    size, _, bits = text.lower().rpartition("-")
    if size in _OLLAMA and bits in _OLLAMA_BITS:
        return _OLLAMA[size] + _OLLAMA_BITS[bits]
    name, _, bits = text.lower().partition(":")
    if name in _OLLAMA_UNSIZED and bits in _OLLAMA_BITS:
        return name + _OLLAMA_BITS[bits]
    return _OLLAMA.get(text.lower(), text)


def split_quant(text: str) -> tuple[str, str | None]:
    """Split `org/name-gguf:QUANT`, a quantisation in a repository of GGUF files, into two.

    Other names, also those with a tag of ours, have no second part.
    """
    whole, colon, quant = plain(text).rpartition(":")
    wanted = colon and quant.lower() not in TAGS and _QUANT.fullmatch(quant.lower())
    return (whole, quant) if wanted and "gguf" in whole.lower() else (text, None)


def parse_name(text: str) -> ModelName:
    """Parse `name[:tag]` or `org/name[:tag]`, in any spelling of `plain`. Raises BadName.

    The quantisation of a GGUF file becomes part of the name: org/name-gguf:Q8_0 is
    org--name-gguf-q8_0.
    """
    if len(text) > _MOST_CHARACTERS:
        words = f"is not a model name: it has more than {_MOST_CHARACTERS} characters"
        raise BadName(f"{text[:80]!r}… {words}")
    whole, quant = split_quant(text)
    if quant is not None:
        text = f"{whole}-{quant}"
    whole, colon, tag = plain(text).lower().partition(":")
    parts = whole.split("/")
    fine = len(parts) <= 2 and all(
        _PART.fullmatch(p) and p not in _RESERVED and ".." not in p and "--" not in p for p in parts
    )
    if len(parts) == 1 and "--" in whole:  # the stored form of a hub id, as `list` prints it
        fine = all(_PART.fullmatch(p) for p in whole.split("--")) and ".." not in whole
        fine = fine and whole.count("--") == 1
    if not fine or "/" in tag:
        raise BadName(
            f"{text!r} is not a model name: letters, digits, '.', '_' and '-', "
            "as name[:tag] or org/name[:tag]"
        )
    if _OLLAMA_CLOUD.fullmatch(tag):
        raise BadName(
            f"{text!r}: the tag {tag!r} is invalid: such a model runs on Ollama's servers only "
            f"(expected a model that runs here, such as {text[: -len('-cloud')]})"
        )
    if colon and not is_tag(tag):
        raise BadName(
            f"{text!r}: the tag {tag!r} is invalid (expected {', '.join(TAGS)}, or b2.5 … b8.5)"
        )
    name = "--".join(parts)
    if name == MACHINE_STATE:
        raise BadName(f"{text!r} is not a model name: moeinf has a file of that name")
    return ModelName(name, tag or default_tag(name))


def check_not_demo(name: ModelName) -> None:
    """Raise BadName for the name of the model in the package."""
    if name.name == DEMO:
        error = BadName(f"{DEMO} is the model inside the package; no other model takes its name")
        error.hint = "another name; `moeinf pull` takes it as --name NAME"
        raise error


def expand(text: str) -> Path:
    """Return an absolute path. See in_home."""
    return in_home(text).absolute()


def in_home(text: str) -> Path:
    """Return a path with its ~ replaced; the ~ stays where its home is unknown, as in a shell."""
    with suppress(RuntimeError):
        return Path(text).expanduser()
    return Path(text)
