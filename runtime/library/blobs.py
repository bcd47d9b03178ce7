"""Files that clients upload for `create`, by their digests, until they are used or expire.

A file is written under a hidden name, and gets its own when its digest has been checked. Each is
readable by the user only.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from moeinf.errors import DiskFull, NotFound
from moeinf.runtime.files.atomic import make_folder_durably, sync_folder
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.clone import link_file
from moeinf.runtime.sizes import format_bytes
from moeinf.runtime.system import NO_FOLLOW, lock, open_folder

KEPT_SECONDS = 3600.0  # an upload is removed this long after its last byte
MOST_BLOB_BYTES = 1 << 40
_FREE_BYTES = 1 << 30  # of the drive, that uploads leave
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_FILE = re.compile(r"sha256-[0-9a-f]{64}|\.(?:upload|create)-[0-9a-f]{16}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ ()+-]{0,199}\.gguf", re.IGNORECASE)


class NoSuchBlob(NotFound, LookupError):
    """No upload has the digest, or it has expired."""

    code = "blob_not_found"
    hint = "`POST /api/blobs/sha256:…` with the file, then the same request"


class WrongDigest(InvalidValue):
    """An upload differs from its digest."""

    code = "wrong_digest"
    hint = "the upload again, with the file's SHA-256"


class Blobs:
    """The folder $MOEINF_HOME/blobs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, digest: str) -> bool:
        """Return whether an upload is here. Raises InvalidValue for a text that is no digest."""
        return self._path(digest).is_file()

    def expect(self, digest: str, size_bytes: int) -> Upload:
        """Begin an upload; size_bytes: 0 if it is not known. Raises InvalidValue, DiskFull."""
        path = self._path(digest)
        self.remove_expired()
        make_folder_durably(self._folder)
        check_room(self._folder, size_bytes)
        return Upload(path)

    @contextmanager
    def opened(self, files: Mapping[str, str]) -> Iterator[Path]:
        """Yield a folder with links to uploads, by their file names, and remove it afterwards.

        files: the digest of each name. Raises InvalidValue, NoSuchBlob.
        """
        paths = {}
        for name, digest in files.items():
            if not _NAME.fullmatch(name):
                shown = name[:80]
                raise InvalidValue(
                    f"files: {shown!r} is invalid (expected the name of a .gguf file)"
                )
            paths[name] = self._path(digest)
            if not paths[name].is_file():
                raise NoSuchBlob(f"{digest} of {name} has not been uploaded")
        folder = self._folder / f".create-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        descriptor = open_folder(folder)
        try:
            lock(descriptor)  # an import may take longer than KEPT_SECONDS
            for name, path in paths.items():
                link_file(path, folder / name)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)

    def remove(self, digest: str) -> None:
        """Remove an upload that has been used."""
        self._path(digest).unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Remove what is older than KEPT_SECONDS, also of servers that were killed."""
        with suppress(OSError):
            for path in self._folder.iterdir():
                with suppress(OSError):
                    if _FILE.fullmatch(path.name) and _age_s(path) > KEPT_SECONDS:
                        _remove(path)

    def _path(self, digest: str) -> Path:
        found = _DIGEST.fullmatch(digest)
        if found is None:
            words = "expected sha256: and 64 hexadecimal digits"
            raise InvalidValue(f"digest: {digest[:80]!r} is invalid ({words})")
        return self._folder / f"sha256-{found[1]}"


class Upload:
    """An upload in progress. Its methods block: call them on a thread, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".upload-{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW
        self._file: IO[bytes] = os.fdopen(os.open(self._partial, flags, 0o600), "wb", buffering=0)
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append bytes. Raises InvalidValue beyond MOST_BLOB_BYTES, DiskFull, OSError."""
        self._size += len(data)
        if self._size > MOST_BLOB_BYTES:
            raise InvalidValue(f"an upload has at most {format_bytes(MOST_BLOB_BYTES)}")
        check_room(self._path.parent, len(data))
        self._hash.update(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def finish(self) -> None:
        """Give the file its name, durably. Raises WrongDigest, OSError."""
        found = self._hash.hexdigest()
        if f"sha256-{found}" != self._path.name:
            wanted = self._path.name.replace("-", ":", 1)
            raise WrongDigest(f"the upload has the digest sha256:{found}, not {wanted}")
        os.fsync(self._file.fileno())
        self._partial.replace(self._path)
        sync_folder(self._path.parent)

    def close(self) -> None:
        """Remove what was not finished."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


def check_room(folder: Path, size_bytes: int) -> None:
    """Raise DiskFull if the drive has no room for these bytes and a reserve."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes + _FREE_BYTES:
        need = f"{format_bytes(size_bytes + _FREE_BYTES)} are needed, {format_bytes(free)} are free"
        raise DiskFull(f"{folder}: the drive has no room for the upload ({need})")


def _age_s(path: Path) -> float:
    return time.time() - path.lstat().st_mtime


def _remove(path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    descriptor = open_folder(path)
    try:
        lock(descriptor, wait=False)  # fails while it is in use
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
