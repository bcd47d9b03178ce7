"""Hold the conversation at a terminal: the prompt, its history, streamed answers.

Looks and behaves like Ollama's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from moeinf.cli.chat.backends import Partner, cut_off
from moeinf.cli.chat.signals import Leave, interruptible
from moeinf.cli.chat.slash_commands import SlashCommands
from moeinf.cli.chat.waiting import awaited
from moeinf.cli.errors import tell
from moeinf.cli.output import Output
from moeinf.errors import problem
from moeinf.runtime.config import Settings
from moeinf.runtime.files.atomic import make_folder_durably
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.requests import Limits, SamplingOptions

_FENCE = '"""'
_PLACEHOLDER = HTML("<ansibrightblack>Send a message (/? for help)</ansibrightblack>")


class KeptHistory(FileHistory):
    """The typed lines in a file. Where it cannot be written, one note tells it. tell: a note."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self._path, self._tell, self._fails = path, tell, False
        super().__init__(str(path))

    def store_string(self, string: str) -> None:
        """Append a line, unless an earlier one could not be written."""
        if self._fails:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._fails = True
            self._tell(f"{self._path}: {problem(error)}: what you type is not kept")


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
        self._settings = settings
        self._out = out
        self._shows_thinking = shows_thinking
        self._session: PromptSession[str] = PromptSession(history=self._history(keep=True))
        self._commands = SlashCommands(partner, options, limits, settings, out)
        self._commands.verbose = verbose
        self._commands.keep_history = self._keep_history
        partner.kept = isinstance(self._session.history, FileHistory)

    def loop(self) -> None:
        """Read messages and answer them until /bye or Ctrl-D."""
        while True:
            try:
                text = self._read()
                if text.strip() in ("/bye", "/exit"):
                    return
                if text.startswith("/"):
                    self._commands.run(text.strip())
                elif text.strip():
                    self._answer(text)
            except Leave:
                raise
            except KeyboardInterrupt:
                if not self._partner.ready:
                    raise
                self._out.line("Use Ctrl + d or /bye to exit.")
            except EOFError:
                return
            except (SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # with a model left, the conversation goes on
                if not self._partner.ready:
                    raise
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
        try:
            self._print_answer(text)
        finally:
            self._out.end_answer()
        partner = self._partner
        self._out.text("\n")
        if self._commands.verbose:
            self._out.fields(partner.verbose(), to_stderr=True)
        for note in (*cut_off(partner, "num_predict"), *partner.notes()):
            self._out.note(note)

    def _print_answer(self, text: str) -> None:
        partner, dropped = self._partner, self._partner.dropped
        with interruptible() as stopped:
            answer = partner.say(text, self._commands.options, self._commands.limits, stopped)
            for kind, piece in awaited(answer, partner, self._out, self._shows_thinking):
                if partner.dropped > dropped:
                    count, dropped = partner.dropped - dropped, partner.dropped
                    self._out.note(f"the context is full: the oldest {count} messages were dropped")
                if kind == "answer":
                    self._out.text(piece)
                elif self._shows_thinking:
                    self._out.thinking(piece)

    def _keep_history(self, keep: bool) -> None:
        self._session.history = self._history(keep)
        self._session.default_buffer.history = self._session.history
        partner = self._partner
        told = partner.messages or partner.system  # perhaps while nothing was kept
        kept = isinstance(self._session.history, FileHistory)
        partner.kept = kept and (partner.kept or not told)

    def _history(self, keep: bool) -> History:
        """Open the history of typed lines; only its owner can read the file."""
        if not keep:
            return InMemoryHistory()
        path = self._settings.history
        try:
            make_folder_durably(path.parent)
            os.close(open_regular(path, os.O_RDWR | os.O_CREAT))
            path.chmod(0o600)
        except OSError as error:
            self._out.note(f"{path} cannot be used ({problem(error)}): what you type is not kept")
            return InMemoryHistory()
        return KeptHistory(path, self._out.note)
