"""GGUF files in the stores of Ollama, LM Studio and llama.cpp; damaged and hostile stores."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.config import OtherStores, read_other_stores
from moeinf.runtime.library.local_stores import (
    BadStore,
    LocalModel,
    NoSuchOllamaModel,
    local_models,
    ollama_model,
    ollama_name,
)

DIGEST = "ab" * 32
REGISTRY = "registry.ollama.ai/library"


def layer(digest: object = f"sha256:{DIGEST}", kind: str = "model") -> dict[str, Any]:
    return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": 7}


def put(root: Path, name: str, *layers: Any, content: str | None = None) -> Path:
    """Write a manifest, and the file that it names."""
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schemaVersion": 2, "layers": list(layers) or [layer("x", "params"), layer()]}
    path.write_text(json.dumps(document) if content is None else content)
    (root / "blobs").mkdir(exist_ok=True)
    (root / "blobs" / f"sha256-{DIGEST}").write_bytes(b"GGUF...")
    return path


def ollama(root: Path) -> OtherStores:
    return OtherStores(ollama=(root,), lm_studio=(), llama_cpp=())


def test_names_and_files_of_ollama(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / f"sha256-{DIGEST}"
    for name in (f"{REGISTRY}/qwen3/30b", f"{REGISTRY}/qwen3/latest"):
        put(tmp_path, name)
    put(tmp_path, "registry.ollama.ai/someone/qwen3/30b")
    put(tmp_path, "hf.co/Org/Repo-GGUF/Q4_K_M")
    put(tmp_path, f"{REGISTRY}/cloud/latest", layer("x", "params"))  # without a file
    names = [
        "ollama:hf.co/Org/Repo-GGUF:Q4_K_M", "ollama:qwen3:30b", "ollama:qwen3:latest",
        "ollama:someone/qwen3:30b",
    ]  # fmt: skip
    assert local_models(ollama(tmp_path)) == [LocalModel("ollama", n, 7, blob) for n in names]
    for name in [*names, "ollama:qwen3", "QWEN3:30B", "hf.co/org/repo-gguf:q4_k_m"]:
        assert ollama_model(name, ollama(tmp_path)) == blob
    for name in (
        "qwen3:31b",
        "someone/qwen3",
        "",
        "../qwen3:30b",
        "qwen3:../../x",
        "/",
        ":",
        "a:b:c",
    ):
        with pytest.raises(NoSuchOllamaModel):
            ollama_model(name, ollama(tmp_path))


@pytest.mark.parametrize(
    ("name", "ours"),
    [("ollama:qwen3", "qwen3"), ("qwen3:latest", "qwen3"), ("ollama:hf.co/a/b:Q4_0", "b-Q4_0")],
)
def test_the_name_that_a_model_of_ollama_gets(name: str, ours: str) -> None:
    assert ollama_name(name) == ours


HOSTILE = {
    "no JSON": "{",
    "a list": "[]",
    "no layers": "{}",
    "layers that are no list": '{"layers": 7}',
    "a duplicate key": '{"layers": [], "layers": []}',
    "too deep": "[" * 100_000,
    "too many values": json.dumps({"layers": [0] * 20_000}),
    "too long": '{"layers": [], "x": "' + "a" * (1 << 20) + '"}',
    "two models": json.dumps({"layers": [layer(), layer()]}),
    "a path": json.dumps({"layers": [layer("sha256:../../../etc/passwd")]}),
    "a path as long as a digest": json.dumps({"layers": [layer("sha256:" + "../" * 21 + "x")]}),
    "an upper digest": json.dumps({"layers": [layer("sha256:" + "AB" * 32)]}),
    "a digest that is a number": json.dumps({"layers": [layer(7)]}),
    "a missing file": json.dumps({"layers": [layer("sha256:" + "cd" * 32)]}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=list(HOSTILE))
def test_a_damaged_manifest_is_named_and_refused(content: str, tmp_path: Path) -> None:
    put(tmp_path, f"{REGISTRY}/bad/latest", content=content)
    put(tmp_path, f"{REGISTRY}/good/latest")
    bad, good = local_models(ollama(tmp_path))
    assert (bad.name, bad.path) == ("ollama:bad:latest", None)
    assert bad.problem
    assert good.path is not None
    with pytest.raises(BadStore):
        ollama_model("bad", ollama(tmp_path))


def test_layers_that_are_no_layers_are_ignored(tmp_path: Path) -> None:
    put(tmp_path, f"{REGISTRY}/odd/latest", 7, "model", None, [], {}, layer())
    assert ollama_model("odd", ollama(tmp_path)).name == f"sha256-{DIGEST}"


def test_what_is_not_a_regular_file_is_not_opened(tmp_path: Path) -> None:
    manifest = put(tmp_path, f"{REGISTRY}/pipe/latest")
    manifest.unlink()
    os.mkfifo(manifest)
    put(tmp_path, f"{REGISTRY}/loop/latest").unlink()
    (tmp_path / "manifests" / REGISTRY / "loop/latest").symlink_to("latest")
    (tmp_path / "manifests" / REGISTRY / "folder/latest").mkdir(parents=True)
    assert [model.path for model in local_models(ollama(tmp_path))] == [None, None, None]
    put(tmp_path, f"{REGISTRY}/blob/latest")
    blob = tmp_path / "blobs" / f"sha256-{DIGEST}"
    blob.unlink()
    os.mkfifo(blob)
    with pytest.raises(BadStore):
        ollama_model("blob", ollama(tmp_path))


def test_links_of_folders_end(tmp_path: Path) -> None:
    put(tmp_path, f"{REGISTRY}/good/latest")
    (tmp_path / "manifests" / "loop").symlink_to(tmp_path / "manifests")
    (tmp_path / "manifests" / REGISTRY / "up").symlink_to("..")
    found = [model.name for model in local_models(ollama(tmp_path)) if model.path]
    assert found == ["ollama:good:latest"]


def test_a_store_of_countless_files_is_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeinf.runtime.library.local_stores._MAX_ENTRIES", 10)
    for number in range(30):
        put(tmp_path, f"{REGISTRY}/many/{number}")
    assert len(local_models(ollama(tmp_path))) == 7  # three folders count, too


def test_files_of_lm_studio_and_llama_cpp(tmp_path: Path) -> None:
    studio, cache = tmp_path / "studio", tmp_path / "cache"
    for path, size in (
        ("studio/pub/repo/whole.gguf", 3),
        ("studio/pub/repo/a-00001-of-00002.gguf", 4),
        ("studio/pub/repo/a-00002-of-00002.gguf", 5),
        ("studio/pub/repo/b-00001-of-00002.gguf", 6),
        ("studio/pub/repo/c-00002-of-00002.gguf", 6),
        ("studio/pub/repo/d-00001-of-99999.gguf", 6),
        ("studio/pub/repo/mmproj-whole.gguf", 1),
        ("studio/pub/repo/readme.md", 1),
        ("studio/pub/shallow.gguf", 1),
        ("studio/pub/repo/deep/er.gguf", 1),
        ("cache/org_repo_file.gguf", 8),
        ("cache/manifest=org=repo=latest.json", 8),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x" * size)
    (studio / "pub/repo/linked.gguf").symlink_to(studio / "pub/repo/whole.gguf")
    (studio / "pub/repo/loop.gguf").symlink_to("loop.gguf")
    os.mkfifo(studio / "pub/repo/pipe.gguf")
    found = local_models(OtherStores((), (studio, tmp_path / "absent"), (cache,)))
    good = [(m.store, Path(m.name).name, m.size_bytes) for m in found if m.path]
    assert good == [
        ("lm-studio", "a-00001-of-00002.gguf", 9),
        ("lm-studio", "linked.gguf", 3),
        ("lm-studio", "whole.gguf", 3),
        ("llama.cpp", "org_repo_file.gguf", 8),
    ]
    assert all(m.name == str(m.path) for m in found if m.path)
    bad = {Path(m.name).name: m.problem for m in found if not m.path}
    assert bad.keys() == {f"{n}-00001-of-00002.gguf" for n in "bc"} | {
        "d-00001-of-99999.gguf", "loop.gguf", "pipe.gguf"
    }  # fmt: skip
    assert bad["d-00001-of-99999.gguf"] == "99998 of its parts are missing"


def test_where_the_stores_are() -> None:
    plain = read_other_stores({"HOME": "/h"})
    assert plain == OtherStores(
        ollama=(Path("/h/.ollama/models"), Path("/usr/share/ollama/.ollama/models")),
        lm_studio=(Path("/h/.lmstudio/models"), Path("/h/.cache/lm-studio/models")),
        llama_cpp=(Path("/h/.cache/llama.cpp"),),
    )
    moved = read_other_stores({"HOME": "/h", "OLLAMA_MODELS": "/o", "LLAMA_CACHE": "/l"})
    assert (moved.ollama, moved.llama_cpp) == ((Path("/o"),), (Path("/l"),))
    assert read_other_stores({"HOME": "/h", "XDG_CACHE_HOME": "/c"}).llama_cpp == (
        Path("/c/llama.cpp"),
    )
