"""Kill the process, or cut the power, at every call that changes the disk; check the files left.

Run: python scripts/crash_points.py [--what cp --what rm …] [--how kill --how power …] [--every 1]
what: pull, cp, rm, eamc (a request's rEAM), rewrite (of the whole log), export, conversation,
      first talk.
how:  kill   SIGKILL; half of a write succeeds
      power  only durable data survives: a file as at its last fsync, a folder with the names at its
             last fsync
      names  every name survives, but only the durable data of files
      full   the disk is full at that call
Afterwards the state must be the one before or the intended one, never between. A repetition must
succeed and leave no other files. A reported success must survive a power cut. Prints a table; exits
with 1 when anything is wrong. Each attempt runs in a forked child.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import moeinf.runtime.files.atomic as durable
import moeinf.runtime.library.repacking.repack as repack_module
import moeinf.runtime.library.staging as workplace_module
from moeinf.offload.routing.trace import RequestEam
from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.eamc.collection_file import EamcState, export_eamc, import_eamc
from moeinf.runtime.generation.chat import Message
from moeinf.runtime.generation.saved_chats import load_conversation, save_conversation
from moeinf.runtime.library.clone import copy_model
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.manifest import read_manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.verify import verify
from moeinf.runtime.names import ModelName
from scripts.make_checkpoint import config, make_checkpoint
from tests.shared_processes import try_once

POINTS = (
    "write", "pwrite", "fsync", "rename", "replace", "unlink", "link", "mkdir", "rmdir",
    "ftruncate", "sendfile",
)  # fmt: skip
_SYNCS = ("fsync", "syncfs")  # `Disk` models them: the real ones take most of the time
NAME, OTHER = ModelName("victim", "bf16"), ModelName("other", "bf16")
_FULL = 28  # exit code of a child that reported a full disk


def ignore(*_: object) -> None:
    """Ignore progress and notes."""


class Disk:
    """The durable state of a folder, by the strictest reading of POSIX.

    Descriptors of known files stay open, so that the system does not reuse an inode's number.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.data: dict[int, bytes] = {}  # by inode, at its last fsync
        self.names: dict[int, dict[str, tuple[int, bool]]] = {}  # inode, is a folder
        self._held: dict[int, int] = {}
        self.sync_all()

    def sync_all(self) -> None:
        for path in (self.home, *self.home.rglob("*")):
            if path.is_dir() or path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                self.sync(descriptor)
                os.close(descriptor)

    def sync(self, descriptor: int) -> None:
        """Record the effect of an fsync."""
        about, here = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}")
        if about.st_ino not in self._held:
            self._held[about.st_ino] = os.dup(descriptor)
        if stat.S_ISDIR(about.st_mode):
            self.names[about.st_ino] = _names(here)
        else:
            self.data[about.st_ino] = here.read_bytes()

    def after_a_cut(self, target: Path, all_names: bool) -> None:
        """Make the folder that exists after a power cut."""
        if all_names:
            for folder in (p for p in (self.home, *self.home.rglob("*")) if p.is_dir()):
                self.names[folder.stat().st_ino] = _names(folder)
        self._make(target, self.home.stat().st_ino)

    def _make(self, target: Path, inode: int) -> None:
        """Make a folder; a name whose file or folder was never made durable becomes empty."""
        target.mkdir()
        for name, (inner, is_folder) in self.names.get(inode, {}).items():
            if is_folder:
                self._make(target / name, inner)
            else:
                (target / name).write_bytes(self.data.get(inner, b""))


def _names(folder: Path) -> dict[str, tuple[int, bool]]:
    with os.scandir(folder) as entries:
        return {e.name: (e.inode(), e.is_dir(follow_symlinks=False)) for e in entries}


