"""List and fetch the files of a data set's repository on the hub.

Files are fetched as a model's are (ranged, resumable, hashed), into $MOEINF_HOME/datasets. Files in
the Hugging Face cache are used in place. Without the hub, only local files are available.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError

from moeinf.runtime.files.atomic import make_folder_durably
from moeinf.runtime.hub.download import RemoteFile, fetch, has_promised_hash
from moeinf.runtime.hub.listing import RepositoryError, look_up_all
from moeinf.runtime.hub.repository import fetcher_of
from moeinf.runtime.jobs.datasets.items import BadDataset
from moeinf.runtime.sizes import Progress

_MAX_FILE_BYTES = 256 << 20
_MAX_PARTS = 4  # folders and a name


class DatasetUnavailable(RepositoryError):
    """The hub cannot be reached, and the data set is not on this machine."""

    code = "dataset_unavailable"
    hint = "`--dataset demo`, or --dataset with a .jsonl, .txt or .parquet file"
    http_status = 503


class DatasetFiles:
    """The files of one repository; `names` are paths within it."""

    def __init__(self, repository: str, folder: Path, progress: Progress) -> None:
        """List the repository. folder: the folder for data sets. Raises RepositoryError."""
        self._repository = repository
        self._folder = folder / repository.replace("/", "--")
        self._progress = progress
        self._here: dict[str, Path] = {}
        self._remote: dict[str, RemoteFile] = {}
        self._commit = ""
        try:
            self._ask()
        except RepositoryError as error:
            self._look_around()
            if not self._here:
                raise DatasetUnavailable(str(error)) from error

    @property
    def names(self) -> Iterable[str]:
        return self._remote.keys() or self._here.keys()

    def bring(self, name: str) -> Path:
        """Fetch a file; return its path. Raises BadDataset if it is too large, DownloadFailed."""
        if name in self._here:
            return self._here[name]
        file = self._remote.get(name)
        if file is None:
            raise BadDataset(f"{self._repository} has no file {name}")
        cached = try_to_load_from_cache(
            self._repository, name, repo_type="dataset", revision=self._commit
        )
        if isinstance(cached, str) and has_promised_hash(Path(cached), file, lambda _: None):
            return Path(cached)
        if file.size_bytes > _MAX_FILE_BYTES:
            raise BadDataset(f"{self._repository}: {name} has {file.size_bytes >> 20} MiB")
        folder = (self._folder / self._commit / name).parent
        make_folder_durably(folder)
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            self._progress(name, done, file.size_bytes)

        return fetch(fetcher_of(None), file, folder, 2, count)

    def _ask(self) -> None:
        found = look_up_all(self._repository, None, None, "dataset")
        self._commit = found.commit
        for path, file in found.files.items():
            if len(PurePosixPath(path).parts) <= _MAX_PARTS:
                self._remote[path] = file

    def _look_around(self) -> None:
        """Find local files: fetched before, or in a snapshot in the Hugging Face cache."""
        snapshots = list(self._folder.glob("*")) if self._folder.is_dir() else []
        snapshots.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        with suppress(LocalEntryNotFoundError, OSError, ValueError):
            found = snapshot_download(self._repository, repo_type="dataset", local_files_only=True)
            snapshots.append(Path(str(found)))
        for snapshot in snapshots:
            for path in sorted(snapshot.rglob("*")):
                if path.is_file() and path.suffix not in (".incomplete", ".pieces"):
                    self._here.setdefault(path.relative_to(snapshot).as_posix(), path)
