"""Find the GGUF files that Ollama, LM Studio and llama.cpp keep on this machine.

Their folders may be damaged or hostile: counts and sizes are bounded, only regular files are
opened, and a name from a manifest never becomes a path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from moeinf.errors import NotFound, UnusableInput, reason
from moeinf.runtime.bounded_json import BadJson, parse_json
from moeinf.runtime.config import OtherStores
from moeinf.runtime.files.regular import check_regular, read_regular
from moeinf.runtime.names import OLLAMA

_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_MANIFEST_BYTES, _MAX_NODES = 1 << 20, 1 << 14
_MAX_ENTRIES = 20_000  # files and folders of one store
_MAX_LISTED = 5  # names in an error


class NoSuchOllamaModel(NotFound, ValueError):
    """Ollama has no model of that name on this machine."""

    code = "ollama_model_not_found"
    hint = "`moeinf pull --list-local`"


class BadStore(UnusableInput, ValueError):
    """A model in the store of another program cannot be used."""

    code = "bad_local_store"
    hint = "`ollama pull` of the same model, which writes it again"


@dataclass(frozen=True)
class LocalModel:
    """A GGUF file of another program.

    name: to type after `moeinf pull`, as it is. path: the first part of a split file; None if
    there is a problem, which `problem` names. size_bytes: of all parts.
    """

    store: str
    name: str
    size_bytes: int = 0
    path: Path | None = None
    problem: str = ""


def local_models(stores: OtherStores) -> list[LocalModel]:
    """Return the models of all stores: Ollama's by name, then the others by path."""
    found = [model for root in stores.ollama for model in _of_ollama(root)]
    for store, roots, depth in (
        ("lm-studio", stores.lm_studio, 3),
        ("llama.cpp", stores.llama_cpp, 1),
    ):
        found += [model for root in roots for model in _of_files(store, root, depth)]
    return found


def ollama_model(name: str, stores: OtherStores) -> Path:
    """Return the GGUF file of a model of Ollama: NAME[:TAG], NAMESPACE/NAME or HOST/….

    Raises NoSuchOllamaModel, and BadStore if the model's manifest or its file cannot be used.
    """
    wanted = name.removeprefix(OLLAMA)
    wanted = f"{OLLAMA}{wanted}" if ":" in wanted.rpartition("/")[2] else f"{OLLAMA}{wanted}:{_TAG}"
    models = [model for root in stores.ollama for model in _of_ollama(root)]
    for model in models:
        if model.name.lower() == wanted.lower():
            if model.path is None:
                raise BadStore(f"{model.name}: {model.problem}")
            return model.path
    names = ", ".join(model.name for model in models[:_MAX_LISTED])
    more = ", …" if len(models) > _MAX_LISTED else ""
    here = f"; it has {names}{more}" if names else "; it has no models"
    raise NoSuchOllamaModel(f"{wanted[:200]} is not in Ollama's store{here}")


def ollama_name(name: str) -> str:
    """Return the name that a model of Ollama gets here: NAME, or NAME-TAG."""
    base, _, tag = name.removeprefix(OLLAMA).rpartition("/")[2].partition(":")
    return base if tag in ("", _TAG) else f"{base}-{tag}"


def _of_ollama(root: Path) -> Iterator[LocalModel]:
    """Yield the models of manifests/HOST/NAMESPACE/NAME/TAG."""
    for parts, path in _files(root / "manifests", 4):
        host, namespace, name, tag = parts
        kept = [] if host == _REGISTRY else [host, namespace]
        if host == _REGISTRY and namespace != _NAMESPACE:
            kept = [namespace]
        typed = f"{OLLAMA}{'/'.join([*kept, name])}:{tag}"
        try:
            blob = _blob(root, path)
            if blob is not None:
                yield LocalModel("ollama", typed, _size(blob), blob)
        except BadJson as error:
            yield LocalModel("ollama", typed, problem=f"its manifest {error}")
        except OSError as error:
            yield LocalModel("ollama", typed, problem=reason(error))
        except ValueError as error:
            yield LocalModel("ollama", typed, problem=str(error))


def _blob(root: Path, manifest: Path) -> Path | None:
    """Return the model's file, or None for a manifest without a GGUF layer.

    Raises BadJson, OSError, and ValueError for a manifest that is no manifest.
    """
    document = parse_json(read_regular(manifest, _MAX_MANIFEST_BYTES), _MAX_NODES)
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, list):
        raise ValueError("its manifest has no layers")
    digests = [_digest(layer) for layer in layers if _is_model(layer)]
    if len(digests) > 1:
        raise ValueError(f"it has {len(digests)} model files, which is not supported")
    return root / "blobs" / f"sha256-{digests[0]}" if digests else None


def _is_model(layer: Any) -> bool:
    return isinstance(layer, dict) and layer.get("mediaType") == _MODEL_LAYER


def _digest(layer: dict[str, Any]) -> str:
    digest = layer.get("digest")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ValueError("its manifest has an invalid digest")
    return match[1]


def _of_files(store: str, root: Path, depth: int) -> Iterator[LocalModel]:
    """Yield the GGUF files at a depth below a folder. A split file appears once.

    Files that encode images (mmproj-….gguf) are left out.
    """
    sizes: dict[Path, dict[str, int]] = {}  # of the parts of each first part
    problems: dict[Path, str] = {}
    for parts, path in _files(root, depth):
        name = parts[-1]
        if not name.endswith(".gguf") or name.startswith("mmproj"):
            continue
        part = _PART.fullmatch(name)
        first = path if part is None else path.with_name(f"{part[1]}-00001-of-{part[3]}.gguf")
        try:
            sizes.setdefault(first, {})[name] = _size(path)
        except OSError as error:
            problems[first] = reason(error)
    for path, found in sizes.items():
        part = _PART.fullmatch(path.name)
        missing = (1 if part is None else int(part[3])) - len(found)
        if missing and path not in problems:
            problems[path] = f"{missing} of its parts are missing"
        elif path not in problems:
            yield LocalModel(store, str(path), sum(found.values()), path)
    for path, problem in problems.items():
        yield LocalModel(store, str(path), problem=problem)


def _files(root: Path, depth: int) -> Iterator[tuple[tuple[str, ...], Path]]:
    """Yield the names below `root`, and the path, of each entry at a depth, in order.

    Links to folders are followed: the depth ends a loop. Folders that cannot be read are skipped.
    """
    found: list[tuple[tuple[str, ...], Path]] = [((), root)]
    left = _MAX_ENTRIES
    for _ in range(depth):
        above, found = found, []
        for parts, folder in above:
            names = _names(folder, left)
            found += [((*parts, name), folder / name) for name in names]
            left -= len(names)
    yield from found


def _names(folder: Path, most: int) -> list[str]:
    """Return up to `most` names in a folder, in order; none if it cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in islice(entries, most))
    return []


def _size(path: Path) -> int:
    """Return a file's size in bytes. Raises OSError, also for what is not a regular file."""
    check_regular(path)
    return path.stat().st_size