class Saboteur:
    """A counter of the calls that change the disk; it interrupts the K-th."""

    def __init__(self, at: int | None, how: str, home: Path, image: Path) -> None:
        self.at, self.how, self.count = at, how, 0
        self.image = image
        self.disk = Disk(home) if how in ("power", "names") else None

    def install(self) -> None:
        for name in POINTS:
            setattr(os, name, self._wrap(getattr(os, name), name))
        durable.syncfs = self._wrap(durable.syncfs, "syncfs")  # type: ignore[attr-defined]
        workplace_module.sync_filesystem = durable.sync_filesystem  # type: ignore[attr-defined]

    def cut(self) -> None:
        if self.disk is not None:
            self.disk.after_a_cut(self.image, self.how == "names")

    def _wrap(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at and name != "unlink":
                if self.how == "full" and name not in ("rmdir", "ftruncate"):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if name in ("write", "pwrite") and self.how == "kill":
                    half = memoryview(arguments[1])[: len(arguments[1]) // 2]
                    call(arguments[0], half, *arguments[2:])
            if self.count == self.at and self.how != "full":
                self.count = -1 << 40  # do not count the calls that make the image
                self.cut()
                os.kill(os.getpid(), signal.SIGKILL)
            if name not in _SYNCS:
                return call(*arguments, **options)
            if self.disk is not None and name == "fsync":
                self.disk.sync(arguments[0])
            elif self.disk is not None:
                self.disk.sync_all()
            return None

        return counted


@dataclass(frozen=True)
class Job:
    """prepare makes the state before; state returns "before", "after" or a problem."""

    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    state: Callable[[Path], str]


def model_state(home: Path, name: ModelName) -> str:
    library = Library(Settings(home))
    if not library.has(name):
        return "absent"
    broken = verify(library.folder(name), read_manifest(library.folder(name)), ignore)
    return "half" if broken else "complete"


def jobs(place: Path) -> dict[str, Job]:
    """Return the table of jobs; `place` holds a checkpoint, and a home with the model."""
    source = LocalSource(open_checkpoint(place / "checkpoint"), "x")

    def pull(home: Path) -> None:
        repack(source, Library(Settings(home)), NAME, ignore, ignore)

    pull(place / "home")
    manifest = read_manifest(Library(Settings(place / "home")).folder(NAME))
    shape = (manifest.layers, manifest.experts)

    def entry(number: int) -> RequestEam:
        counts = np.random.default_rng(number).integers(0, 9, (2, *shape)).astype(np.uint32)
        return RequestEam(counts[0], counts[1])

    def eamc(home: Path) -> EamcState:
        return EamcState(Settings(home), manifest, ignore, capacity=8)

    def with_model(home: Path) -> None:
        shutil.copytree(place / "home", home)
        for number in range(3):
            eamc(home).append(entry(number))

    def copied(home: Path) -> str:
        if model_state(home, NAME) != "complete":
            return "the original is harmed"
        found = model_state(home, OTHER)
        return {"absent": "before", "complete": "after"}.get(found, found)

    def removed(home: Path) -> str:
        found = model_state(home, NAME)
        return {"absent": "after", "complete": "before"}.get(found, found)

    def remove(home: Path) -> None:
        library = Library(Settings(home))
        with suppress(NoSuchModel):
            library.remove(str(NAME))
        for partial in library.partials():  # as `moeinf prune` does
            library.discard(partial.name)

    def entries_are(before: int, after: int) -> Callable[[Path], str]:
        def state(home: Path) -> str:
            found = [e.prefill.tolist() for e in eamc(home).load().entries()]
            wanted = [entry(number).prefill.tolist() for number in range(after)]
            if found == wanted[:before]:
                return "before"
            return "after" if found == wanted else f"{len(found)} entries"

        return state

    def append(home: Path) -> None:
        if len(eamc(home).load()) == 3:
            eamc(home).append(entry(3))

    def rewrite(home: Path) -> None:
        if len(eamc(home).load()) == 3:
            eamc(home).extend([entry(3), entry(4)])

    def export(home: Path) -> None:
        export_eamc(eamc(home).load(), home / "out.eamc")

    def exported(home: Path) -> str:
        if not (home / "out.eamc").exists():
            return "before"
        return "after" if len(import_eamc(home / "out.eamc", manifest)) == 3 else "half"

    def talk(count: int) -> Any:
        messages = [Message("user", f"number {n} " * 50) for n in range(count)]
        return SimpleNamespace(messages=messages, system="be brief", clear=lambda: None)

    def kept(home: Path, count: int) -> None:
        save_conversation(Settings(home), "talk", NAME, talk(count))

    def with_a_talk(home: Path) -> None:
        home.mkdir()
        kept(home, 2)

    def talk_state(home: Path) -> str:
        found = talk(0)
        load_conversation(Settings(home), "talk", found)
        return {2: "before", 9: "after"}.get(len(found.messages), "half")

    def empty(home: Path) -> None:
        home.mkdir()

    def pulled(home: Path) -> str:
        found = model_state(home, NAME)
        return {"absent": "before", "complete": "after"}.get(found, found)

    def first_talk(home: Path) -> str:
        there = (Settings(home).conversations / "talk.json").exists()
        return talk_state(home) if there else "before"

    def copy(home: Path) -> None:
        if not Library(Settings(home)).has(OTHER):
            copy_model(Settings(home), str(NAME), str(OTHER))

    return {
        "pull": Job(empty, pull, pulled),
        "cp": Job(with_model, copy, copied),
        "rm": Job(with_model, remove, removed),
        "eamc": Job(with_model, append, entries_are(3, 4)),
        "rewrite": Job(with_model, rewrite, entries_are(3, 5)),
        "export": Job(with_model, export, exported),
        "conversation": Job(with_a_talk, lambda home: kept(home, 9), talk_state),
        "first talk": Job(empty, lambda home: kept(home, 9), first_talk),
    }


def attempt(job: Job, home: Path, image: Path, at: int | None, how: str) -> tuple[int, int]:
    """Run the job in a child; return its wait status and the number of points it passed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        saboteur, code, report = Saboteur(at, how, home, image), 1, os.write
        try:
            saboteur.install()
            job.act(home)
            passed, saboteur.count = saboteur.count, -1 << 40
            saboteur.cut()  # the power fails after the reported success
            report(writing, str(passed).encode())
            code = 0
        except BaseException as error:
            if getattr(error, "errno", None) == errno.ENOSPC and how == "full":
                code = _FULL
            else:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(code)
    os.close(writing)
    count = os.read(reading, 64)
    os.close(reading)
    return os.waitpid(child, 0)[1], int(count or 0)


def debris(home: Path) -> list[str]:
    """Return the leftover files that nothing will read again."""
    ends = (".partial", ".old", ".parts", ".pieces")
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.name.endswith(ends))


def try_all(job: Job, place: Path, how: str, every: int) -> tuple[int, Counter[str], list[str]]:
    """Return (number of injections, outcomes, problems)."""
    home, image, wrong = place / "try", place / "image", []
    outcomes: Counter[str] = Counter()

    def afresh() -> Path:
        for folder in (home, image):
            shutil.rmtree(folder, ignore_errors=True)
        job.prepare(home)
        return image if how in ("power", "names") else home

    found = afresh()
    status, points = attempt(job, home, image, None, how)
    if status != 0 or job.state(found) != "after":
        wrong.append(f"undisturbed: {status}, then {job.state(found)}")
    tried = range(1, points + 1, every)
    for at in tried:
        found = afresh()
        status, _ = attempt(job, home, image, at, how)
        if status not in (signal.SIGKILL, _FULL << 8, 0):
            wrong.append(f"point {at}: ended with {status}")
        state = job.state(found)
        if status == 0 and how != "full":  # a pull has two threads, so its points vary
            outcomes["not met"] += 1
        else:
            outcomes[state] += 1
        if state not in ("before", "after"):
            wrong.append(f"point {at}: {state}")
        status, _ = attempt(job, found, image, None, "")
        state, left = job.state(found), debris(found)
        if status != 0 or state != "after" or left:
            wrong.append(f"point {at}: the same again ended with {status}, {state}, left {left}")
    return len(tried), outcomes, wrong


def main() -> int:
    what = ("pull", "cp", "rm", "eamc", "rewrite", "export", "conversation", "first talk")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", action="append", choices=what)
    parser.add_argument("--how", action="append", choices=("kill", "power", "names", "full"))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="moeinf-crash-") as folder:
        place = Path(folder)
        make_checkpoint(place / "checkpoint", config(2, 2, 64, 48, 2), file_bytes=60_000)
        repack_module.try_tokenizer = try_once  # the pull that `jobs` begins with tries it
        table = jobs(place)
        for name in options.what or what:
            for how in options.how or ("kill", "power", "names", "full"):
                tried, outcomes, wrong = try_all(table[name], place, how, options.every)
                failed = failed or bool(wrong)
                if options.json:
                    about = {"what": name, "how": how, "tried": tried, "wrong": wrong}
                    print(json.dumps({**about, "outcomes": outcomes}), flush=True)
                    continue
                told = ", ".join(f"{n} {state}" for state, n in sorted(outcomes.items()))
                print(f"{name:14}{how:8}{tried:5} points: {told}", flush=True)
                print(*wrong, sep="\n", end="\n" if wrong else "", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
