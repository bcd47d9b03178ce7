"""Hold the conversation at a terminal: prompt, streaming, slash commands.

Looks and behaves like Ollama's.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import fields, replace

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from moeinf.cli.chat.backends import Partner, parse_form
from moeinf.cli.chat.signals import Leave, interruptible
from moeinf.cli.errors import tell
from moeinf.cli.output import Output
from moeinf.errors import UnusableInput
from moeinf.runtime.config import Settings
from moeinf.runtime.generation.saved_chats import load_conversation, save_conversation
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library
from moeinf.runtime.regular_files import open_regular
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.text.reasoning import thinks

_HELP = (
    ("/set parameter NAME VALUE", "temperature, top_k, top_p, min_p, seed, num_predict, stop, …"),
    ("/set system TEXT", "the system message"),
    ("/set verbose, /set quiet", "show or hide timings, hit rate and bytes read"),
    ("/set think, /set nothink", "whether the model thinks first, where its template asks"),
    ("/set format [SCHEMA], /set noformat", "answers in JSON, of a schema in a file or as it is"),
    ("/set history, /set nohistory", "keep or do not keep what you type"),
    ("/show info|parameters|system|template|cache", "what is loaded and set"),
    ("/save NAME, /load NAME", "keep the conversation, or go on with one"),
    ("/list", "the models on this machine"),
    ("/clear", "forget the conversation"),
    ("/bye", "leave"),
    ('"""', "begin and end a message of several lines"),
)
_FENCE = '"""'
_PLACEHOLDER = HTML("<ansibrightblack>Send a message (/? for help)</ansibrightblack>")


class BadCommand(UnusableInput, ValueError):
    """A slash command is unknown, or lacks a word."""

    code = "bad_command"
    hint = "/?, which shows the commands"


