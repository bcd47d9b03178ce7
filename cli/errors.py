"""The one place where exceptions become words: a code, what happened, what to type next.

Does not know how errors are shown. Exceptions are looked up by class name along their ancestry, so
that describing an error imports nothing (torch least of all).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, NamedTuple

from moeinf.runtime.sizes import format_bytes

_REPAIR = "`moeinf verify MODEL --repair` mends what is damaged."


class Described(NamedTuple):
    """An error in words. exit_code as in the README: 1 the request failed, 2 wrong usage."""

    code: str
    message: str
    hint: str = ""
    exit_code: int = 1


def _no_such_model(error: Any) -> Described:
    if error.tags:
        pull = f"`moeinf pull {error.wanted}` adds the other"
        return Described("model_not_found", str(error), f"Type {error.tags[0]}; {pull}.")
    near = f"Did you mean {', '.join(error.nearest)}? " if error.nearest else ""
    add = f"`moeinf pull ./folder --name {error.wanted}` adds one."
    return Described("model_not_found", str(error), f"{near}`moeinf list` shows all; {add}")


def _does_not_fit(error: Any) -> Described:
    return Described(
        "does_not_fit",
        f"{format_bytes(error.given_bytes)} for experts is too little: "
        f"at least {error.min_bytes} bytes ({format_bytes(error.min_bytes)}) are needed",
        f"Give more with --memory {error.min_bytes}, or free some memory.",
    )


def _read_error(error: Any) -> Described:
    return Described("unreadable_shard", str(error), _REPAIR)


def _damaged(error: Exception) -> Described:
    return Described("damaged_model", str(error), _REPAIR)


def _os_error(error: OSError) -> Described:
    where = f" ({error.filename})" if error.filename else ""
    happened = f"{error.strerror}{where}" if error.strerror else str(error)
    if error.errno == errno.ENOSPC:
        return Described("disk_full", happened, "Free some disk space and try again.")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return Described("io_error", happened, "Look at who owns it, or set MOEINF_HOME.")
    return Described("io_error", happened, "MOEINF_DEBUG=1 shows where it happened.")


def _plain(code: str, hint: str = "", exit_code: int = 1) -> Callable[[Exception], Described]:
    return lambda error: Described(code, str(error), hint, exit_code)


INTERNAL = "internal"  # the code of every bug of ours


def _server_error(error: Any) -> Described:
    if error.code == "BadFormat":  # here as there
        return _bad_format(error)
    return Described("server", str(error), "Without it: end `moeinf serve`, or set MOEINF_HOST.")


_bad_format = _plain("bad_format", "--format takes json, or a JSON schema.", exit_code=2)
_HELP = "`moeinf COMMAND --help` shows what can be typed."

_WORDS: dict[str, Callable[[Any], Described]] = {
    "NoSuchModel": _no_such_model,
    "BadName": _plain("bad_name", "`moeinf list` shows the names that are taken.", exit_code=2),
    "Usage": _plain("usage", "`moeinf --help` shows what can be typed.", exit_code=2),
    "UnknownSource": _plain("usage", "`moeinf --help` shows what can be typed.", exit_code=2),
    "BadCommand": _plain("bad_command", "/? shows what can be typed."),
    "BadConversation": _plain("bad_conversation", "/save NAME keeps one under that name."),
    "DoesNotFit": _does_not_fit,
    "NoKernels": _plain(
        "device_unavailable",
        "It needs a torch with CUDA (`pip install --force-reinstall torch`), Triton (`pip install "
        "'.[gpu]'` in the clone) with a C compiler, and Ampere or later; or give --device cpu.",
    ),
    "DeviceNotChosen": _plain(
        "device_unavailable", "Give --device cuda with it, or leave --device-memory away."
    ),
    "DeviceUnavailable": _plain(
        "device_unavailable", "Leave --device and --device-memory away, or give --device cpu."
    ),
    "DeviceDoesNotFit": _plain(
        "does_not_fit", "Give more with --device-memory, free some of the device, or --device cpu."
    ),
    "OutOfMemory": _plain(
        "out_of_memory",
        "Give a smaller --ctx, free some of the device, or --device cpu; more --device-memory "
        "helps where the device has it free.",
    ),
    "OutOfDeviceMemory": _plain(
        "out_of_memory", "Give less --device-memory, free some of the device, or --device cpu."
    ),
    "DeviceError": _plain("device_failed", "`--device cpu` does without it."),
    "BadContext": _plain("bad_context", "Give a smaller --ctx."),
    "BadLanguage": _plain("bad_language", "Codes look like eng_Latn and fra_Latn."),
    "PromptTooLong": _plain("prompt_too_long", "Shorten it, or give a larger --ctx."),
    "CannotCompare": _plain(
        "cannot_compare",
        "`moeinf eval NAME:q4 --file TEXT --against NAME:bf16` compares two tags of a model.",
        exit_code=2,
    ),
    "ModelInUse": _plain("model_in_use", "`moeinf stop MODEL` unloads it."),
    "ModelExists": _plain("model_exists", "Or copy to another name."),
    "NotRunning": _plain("not_running", "`moeinf ps` shows what runs."),
    "NotStopped": lambda error: Described(
        "not_stopped", str(error), f"`kill -9 {error.pid}` ends it in any case."
    ),
    "CannotRepair": _plain("cannot_repair", "`moeinf rm MODEL`, then pull it anew."),
    "NoModelUsed": _plain("no_model_used", "Name one: `moeinf trace MODEL --dataset demo`."),
    "NoSuchDataset": _plain("no_such_dataset", "`moeinf trace --help` has examples.", exit_code=2),
    "BadDataset": _plain(
        "bad_dataset",
        "A .txt file has a prompt per line; .jsonl and .parquet a column named prompt.",
    ),
    "DatasetUnavailable": _plain(
        "dataset_unavailable",
        "Without the hub: `--dataset demo`, or --dataset with a .jsonl, .txt or .parquet file.",
    ),
    "ForeignEamc": _plain("foreign_eamc", "`moeinf eamc export MODEL FILE` writes what fits."),
    "NoMatplotlib": _plain("no_matplotlib", "`pip install matplotlib` adds it."),
    "RepositoryError": _plain("hub", "`moeinf pull --help` says how models are named."),
    "DownloadFailed": _plain("download_failed", "Type the same again: what has arrived is kept."),
    "PullInProgress": _plain("pull_in_progress", "Wait for it to end."),
    "NewerModel": _plain(
        "newer_model", "Update moeinf, or `moeinf rm MODEL` and `moeinf pull MODEL` again."
    ),
    "OlderModel": _plain(
        "older_model", "`moeinf pull MODEL` replaces it, `moeinf rm MODEL` removes it."
    ),
    "DamagedModel": _damaged,
    "ExpertReadError": _read_error,
    "NotFiniteWeights": _plain(
        "broken_weights", "`moeinf pull --allow-nan` goes on; the model may then fail at any token."
    ),
    "NotFiniteLogits": _plain(
        "not_finite", "`moeinf verify MODEL` checks its files; another tag has other numbers."
    ),
    "BadCheckpoint": _plain(
        "bad_checkpoint",
        "A checkpoint has config.json, tokenizer.json and *.safetensors, all of them whole.",
    ),
    "UnsupportedQuantisation": _plain(
        "unsupported_quantisation", "`moeinf pull ORG/NAME:q4` quantises weights of 16 bits here."
    ),
    "ModelDataError": _plain("unsupported_model", "`moeinf pull --help` names the families."),
    "ServerError": _server_error,
    "CannotListen": _plain(
        "cannot_listen", "`moeinf serve --port N` takes another port, MOEINF_HOST another address."
    ),
    "BadFormat": _bad_format,
    "TemplateError": _plain("bad_template", "`--raw` sends the prompt without the template."),
    "TokenizerFailed": _plain("bad_tokenizer", "Shorten the text, or pull another model."),
    "MemoryError": lambda error: Described(
        "out_of_memory", f"not enough memory: {error}", "Give less --memory or a smaller --ctx."
    ),
    "BadContainer": _plain("bad_trace", "`moeinf trace --out FILE.eam` writes one."),
    "OtherShape": _plain("bad_trace", "`moeinf trace MODEL --out FILE.eam` records its own."),
    "BadRouteTrace": _plain("bad_trace", "`moeinf trace --out FILE.eam` writes a recording."),
    "OutputFailed": lambda error: Described(
        "output_failed", error.strerror or str(error), "Free some space, or write elsewhere."
    ),
    "OSError": _os_error,
    "InvalidValue": _plain("invalid", _HELP, exit_code=2),
    "UnknownChoice": _plain(
        "invalid", "`moeinf simulate --help` shows what there is.", exit_code=2
    ),
    "ContextFull": _plain("bad_context", "Give a larger --ctx."),
}


def describe(error: BaseException) -> Described:
    """The words for any exception; what no class of ours announces is called a bug."""
    for ancestor in type(error).__mro__:
        words = _WORDS.get(ancestor.__name__)
        if words is not None:
            return words(error)
    return Described(
        INTERNAL,
        f"this is a bug in moeinf: {type(error).__name__}: {error}",
        "MOEINF_DEBUG=1 shows where it happened.",
    )
