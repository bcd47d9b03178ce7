"""The hub's answers, for the fuzzer: the listing alone, and all answers of a pull.

An input of `hub-answers` is JSON, of which every part may be missing or invalid:

    {"listing": {…},           the hub's file list; default: the correct one for the files
     "status": 200, "headers": {…},             of the listing's answer
     "files": {"NAME": {"body": latin-1 text,   ranges of the file are cut from it
                        "ahead": latin-1 text,  the same, for requests of less than the whole
                        "status": 206, "headers": {…}}}}
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock
from urllib.parse import unquote

import torch
from safetensors.torch import save

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.hub.download import DownloadFailed
from moeinf.runtime.hub.listing import Repository, RepositoryError, look_up, read_listing
from moeinf.runtime.hub.patience import Patience
from moeinf.runtime.hub.repository import HubSource

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_REFUSES = (RepositoryError, DownloadFailed, BadCheckpoint)


def _listing(data: bytes, folder: Path) -> None:
    found = read_listing(data, "org/x", None, "model")
    assert len(found.commit) == 40
    for path, file in found.files.items():
        assert not {"", ".", ".."}.intersection(path.split("/"))
        assert 0 <= file.size_bytes < 1 << 48
        assert len(file.sha256 or "0" * 64) == 64
        assert len(file.git_sha1 or "0" * 40) == 40


def _answers(data: bytes, folder: Path) -> None:
    """Pull the script's files, up to the repacking of weights."""
    try:
        script = json.loads(data)
    except (ValueError, RecursionError):
        return
    place = folder / "source"
    shutil.rmtree(place, ignore_errors=True)  # the previous script's folder
    with mock.patch("moeinf.runtime.hub.http.get_session", return_value=_Session(script)):
        found = look_up("org/x", None, "token")
        source = HubSource(found, place, None, 2, Patience(1, 1.0, 0.0, lambda *_: None))
        _check(found, *source.small_files().folder.iterdir())
        work = SimpleNamespace(done=set())
        for path in source.bring(cast(Any, work), lambda *_: None):
            _check(found, path)
            for tensor in source.checkpoint.tensors.values():
                assert (
                    tensor.path != path or tensor.offset + tensor.size_bytes <= path.stat().st_size
                )
            source.release(path)


def _check(found: Repository, *paths: Path) -> None:
    """Assert that each file has the promised hash."""
    for path in paths:
        file, data = found.files[path.name], path.read_bytes()
        assert len(data) == file.size_bytes
        assert file.sha256 in (None, hashlib.sha256(data).hexdigest())
        assert file.git_sha1 is None or file.git_sha1 == _git(data)


class _Session:
    """Answers like the HTTP client of huggingface_hub."""

    def __init__(self, script: object) -> None:
        self._script = script if isinstance(script, dict) else {}

    @contextmanager
    def stream(self, _: str, url: str, *, headers: dict[str, str], **__: object) -> Iterator[Any]:
        files = self._script.get("files")
        files = files if isinstance(files, dict) else {}
        if "/api/" in url:
            listing = self._script.get("listing", _right_listing(files))
            yield _answer(self._script, json.dumps(listing).encode(), {}, 200)
            return
        name = unquote(url.rpartition("/")[2])
        about = files.get(name)
        if not isinstance(about, dict):
            yield _answer({}, b"", {}, 404)
            return
        first, last = map(int, headers["Range"].removeprefix("bytes=").split("-"))
        body = _bytes(about.get("body"))
        size = len(body)
        if "ahead" in about and (first > 0 or last + 1 < size):
            body = _bytes(about["ahead"])
        right = {"content-range": f"bytes {first}-{last}/{size}"}
        yield _answer(about, body[first : last + 1], right, 206)


def _answer(about: dict[str, Any], body: bytes, headers: dict[str, str], status: int) -> object:
    said, given = about.get("status", status), about.get("headers")
    if isinstance(given, dict):
        headers = headers | {str(key).lower(): str(value) for key, value in given.items()}
    status = said if type(said) is int and 100 <= said < 600 else status
    return SimpleNamespace(
        status_code=status,
        headers=headers,
        is_redirect=status in (301, 302, 303, 307, 308),
        iter_raw=lambda: iter([body[:10], body[10:]]),
    )


def _bytes(text: object) -> bytes:
    return text.encode("latin-1", errors="replace") if isinstance(text, str) else b""


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _right_listing(files: dict[str, Any]) -> dict[str, object]:
    siblings: list[dict[str, object]] = []
    for name, about in files.items():
        data = _bytes(about.get("body") if isinstance(about, dict) else None)
        entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": _git(data)}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        siblings.append(entry)
    return {"id": "org/x", "sha": _COMMIT, "siblings": siblings}


def _files(*, bin_file: bool = False) -> dict[str, Any]:
    bodies = {"config.json": b'{"model_type": "olmoe"}', "tokenizer_config.json": b"{}"}
    if bin_file:
        out = io.BytesIO()
        torch.save({"a": torch.ones(2, 3)}, out)
        bodies["pytorch_model.bin"] = out.getvalue()
    else:
        index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
        bodies["model.safetensors.index.json"] = json.dumps(index).encode()
        bodies["m-1.safetensors"] = save({"a": torch.ones(2)})
        bodies["m-2.safetensors"] = save({"b": torch.ones(2), "c": torch.zeros(2)})
    return {name: {"body": data.decode("latin-1")} for name, data in bodies.items()}


def _scripts() -> list[bytes]:
    files = _files()
    lying = json.loads(json.dumps(files))
    second = lying["m-2.safetensors"]
    swapped = second["body"].replace("[0,8]", "[?]").replace("[8,16]", "[0,8]")
    second["ahead"] = swapped.replace("[?]", "[8,16]")
    redirected = json.loads(json.dumps(files))
    redirected["config.json"] |= {"status": 302, "headers": {"location": "/x"}}
    found: list[dict[str, Any]] = [
        {"files": files, "listing": _right_listing(files)},
        {"files": files},
        {"files": lying},
        {"files": redirected, "status": 200, "headers": {"content-encoding": "identity"}},
        {"files": {}, "status": 404, "headers": {"x-error-code": "RepoNotFound"}},
        {"files": _files(bin_file=True)},
    ]
    return [json.dumps(script).encode() for script in found]


def _listings() -> list[bytes]:
    return [json.dumps(_right_listing(_files())).encode()]


# Arguments of a Target in targets.py: check, allowed errors, seeds.
HUB_TARGETS = {
    "hub-listing": (_listing, (RepositoryError,), _listings),
    "hub-answers": (_answers, _REFUSES, _scripts),
}
