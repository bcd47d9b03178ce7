"""The `moeinf` command: which commands there are, and the one boundary that catches errors.

Does not know what any command does. Command modules import torch only when they run, so that
`--help` and `list` answer at once.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from moeinf.cli.bench import bench
from moeinf.cli.cp import cp
from moeinf.cli.devices import devices
from moeinf.cli.eamc import eamc
from moeinf.cli.errors import Described, describe
from moeinf.cli.eval import evaluate_text
from moeinf.cli.list_models import list_models
from moeinf.cli.output import Output
from moeinf.cli.plan import plan
from moeinf.cli.prune import prune
from moeinf.cli.ps import ps
from moeinf.cli.pull import pull
from moeinf.cli.rm import rm
from moeinf.cli.run import run
from moeinf.cli.serve import serve
from moeinf.cli.show import show
from moeinf.cli.simulate import simulate
from moeinf.cli.stop import stop
from moeinf.cli.trace import trace
from moeinf.cli.verify import verify
from moeinf.runtime.bug_log import note_bug
from moeinf.runtime.config import read_environment
from moeinf.runtime.panic import as_exception
from moeinf.runtime.version import version as this_version

_INTERRUPTED = 130

app = typer.Typer(
    name="moeinf",
    help="Runs big Mixture-of-Experts models on machines with little memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run)
app.command("pull")(pull)
app.command("list")(list_models)
app.command("ls", hidden=True)(list_models)
app.command("show")(show)
app.command("plan")(plan)
app.command("bench")(bench)
app.command("eval")(evaluate_text)
app.command("ps")(ps)
app.command("stop")(stop)
app.command("cp")(cp)
app.command("rm")(rm)
app.command("trace")(trace)
app.add_typer(eamc, name="eamc")
app.command("simulate")(simulate)
app.command("verify")(verify)
app.command("prune")(prune)
app.command("devices")(devices)
app.command("serve")(serve)


def _version(wanted: bool) -> None:
    if wanted:
        Output().line(f"moeinf version is {this_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-v", callback=_version, is_eager=True, help="The version.")
    ] = False,
) -> None: ...


def answer(arguments: Sequence[str], interrupted: Callable[[], bool] = lambda: False) -> int:
    """Runs one command line and returns its exit code: 0, 1, 2 or 130.

    interrupted: whether a KeyboardInterrupt was raised. Libraries that are being imported may
    swallow it and go on with half of themselves: what they fail with then is not told.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows '?'
            stream.reconfigure(errors="replace")
    out = Output(json="--json" in arguments)
    try:
        code = typer.main.get_command(app)(
            args=list(arguments), prog_name="moeinf", standalone_mode=False
        )
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        out.error("usage", error.format_message(), "`moeinf --help` shows what can be typed.")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone: nobody is left to tell
        sys.stderr.close()
        return 1
    except SystemExit:
        raise
    except BaseException as raised:  # a panic of Rust is no Exception
        told = as_exception(raised)
        if _debugging():
            traceback.print_exc()
        if interrupted():
            return _INTERRUPTED
        words = describe(told)
        out.error(words.code, words.message, _where(words, told))
        return words.exit_code


def _where(words: Described, error: Exception) -> str:
    """The hint; of a bug, the file that its traceback was written to."""
    if words.code != "internal":
        return words.hint
    try:
        path = note_bug(read_environment(), error)
    except ValueError:  # an environment that cannot be read
        path = None
    return f"{words.hint[:-1]}, and so does {path}." if path is not None else words.hint


def _debugging() -> bool:
    try:
        return read_environment().debug
    except ValueError:
        return False
