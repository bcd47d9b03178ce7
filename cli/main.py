"""Define the `moeinf` command: its subcommands, and the one boundary that catches errors.

A command's module is imported when it is called, and torch when it runs: `list` answers at once.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import typer

from moeinf.cli.errors import Usage, tell
from moeinf.cli.lazy import Lazy, LazyCommands, LazyGroup, light
from moeinf.cli.output import Output, flush
from moeinf.runtime.config import read_environment
from moeinf.runtime.invalid import InvalidValue

_INTERRUPTED = 130

COMMANDS = {
    "run": Lazy("run", "run", "Answer a prompt, or hold a conversation."),
    "pull": Lazy("models.pull", "pull", "Fetch a model, or read a checkpoint or GGUF file."),
    "list": Lazy("models.list_models", "list_models", "List the models on this machine."),
    "ls": Lazy("models.list_models", "list_models", "List the models.", hidden=True),
    "search": Lazy("models.search", "search", "List the models that have a short name."),
    "show": Lazy("models.show", "show", "Show a model's shape, sizes and origin."),
    "plan": Lazy("measuring.plan", "plan", "Show whether a model runs here, and how fast."),
    "bench": Lazy("measuring.bench", "bench", "Measure a model's speed and memory."),
    "eval": Lazy("measuring.eval", "evaluate_text", "Measure a model's perplexity on a text."),
    "ps": Lazy("ps", "ps", "Show which models run."),
    "top": Lazy("top", "top", "Watch the experts of a running model."),
    "stop": Lazy("stop", "stop", "Unload a model."),
    "set": Lazy("set_memory", "set_memory", "Change the memory of a running model."),
    "create": Lazy("models.create", "create", "Make a name with a Modelfile's defaults."),
    "cp": Lazy("models.cp", "cp", "Copy a model under a new name; it takes no space."),
    "rm": Lazy("models.rm", "rm", "Delete models."),
    "export": Lazy("models.export", "export", "Write a model as a GGUF file."),
    "trace": Lazy("measuring.trace", "trace", "Record which experts a data set's prompts use."),
    "eamc": Lazy("measuring.eamc", "eamc", "Show or change what a model remembers of requests."),
    "simulate": Lazy("measuring.simulate", "simulate", "Replay recorded routing under policies."),
    "verify": Lazy("models.verify", "verify", "Check a model's files against their hashes."),
    "prune": Lazy("models.prune", "prune", "Remove unfinished pulls."),
    "devices": Lazy("measuring.devices", "devices", "Measure memory, drive and GPUs."),
    "launch": Lazy("launch", "launch", "Start a coding agent that uses the server."),
    "doctor": Lazy("doctor", "doctor", "Say what is missing here, and what to type for it."),
    "stage": Lazy("stage", "stage", "Experimental: compute some layers for another machine."),
    "serve": Lazy("serve", "serve", "Answer over HTTP, as Ollama and OpenAI do."),
    "help": Lazy("help", "help_of", "Show the help of a command."),
}
app = typer.Typer(
    name="moeinf",
    cls=LazyGroup,
    help="Run big Mixture-of-Experts models on machines with little memory.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-v", help="The version; --verbose adds what it runs on.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", hidden=True)] = False,
) -> None:
    if version:
        from moeinf.runtime.version import surroundings  # the modules take 15 ms
        from moeinf.runtime.version import version as this_version

        Output().line(f"moeinf version is {this_version()}")
        if verbose:
            Output().fields(list(surroundings().items()))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@cache
def command_line() -> LazyGroup:
    """Return the whole command line."""
    group = light(typer.main.get_command(app))
    assert isinstance(group, LazyGroup)
    group.commands = LazyCommands(COMMANDS)
    return group


def answer(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, 1, 2 or 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows '?'
            stream.reconfigure(errors="replace")
    out = Output(json="--json" in arguments)
    try:
        code = command_line()(args=list(arguments), prog_name="moeinf", standalone_mode=False)
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
    named = next((word for word in arguments if word in COMMANDS), None)
    if named is not None:
        error.hint = f"`moeinf {named} --help`"
    return error


def _debugging() -> bool:
    try:
        return read_environment().debug
    except InvalidValue:
        return False
