"""Test how the command line shows an error: its code, its message and its hint."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from moeinf.cli.chat.client import ServerError
from moeinf.cli.chat.slash_commands import BadCommand
from moeinf.cli.commands.measuring import eval as evaluation
from moeinf.cli.commands.models.pull import pull
from moeinf.cli.errors import tell
from moeinf.cli.main import answer
from moeinf.cli.output import Output, OutputFailed
from moeinf.errors import DeviceError, OutOfDeviceMemory
from moeinf.models.base import ModelDataError
from moeinf.models.families import FAMILIES
from moeinf.offload.gpu_tier.layer_runner import OutOfMemory
from moeinf.offload.store.budget import DoesNotFit
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import Settings
from moeinf.runtime.files.regular import NotRegular
from moeinf.runtime.hub.listing import RepositoryError
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library, ModelInUse, NoSuchModel
from moeinf.runtime.library.manifest import DamagedModel
from moeinf.runtime.library.processes import NotStopped
from moeinf.runtime.sampling.schema_limits import BadFormat
from moeinf.server.serve import CannotListen


class Panic(BaseException):
    """A BaseException that is not an Exception, like a Rust panic."""


@pytest.mark.parametrize(
    ("error", "code", "exit_code", "words", "hint"),
    [
        (NoSuchModel("olme", ["olmoe"]), "model_not_found", 1, "'olme'", "olmoe, or `moeinf list`"),
        (DoesNotFit(1 << 20, 3 << 20), "does_not_fit", 1, "1.0 MiB", "--memory 3145728"),
        (ExpertReadError("experts/L0/E1", "EIO"), "unreadable_shard", 1, "L0/E1", "verify MODEL"),
        (DamagedModel("dense.safetensors is short"), "damaged_model", 1, "short", "--repair"),
        (NotStopped(17, 3.0), "not_stopped", 1, "process 17", "kill -9 17"),
        (RepositoryError("no repository a/b"), "hub", 1, "a/b", "pull --help"),
        (BadCommand("unknown command '/x'"), "bad_command", 1, "/x", "/?"),
        (DeviceError("CUDA_ERROR_UNKNOWN"), "device_failed", 1, "CUDA", "--device cpu"),
        (OutOfDeviceMemory("cuMem"), "out_of_device_memory", 1, "cu", "less --device-memory"),
        (OutOfMemory("none left"), "no_workspace", 1, "none", "a smaller --ctx"),
        (CannotListen("cannot listen on x:1"), "cannot_listen", 1, "x:1", "--port"),
        (OSError(errno.ENOSPC, "No space left", "/f"), "disk_full", 1, "/f: No", "free some disk"),
        (PermissionError(errno.EACCES, "Permission denied", "/f"), "io_error", 1, "/f: p", "owner"),
        (OSError(errno.EIO, "Input/output error"), "io_error", 1, "the drive", "dmesg"),
        (MemoryError("8 GiB"), "out_of_memory", 1, "8 GiB", "--memory"),
        (InvalidValue("MOEINF_MEMORY is 'x'"), "invalid", 2, "'x'", "--help"),
        (OutputFailed(5, "cannot be written"), "output_failed", 1, "cannot be written", ""),
        (
            ValueError("shapes"),
            "internal",
            1,
            "a bug in moeinf: ValueError: shapes",
            "MOEINF_DEBUG",
        ),
        (Panic("index out of range"), "internal", 1, "Panic: index", "MOEINF_DEBUG"),
        (KeyError("x"), "internal", 1, "this is a bug in moeinf: KeyError", "MOEINF_DEBUG=1"),
    ],
)
def test_what_is_told(
    error: BaseException,
    code: str,
    exit_code: int,
    words: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    out = Output(json=not isinstance(error, OutputFailed))
    assert tell(out, error) == exit_code
    said = capsys.readouterr()
    if not out.json:  # nothing reaches standard output: one line on stderr
        assert (said.out, said.err) == ("", f"Error: {words}\n")
        return
    told = json.loads(said.out)["error"]
    assert told["code"] == code
    assert words in told["message"]
    assert "[Errno" not in told["message"]
    assert hint in told["hint"]


def test_people_read_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    tell(Output(), ModelInUse("demo is in use"))
    assert capsys.readouterr().err.splitlines() == [
        "Error: demo is in use",
        "Try: `moeinf stop MODEL`, which unloads it",
    ]


def test_the_help_of_pull_names_the_families() -> None:
    """The hint of ModelDataError refers to it."""
    assert "`moeinf pull --help`, which names the families" in ModelDataError.hint
    _, _, named = str(pull.__doc__).partition("config.json): ")
    assert [name.strip() for name in named.partition(".")[0].split(",")] == sorted(FAMILIES)


def test_a_panic_of_rust_is_a_bug_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a BaseException, which passes `except Exception`."""

    class PanicException(BaseException):
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of range")

    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    monkeypatch.setattr("moeinf.cli.main.command_line", lambda: panic)
    assert answer(["list", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["code"] == "internal"
    assert "PanicException: index out of range" in told["message"]
    assert "PanicException" in (tmp_path / "logs/moeinf.log").read_text()


def test_a_form_that_a_server_refuses_is_wrong_usage_as_it_is_here() -> None:
    there, here = ServerError("format: too much", "bad_format"), BadFormat("format: too much")
    for error in (there, here):
        assert (error.code, error.exit_code, error.hint) == ("bad_format", 2, BadFormat.hint)
    assert (ServerError("lost").code, ServerError("lost").exit_code) == ("server", 1)


def test_a_text_that_does_not_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_MOST_BYTES", 1000)
    (tmp_path / "long").write_text("x" * 1001)
    with pytest.raises(evaluation.Usage, match="is too large"):
        evaluation.evaluate_text("demo", tmp_path / "long")
    with pytest.raises(NotRegular):
        evaluation.evaluate_text("demo", Path("/dev/zero"))


def test_a_manifest_that_is_not_a_file_is_damage(tmp_path: Path) -> None:
    """A model with an unreadable manifest is not pulled again silently."""
    folder = tmp_path / "models" / "demo" / "bf16"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "manifest.json")
    library = Library(Settings(tmp_path))
    with pytest.raises(DamagedModel):
        library.read("demo:bf16")
