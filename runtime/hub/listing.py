"""Ask the hub which files a repository has, and read its answer.

The hub may be an untrusted server or proxy: its answer is read with limits, and every value is
checked before use.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError of its client
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from moeinf.errors import NotFound, reason
from moeinf.runtime.bounded_json import BadJson, parse_json
from moeinf.runtime.hub.download import RemoteFile
from moeinf.runtime.hub.http import BadAnswer, get, read_body

constants.HF_HUB_DISABLE_TELEMETRY = True  # send nothing about this machine
_COMMIT = re.compile(r"[0-9A-Za-z]{40}")
_SHA1 = re.compile(r"[0-9a-fA-F]{40}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_STALL_SECONDS = 30.0
_MOST_NODES = 2 << 20  # JSON values of a listing; an entry has some 10


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids requests to the hub."""
    return bool(constants.is_offline_mode())


class RepositoryError(NotFound, ConnectionError):
    """The hub cannot supply a repository. The message gives the reason."""

    code = "hub"
    hint = "`moeinf pull --help`, which says how models are named"


@dataclass(frozen=True)
class Repository:
    """A repository at one commit: its files by name or path.

    base: the repository that its model card names as the one it was made from, unchecked.
    """

    name: str  # org/name
    commit: str
    files: Mapping[str, RemoteFile]
    base: str | None = None


def look_up(
    name: str, revision: str | None, token: str | None, stop: threading.Event | None = None
) -> Repository:
    """Ask the hub for a model's commit and the files in its top folder. Raises RepositoryError."""
    return in_top_folder(look_up_all(name, revision, token, "model", stop))


def in_top_folder(found: Repository) -> Repository:
    """Return a repository without subfolders: they hold other formats (original/, metal/, …)."""
    files = {path: file for path, file in found.files.items() if path == file.name}
    return replace(found, files=files)


def look_up_all(
    name: str,
    revision: str | None,
    token: str | None,
    kind: str,
    stop: threading.Event | None = None,
    stall_seconds: float = _STALL_SECONDS,
) -> Repository:
    """Ask the hub for a repository's commit and all files, by path. Raises RepositoryError.

    kind: "model" or "dataset". stall_seconds: the longest wait for a byte.
    """
    called = name if kind == "model" else f"the data set {name}"
    at = f"{called} at revision {revision}" if revision else called
    try:
        validate_repo_id(name)
        url = f"{constants.ENDPOINT}/api/{kind}s/{quote(name)}"
        if revision is not None:
            url += f"/revision/{quote(revision, safe='')}"
        body = _ask(
            f"{url}?blobs=true", called, revision, token or get_token(), stop, stall_seconds
        )
    except HFValidationError as error:
        raise RepositoryError(f"{name!r} is not a repository name: {error}") from error
    except OfflineModeIsEnabled as error:
        raise RepositoryError(
            f"HF_HUB_OFFLINE is set and {at} is not in the Hugging Face cache"
        ) from error
    except BadAnswer as error:
        raise RepositoryError(f"the hub gives no usable answer for {at}: {error}") from error
    except RepositoryError:
        raise
    except (HTTPError, OSError) as error:
        away = RepositoryError(f"the hub cannot be reached for {at}: {reason(error)}")
        away.hint = "the same command when there is a network, or `moeinf pull ./FOLDER`"
        raise away from error
    return read_listing(body, name, revision, kind)


def _ask(
    url: str,
    name: str,
    revision: str | None,
    token: str | None,
    stop: threading.Event | None,
    stall_seconds: float,
) -> bytes:
    with get(url, {}, constants.ENDPOINT, token, stall_seconds) as answer:
        status, code = answer.status_code, answer.headers.get("x-error-code")
        if status == 200:
            return read_body(answer, stop or threading.Event())
        if code == "GatedRepo":
            raise RepositoryError(f"{name} is gated: accept its terms on the hub and set HF_TOKEN")
        if code == "RevisionNotFound":
            raise RepositoryError(f"{name} has no revision {revision!r}")
        if code == "RepoNotFound" or status in (401, 404):
            hint = "" if token else "; if it is private, set HF_TOKEN"
            raise RepositoryError(f"the hub has no repository {name}{hint}")
        at = f"{name} at revision {revision}" if revision else name
        raise RepositoryError(f"the hub refuses {at}: it answers {status}")


def read_listing(body: bytes, name: str, revision: str | None, kind: str) -> Repository:
    """Return the repository that the hub's answer describes. Raises RepositoryError."""
    at = f"{name} at revision {revision}" if revision else name
    try:
        about = parse_json(body, _MOST_NODES)
    except BadJson as error:
        raise RepositoryError(f"the hub's answer for {at} {error}") from error
    commit = about.get("sha") if isinstance(about, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise RepositoryError(f"the hub names no commit for {at}")
    entries = about.get("siblings") or []
    if not isinstance(entries, list):
        raise RepositoryError(f"the hub lists no files for {at}")
    files = {}
    for entry in entries:
        path, size = (entry.get("rfilename"), entry.get("size")) if _is_entry(entry) else ("", 0)
        if type(size) is not int or not 0 <= size < 1 << 48 or not is_plain(path):
            continue
        url = hf_hub_url(name, path, repo_type=kind, revision=commit, endpoint=constants.ENDPOINT)
        sha256, git_sha1 = _promise(entry, path, name)
        files[path] = RemoteFile(PurePosixPath(path).name, size, url, sha256, git_sha1, path)
    return Repository(name, commit, files, _base_of(about))


def _base_of(about: dict[str, Any]) -> str | None:
    """Return the one base model of a model card, or None."""
    card = about.get("cardData")
    said = card.get("base_model") if isinstance(card, dict) else None
    found = said[0] if isinstance(said, list) and len(said) == 1 else said
    return found if isinstance(found, str) else None


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("rfilename"), str)


def is_plain(path: str) -> bool:
    """Return whether a path stays in its repository's folder, or in one below it."""
    parts = PurePosixPath(path).parts
    odd = any(part in ("", ".", "..") or len(part) > 255 for part in parts)
    text = path.isprintable() and str(PurePosixPath(path)) == path and not path.startswith("/")
    return bool(parts) and text and not odd


def _promise(entry: dict[str, Any], path: str, name: str) -> tuple[str | None, str | None]:
    """Return the hash that the hub promises: SHA-256 of large storage, or git's SHA-1 of the blob.

    The result is (None, None) without a promise. Raises RepositoryError for an invalid hash.
    """
    large, blob = entry.get("lfs"), entry.get("blobId")
    if large is not None:
        sha256 = large.get("sha256") if isinstance(large, dict) else large
        if sha256 is None:
            return None, None
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise RepositoryError(f"the hub gives {_shown(sha256)} as SHA-256 of {name}/{path}")
        return sha256.lower(), None
    if blob is None:
        return None, None
    if not isinstance(blob, str) or not _SHA1.fullmatch(blob):
        raise RepositoryError(f"the hub gives {_shown(blob)} as git hash of {name}/{path}")
    return None, blob.lower()


def _shown(value: object) -> str:
    return repr(value)[:60] if isinstance(value, str | int | float) else f"a {type(value).__name__}"
