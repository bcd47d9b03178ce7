"""Suggest models by name or size, and recognise the names of dense models."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from moeinf.runtime.hub.aliases import Entry, registry

# Dense models that people ask for by their short names; MoE models of the same families differ.
_DENSE = re.compile(
    r"(llama|llama-?[23][\d.]*|codellama|tinyllama|mistral(-nemo|-small|-large)?|codestral|"
    r"gemma[23n]?|phi-?[234][\d.]*(-mini|-medium)?|qwen2?(\.5)?|qwen2\.5-coder|qwq|smollm2?|"
    r"falcon3?|yi|vicuna|starcoder2?|command-r(-plus)?|olmo-?[23]?|deepseek-(llm|coder)|"
    r"granite3\.\d(-dense)?|nemotron(-mini)?|stablelm2?|zephyr|orca2?|solar)"
)
_DENSE_SIZES = re.compile(  # Ollama's tags of dense models in families that also have MoE models
    r"(qwen3|qwen3\.5|gemma4|deepseek-r1|granite4):(\d++(\.\d++)?)(b|m)(-.*)?"
)
_MOE_SIZES = {"30b", "35b", "235b", "397b", "122b", "671b", "26b"}
_TO_CHAT = re.compile(r"(?!.*-base)(?!switch|nllb)")


def is_dense(name: str) -> bool:
    """Return whether `name[:tag]` is a dense model's short name, as Ollama or the hub spells it."""
    name = name.lower()
    sized = _DENSE_SIZES.fullmatch(name)
    if sized:
        return f"{sized[2]}{sized[4]}" not in _MOE_SIZES
    return _DENSE.fullmatch(name.partition(":")[0]) is not None


def nearest(name: str, count: int = 3) -> list[str]:
    """Return the short names that are spelled most like a name, the nearest first."""
    spellings = {
        spelling: entry.name
        for entry in registry().values()
        for spelling in (entry.name, *entry.aliases)
    }
    wanted = name.lower().partition(":")[0].rpartition("/")[2]
    near = difflib.get_close_matches(wanted, spellings, 2 * count, 0.6)
    return list(dict.fromkeys(spellings[spelling] for spelling in near))[:count]


def fitting(memory_bytes: int, count: int = 2) -> list[Entry]:
    """Return the largest models to talk to whose default tag fits in this memory, one per family.

    Where fewer fit, the smallest ones follow: their experts are read from disk.
    """
    entries = [entry for entry in registry().values() if _TO_CHAT.match(entry.name)]
    entries.sort(key=lambda entry: entry.disk_bytes)
    fit = [entry for entry in entries if entry.disk_bytes <= memory_bytes]
    families: dict[str, Entry] = {}
    for entry in (*reversed(fit), *entries[len(fit) :]):
        families.setdefault(entry.family, entry)
    return list(families.values())[:count]


def matching(word: str) -> Sequence[Entry]:
    """Return the entries whose name, alias, family or repository contains a word, by size."""
    word = word.lower()
    found = [
        entry
        for entry in registry().values()
        if any(word in t.lower() for t in (entry.name, entry.family, entry.repo, *entry.aliases))
    ]
    return sorted(found, key=lambda entry: (entry.parameters, entry.name))
