"""Define the `moeinf` command: its subcommands, and the one boundary that catches errors.

Command modules import torch only when they run, so that `--help` and `list` answer at once.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated

import typer

from moeinf.cli.commands.help import help_of
from moeinf.cli.commands.measuring.bench import bench
from moeinf.cli.commands.measuring.devices import devices
from moeinf.cli.commands.measuring.eamc import eamc
from moeinf.cli.commands.measuring.eval import evaluate_text
from moeinf.cli.commands.measuring.plan import plan
from moeinf.cli.commands.measuring.simulate import simulate
from moeinf.cli.commands.measuring.trace import trace
from moeinf.cli.commands.models.cp import cp
from moeinf.cli.commands.models.export import export
from moeinf.cli.commands.models.list_models import list_models
from moeinf.cli.commands.models.prune import prune
from moeinf.cli.commands.models.pull import pull
from moeinf.cli.commands.models.rm import rm
from moeinf.cli.commands.models.search import search
from moeinf.cli.commands.models.show import show
from moeinf.cli.commands.models.verify import verify
from moeinf.cli.commands.ps import ps
from moeinf.cli.commands.run import run
from moeinf.cli.commands.serve import ENVIRONMENT, serve
from moeinf.cli.commands.set_memory import set_memory
from moeinf.cli.commands.stop import stop
from moeinf.cli.errors import tell
from moeinf.cli.options import Usage
from moeinf.cli.output import Output, flush
from moeinf.runtime.config import read_environment
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.version import version as this_version

_INTERRUPTED = 130

app = typer.Typer(
    name="moeinf",
    help="Run big Mixture-of-Experts models on machines with little memory.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run)
app.command("pull")(pull)
app.command("list")(list_models)
app.command("ls", hidden=True)(list_models)
app.command("search")(search)
app.command("show")(show)
app.command("plan")(plan)
app.command("bench")(bench)
app.command("eval")(evaluate_text)
app.command("ps")(ps)
app.command("stop")(stop)
app.command("set")(set_memory)
app.command("cp")(cp)
app.command("rm")(rm)
app.command("export")(export)
app.command("trace")(trace)
app.add_typer(eamc, name="eamc")
app.command("simulate")(simulate)
app.command("verify")(verify)
app.command("prune")(prune)
app.command("devices")(devices)
app.command("serve", epilog=ENVIRONMENT)(serve)
app.command("help")(help_of)


def _version(wanted: bool) -> None:
    if wanted:
        Output().line(f"moeinf version is {this_version()}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-v", callback=_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@cache
def _command() -> Callable[..., object]:
    return typer.main.get_command(app)


def answer(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, 1, 2 or 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows '?'
            stream.reconfigure(errors="replace")
    out = Output(json="--json" in arguments)
    try:
        code = _command()(args=list(arguments), prog_name="moeinf", standalone_mode=False)
        flush()  # a failure is shown here; at the end of the process it could not be
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        return tell(out, _with_help(Usage(error.format_message()), arguments))
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of the output has left, so that no error is shown
        sys.stderr.close()
        return 1
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        if _debugging():
            out.trace(error)
        if isinstance(error, Usage):
            error = _with_help(error, arguments)
        return tell(out, error)


def _with_help(error: Usage, arguments: Sequence[str]) -> Usage:
    """Return the error with a hint that names the help of its command."""
    names = {command.name for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    named = next((word for word in arguments if word in names), None)
    if named is not None:
        error.hint = f"`moeinf {named} --help`"
    return error


def _debugging() -> bool:
    try:
        return read_environment().debug
    except InvalidValue:
        return False
