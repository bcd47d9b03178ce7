"""The metadata of a GGUF file that a model is exported to: what it is, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeinf.runtime.checkpoints.checkpoint import read_json
from moeinf.runtime.gguf.writing.description import Written
from moeinf.runtime.gguf.writing.vocabulary import vocabulary
from moeinf.runtime.gguf.writing.writer import Value
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.text.tokenizer import TOKENIZER, Tokenizer, end_tokens

FILE_TYPES = {  # of llama.cpp; K types are mixed there (Q4_K_M)
    "F32": 0,
    "Q4": 2,
    "Q8": 7,
    "Q4K": 15,
    "Q5K": 17,
    "Q6K": 18,
    "BF16": 32,
    "MXFP4": 38,
    "NVFP4": 39,
}
_HUB = "hub:"


def general_keys(manifest: Manifest, about: Written) -> dict[str, Value]:
    """Return the keys of the model, with the architecture's name in front of its own."""
    keys: dict[str, Value] = {
        "general.architecture": about.architecture,
        "general.type": "model",
        "general.name": manifest.name,
        "general.quantization_version": 2,
        "general.file_type": FILE_TYPES[manifest.dtype],
    }
    if manifest.source.startswith(_HUB) and manifest.source.count("/") == 1:
        repository = manifest.source.removeprefix(_HUB)
        organisation, name = repository.split("/")
        keys |= {
            "general.base_model.count": 1,
            "general.base_model.0.name": name,
            "general.base_model.0.organization": organisation,
            "general.base_model.0.repo_url": f"https://huggingface.co/{repository}",
        }
    return keys | {f"{about.architecture}.{name}": value for name, value in about.keys.items()}


def tokenizer_keys(folder: Path, about: Written) -> dict[str, Value]:
    """Return the keys of the tokenizer, its special tokens and the chat template."""
    tokenizer, count = Tokenizer(folder), about.keys["vocab_size"]
    assert isinstance(count, int)
    keys = vocabulary(read_json(folder / TOKENIZER), count, about.architecture)
    bos = tokenizer.token_id(tokenizer.bos) if tokenizer.bos else None
    eos = tokenizer.token_id(tokenizer.eos) if tokenizer.eos else None
    ends = sorted(end for end in end_tokens(folder, tokenizer) - {eos} if end < count)
    if eos is None and ends:
        eos = ends.pop(0)
    found = {"bos": bos, "eos": eos, "eot": ends[0] if ends else None, **_others(folder, tokenizer)}
    keys |= {f"tokenizer.ggml.{n}_token_id": i for n, i in found.items() if i is not None}
    keys["tokenizer.ggml.add_bos_token"] = bos is not None and tokenizer.encode_text("a")[:1] == [
        bos
    ]
    if tokenizer.chat_template is not None:
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    return keys


def _others(folder: Path, tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the padding and the unknown token that tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    about: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    found: dict[str, int | None] = {}
    for key, name in (("pad_token", "padding"), ("unk_token", "unknown")):
        token = about.get(key)
        token = token.get("content") if isinstance(token, Mapping) else token
        found[name] = tokenizer.token_id(token) if isinstance(token, str) else None
    return found
