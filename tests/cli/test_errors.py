"""Every exception that can reach a person has a code, words, and what to type next."""

from __future__ import annotations

import errno
import importlib
import json
import os
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import moeinf.cli
import moeinf.models
import moeinf.offload
import moeinf.runtime
from moeinf.cli.chat.client import ServerError
from moeinf.cli.chat.repl import BadCommand
from moeinf.cli.commands import eval as evaluation
from moeinf.cli.commands.pull import pull
from moeinf.cli.errors import _WORDS, describe
from moeinf.cli.main import answer
from moeinf.models import FAMILIES, ModelDataError
from moeinf.native import DeviceError, OutOfDeviceMemory
from moeinf.offload.gpu_tier.layer_runner import OutOfMemory
from moeinf.offload.store.budget import DoesNotFit
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import Settings
from moeinf.runtime.hub.listing import RepositoryError
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.manifest import DamagedModel
from moeinf.runtime.library.processes import NotStopped
from moeinf.runtime.sampling.schema_limits import BadFormat
from moeinf.server.serve import CannotListen

# Caught by us before they reach the boundary: ends of work that was asked for, and retries.
OURS_ALONE = {
    "Leave",
    "Insisted",
    "Stopped",
    "RetryLater",
    "Unfinished",
    "BadAnswer",
    "BadJson",
    "BadTokenizer",
    "BadVocabulary",
    "Refused",
    "LimitExceeded",
}


BUGS = {"Panic"}  # told as such


class Panic(BaseException):
    """What a panic of a Rust library derives from, too."""


def exceptions() -> dict[str, type[BaseException]]:
    """Every exception class that our floors define, by name."""
    found: dict[str, type[BaseException]] = {}
    for package in (moeinf.cli, moeinf.runtime, moeinf.offload, moeinf.models):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module: ModuleType = importlib.import_module(info.name)
            found |= {
                name: value
                for name, value in vars(module).items()
                if isinstance(value, type)
                and issubclass(value, BaseException)
                and value.__module__ == info.name
            }
    return found


def test_every_exception_of_ours_has_words() -> None:
    others = {"OSError", "MemoryError"}
    others |= {"DeviceError", "OutOfDeviceMemory", "CannotListen"}  # of native, of the server
    ours = exceptions()
    assert set(_WORDS) - others <= set(ours), "words for what nobody raises"
    for name in set(ours) - OURS_ALONE - BUGS:
        ancestors = {ancestor.__name__ for ancestor in ours[name].__mro__}
        assert ancestors & set(_WORDS), f"{name} would be called a bug"


@pytest.mark.parametrize(
    ("error", "code", "exit_code", "words", "hint"),
    [
        (NoSuchModel("olme", ["olmoe"]), "model_not_found", 1, "'olme'", "Did you mean olmoe?"),
        (DoesNotFit(1 << 20, 3 << 20), "does_not_fit", 1, "1.0 MiB", "--memory 3145728"),
        (ExpertReadError("experts/L0/E1", "EIO"), "unreadable_shard", 1, "L0/E1", "verify MODEL"),
        (DamagedModel("dense.safetensors is short"), "damaged_model", 1, "short", "--repair"),
        (NotStopped(17, 3.0), "not_stopped", 1, "process 17", "kill -9 17"),
        (RepositoryError("no repository a/b"), "hub", 1, "a/b", "pull --help"),
        (BadCommand("unknown command '/x'"), "bad_command", 1, "/x", "/?"),
        (DeviceError("CUDA_ERROR_UNKNOWN"), "device_failed", 1, "CUDA", "--device cpu"),
        (OutOfDeviceMemory("cuMemAlloc"), "out_of_memory", 1, "cu", "less --device-memory"),
        (OutOfMemory("none left"), "out_of_memory", 1, "none", "a smaller --ctx, free some of"),
        (CannotListen("cannot listen on x:1"), "cannot_listen", 1, "x:1", "--port"),
        (OSError(errno.ENOSPC, "No space left", "/f"), "disk_full", 1, "/f", "Free some disk"),
        (PermissionError(errno.EACCES, "Permission denied", "/f"), "io_error", 1, "/f", "owns"),
        (OSError(errno.EIO, "Input/output error"), "io_error", 1, "Input", "MOEINF_DEBUG"),
        (MemoryError("8 GiB"), "out_of_memory", 1, "8 GiB", "--memory"),
        (InvalidValue("MOEINF_MEMORY is 'x'"), "invalid", 2, "'x'", "--help"),
        (
            ValueError("operands could not be broadcast"),
            "internal",
            1,
            "ValueError",
            "MOEINF_DEBUG",
        ),
        (Panic("index out of range"), "internal", 1, "Panic: index", "MOEINF_DEBUG"),
        (KeyError("x"), "internal", 1, "this is a bug in moeinf: KeyError", "MOEINF_DEBUG=1"),
    ],
)
def test_words(error: BaseException, code: str, exit_code: int, words: str, hint: str) -> None:
    described = describe(error)
    assert (described.code, described.exit_code) == (code, exit_code)
    assert words in described.message
    assert hint in described.hint


def test_the_help_of_pull_names_the_families() -> None:
    """The hint to ModelDataError says so."""
    assert "`moeinf pull --help` names the families" in describe(ModelDataError("x")).hint
    _, _, named = str(pull.__doc__).partition("config.json): ")
    assert [name.strip() for name in named.partition(".")[0].split(",")] == sorted(FAMILIES)


@pytest.mark.parametrize("name", sorted(set(_WORDS) & set(exceptions())))
def test_says_what_happened_and_what_to_type_next(name: str) -> None:
    kind = exceptions()[name]
    arguments = {"NoSuchModel": ("what happened", []), "NotStopped": (17, 3.0)}
    arguments |= {"DoesNotFit": (1, 2), "DeviceDoesNotFit": (1, 2)}
    arguments |= {"ExpertReadError": ("shard", "what happened")}
    described = describe(kind(*arguments.get(name, ("what happened",))))  # type: ignore[arg-type]
    assert described.code.islower()
    assert described.message
    assert "`" in described.hint or described.hint.endswith("."), described
    assert described.exit_code in (1, 2)


def test_a_panic_of_rust_is_a_bug_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a BaseException, which passes `except Exception`."""

    class PanicException(BaseException):
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of range")

    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    monkeypatch.setattr("moeinf.cli.main.typer.main.get_command", lambda _: panic)
    assert answer(["list", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["code"] == "internal"
    assert "PanicException: index out of range" in told["message"]
    assert "PanicException" in (tmp_path / "logs/moeinf.log").read_text()


def test_a_form_that_a_server_refuses_is_wrong_usage_as_it_is_here() -> None:
    there = describe(ServerError("format: too much", "BadFormat"))
    assert there == describe(BadFormat("format: too much"))
    assert (there.code, there.exit_code) == ("bad_format", 2)
    assert describe(ServerError("lost")).exit_code == 1


def test_a_text_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_MOST_BYTES", 1000)
    with pytest.raises(evaluation.Usage, match="more than"):
        evaluation.evaluate_text("demo", Path("/dev/zero"))


def test_a_manifest_that_is_not_a_file_is_damage(tmp_path: Path) -> None:
    """A model whose manifest cannot be read is not pulled once more without a word."""
    folder = tmp_path / "models" / "demo" / "bf16"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "manifest.json")
    library = Library(Settings(tmp_path))
    with pytest.raises(DamagedModel):
        library.read("demo:bf16")