class Repl:
    """One conversation at a terminal; `loop` returns when the user leaves."""

    def __init__(
        self,
        partner: Partner,
        options: SamplingOptions,
        limits: Limits,
        settings: Settings,
        out: Output,
        verbose: bool,
        shows_thinking: bool = True,
    ) -> None:
        self._partner = partner
        self._options = options
        self._limits = limits
        self._settings = settings
        self._out = out
        self._verbose = verbose
        self._shows_thinking = shows_thinking
        self._session: PromptSession[str] = PromptSession(history=self._history(keep=True))
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/show": self._show,
            "/save": self._save,
            "/load": self._load,
            "/list": lambda _: self._list(),
            "/clear": lambda _: self._clear(),
            "/help": lambda _: out.fields(_HELP),
            "/?": lambda _: out.fields(_HELP),
        }

    def loop(self) -> None:
        """Read messages and answer them until /bye or Ctrl-D."""
        while True:
            try:
                text = self._read()
                if text.strip() in ("/bye", "/exit"):
                    return
                if text.startswith("/"):
                    self._command(text.strip())
                elif text.strip():
                    self._answer(text)
            except Leave:
                raise
            except KeyboardInterrupt:
                self._out.line("Use Ctrl + d or /bye to exit.")
            except EOFError:
                return
            except (SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # after any error the conversation goes on
                tell(self._out, error)

    def _read(self) -> str:
        text = self._line(">>> ")
        if not text.lstrip().startswith(_FENCE):
            return text
        text = text.lstrip()[len(_FENCE) :]
        while _FENCE not in text:
            text += "\n" + self._line("... ")
        return text[: text.index(_FENCE)]

    def _line(self, prompt: str) -> str:
        """Return one typed line. Raises KeyboardInterrupt for Ctrl-C, also while the prompt starts.

        The editor handles the key once it runs. Before that, an exception could be raised and lost
        inside a callback of the libraries that start it.
        """
        with interruptible(signal.SIGINT) as pressed:

            def give_up() -> None:
                if pressed():
                    get_app().exit(exception=KeyboardInterrupt())

            text = self._session.prompt(prompt, pre_run=give_up, placeholder=_PLACEHOLDER)
        if pressed():
            raise KeyboardInterrupt
        return text

    def _answer(self, text: str) -> None:
        partner, dropped = self._partner, self._partner.dropped
        with interruptible() as stopped:
            for kind, piece in partner.say(text, self._options, self._limits, stopped):
                if partner.dropped > dropped:
                    count, dropped = partner.dropped - dropped, partner.dropped
                    self._out.note(f"the context is full: the oldest {count} messages were dropped")
                if kind == "answer":
                    self._out.text(piece)
                elif self._shows_thinking:
                    self._out.thinking(piece)
        self._out.text("\n\n")
        if partner.finish_reason == "length":
            self._out.note("the answer ends here because of num_predict or the context's length")
        if self._verbose:
            self._out.fields(partner.verbose(), to_stderr=True)
        for note in partner.notes():
            self._out.note(note)

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise BadCommand(f"unknown command {name!r}")
        command(rest.strip())

    def _set(self, text: str) -> None:
        what, _, rest = text.partition(" ")
        if what in ("verbose", "quiet"):
            self._verbose = what == "verbose"
            self._out.line(f"Set '{what}' mode.")
        elif what in ("history", "nohistory"):
            self._session.history = self._history(keep=what == "history")
            self._session.default_buffer.history = self._session.history
        elif what == "think" and not thinks(self._partner.template()):
            raise BadCommand(f"{self._partner.model} does not support thinking")
        elif what in ("think", "nothink"):
            self._partner.think = what == "think"
            self._out.line(f"Set '{what}' mode.")
        elif what == "system":
            self._partner.system = rest.strip().strip('"')
            self._out.line("Set system message.")
        elif what in ("format", "noformat"):
            self._partner.form = parse_form(rest or "json") if what == "format" else None
            self._out.line(f"Set '{what}' mode.")
        elif what == "parameter":
            self._set_parameter(rest)
        else:
            raise BadCommand(
                "usage: /set parameter|system|verbose|quiet|format|noformat|think|nothink|history"
                "|nohistory"
            )

    def _set_parameter(self, text: str) -> None:
        try:
            words = shlex.split(text)
        except ValueError as error:  # a quotation mark is not closed
            raise BadCommand(f"/set parameter {text}: {error}") from error
        if len(words) < 2:
            raise BadCommand("usage: /set parameter NAME VALUE")
        name, values = words[0], words[1:]
        if name == "stop":
            self._limits = replace(self._limits, stop=tuple(values))
        elif name == "num_predict":
            count = _whole(name, values[0])
            self._limits = replace(self._limits, max_tokens=None if count < 0 else count)
        elif name in {field.name for field in fields(SamplingOptions)}:
            self._options = self._options.having(name, values[0])
        else:
            raise BadCommand(f"unknown parameter {name!r}")
        self._out.line(f"Set parameter '{name}' to '{' '.join(values)}'")

    def _show(self, what: str) -> None:
        out, partner = self._out, self._partner
        if what == "info":
            out.fields(partner.info())
        elif what == "parameters":
            said = partner.parameters(self._options)
            said += [("num_predict", self._limits.max_tokens), ("stop", self._limits.stop or None)]
            out.fields([(name, str(value)) for name, value in said if value is not None])
        elif what == "system":
            out.line(partner.system or "No system message was set.")
        elif what == "template":
            out.line(partner.template() or "The model has no chat template.")
        elif what == "cache":
            out.fields(partner.cache())
        else:
            raise BadCommand("usage: /show info|parameters|system|template|cache")

    def _save(self, name: str) -> None:
        save_conversation(self._settings, name, self._partner.model, self._partner)
        self._out.line(f"Saved the conversation as '{name}'.")

    def _load(self, name: str) -> None:
        model = load_conversation(self._settings, name, self._partner)
        self._out.line(f"Loaded '{name}': {len(self._partner.messages)} messages.")
        if model != str(self._partner.model):
            self._out.note(f"it was held with {model}")

    def _list(self) -> None:
        for entry in Library(self._settings).installed():
            self._out.line(str(entry.name))

    def _clear(self) -> None:
        self._partner.clear()
        self._out.line("Cleared the conversation.")

    def _history(self, keep: bool) -> History:
        """Open the history of typed lines; only its owner can read the file."""
        if not keep:
            return InMemoryHistory()
        path = self._settings.history
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(open_regular(path, os.O_RDWR | os.O_CREAT))
            path.chmod(0o600)
        except OSError as error:
            self._out.note(f"{path} cannot be used ({error.strerror}): what you type is not kept")
            return InMemoryHistory()
        return FileHistory(str(path))


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidValue(f"{name} must be an integer, got {text}") from None
