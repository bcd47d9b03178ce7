"""Run the commands of a conversation that begin with a slash, and keep what they set."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import fields, replace

from moeinf.cli.chat.backends import Partner, parse_form
from moeinf.cli.chat.client import ServerError
from moeinf.cli.output import Output
from moeinf.errors import UnusableInput
from moeinf.runtime.config import Settings
from moeinf.runtime.generation.saved_chats import (
    BadConversation,
    delete_conversation,
    is_saved,
    load_conversation,
    save_conversation,
    saved_conversations,
)
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.text.reasoning import thinks

_HELP = (
    (
        "/set parameter NAME VALUE",
        "temperature, top_k, top_p, min_p, seed, num_predict, num_ctx, stop, …",
    ),
    ("/set memory SIZE", "RAM for the experts: 6GiB, 50%, or auto"),
    ("/set system TEXT", "the system message"),
    ("/set verbose, /set quiet", "show or hide timings, hit rate and bytes read"),
    ("/set think, /set nothink", "whether the model thinks first, where its template asks"),
    ("/set format [SCHEMA], /set noformat", "answers in JSON, of a schema in a file or as it is"),
    ("/set wordwrap, /set nowordwrap", "wrap words at the terminal's edge, or do not"),
    ("/set history, /set nohistory", "keep or do not keep what you type"),
    ("/show info|parameters|system|template|cache", "what is loaded and set"),
    ("/save NAME, /load NAME", "keep the conversation, or go on with one"),
    ("/load MODEL", "change to another model on this machine, and begin again"),
    ("/list, /list chats", "the models on this machine, or the kept conversations"),
    ("/delete NAME", "delete a kept conversation"),
    ("/clear", "forget the conversation"),
    ("/bye", "leave"),
    ('"""', "begin and end a message of several lines"),
)


class BadCommand(UnusableInput, ValueError):
    """A slash command is unknown, or lacks a word."""

    code = "bad_command"
    hint = "/?, which shows the commands"


class SlashCommands:
    """The commands, and the settings of the next answers: options, limits, verbose."""

    def __init__(
        self,
        partner: Partner,
        options: SamplingOptions,
        limits: Limits,
        settings: Settings,
        out: Output,
    ) -> None:
        self.options, self.limits = options, limits
        self.verbose = False
        self.keep_history: Callable[[bool], None] = lambda _: None
        self._partner = partner
        self._settings = settings
        self._out = out
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/show": self._show,
            "/save": self._save,
            "/load": self._load,
            "/list": self._list,
            "/delete": self._delete,
            "/clear": lambda _: self._clear(),
            "/help": lambda _: out.fields(_HELP),
            "/?": lambda _: out.fields(_HELP),
        }

    def run(self, text: str) -> None:
        """Run one line. Raises BadCommand and the errors of the commands."""
        name, _, rest = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise BadCommand(f"unknown command {name!r}")
        command(rest.strip())

    def _set(self, text: str) -> None:
        what, _, rest = text.partition(" ")
        if what in ("verbose", "quiet"):
            self.verbose = what == "verbose"
            self._out.line(f"Set '{what}' mode.")
        elif what in ("history", "nohistory"):
            self.keep_history(what == "history")
        elif what == "think" and not thinks(self._partner.template()):
            raise BadCommand(f"{self._partner.model} does not support thinking")
        elif what in ("think", "nothink"):
            self._partner.think = what == "think"
            self._out.line(f"Set '{what}' mode.")
        elif what in ("wordwrap", "nowordwrap"):
            self._out.wordwrap = what == "wordwrap"
            self._out.line(f"Set '{what}' mode.")
        elif what == "memory":
            self._out.line(self._partner.set_memory(rest))
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
                "usage: /set parameter|memory|system|verbose|quiet|format|noformat|think|nothink"
                "|wordwrap|nowordwrap|history|nohistory"
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
            self.limits = replace(self.limits, stop=tuple(values))
        elif name == "num_predict":
            count = _whole(name, values[0])
            self.limits = replace(self.limits, max_tokens=max(-1, count))
        elif name == "num_ctx":
            self._resize(_whole(name, values[0]))
        elif name in {field.name for field in fields(SamplingOptions)}:
            self.options = self.options.having(name, values[0])
        else:
            raise BadCommand(f"unknown parameter {name!r}")
        self._out.line(f"Set parameter '{name}' to '{' '.join(values)}'")

    def _show(self, what: str) -> None:
        out, partner = self._out, self._partner
        if what == "info":
            out.fields(partner.info())
        elif what == "parameters":
            said = partner.parameters(self.options)
            said += [("num_predict", self.limits.max_tokens), ("stop", self.limits.stop or None)]
            out.fields([(name, str(value)) for name, value in said if value is not None])
        elif what == "system":
            out.line(partner.system or partner.default_system() or "No system message was set.")
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
        if not name:
            raise BadCommand("usage: /load NAME or /load MODEL")
        if not is_saved(self._settings, name):
            self._load_model(name)
            return
        model = load_conversation(self._settings, name, self._partner)
        self._out.line(f"Loaded '{name}': {len(self._partner.messages)} messages.")
        if model != str(self._partner.model):
            self._out.note(f"it was held with {model}")

    def _load_model(self, name: str) -> None:
        near: list[str] = []
        try:
            with self._out.spinner(f"loading {name}"):
                self._partner.load(name)
        except NoSuchModel as error:
            if error.tags:
                raise
            near = error.nearest
        except ServerError as error:
            if error.said != NoSuchModel.code:
                raise
        else:
            self._introduce()
            return
        missing = BadConversation(f"there is no conversation and no model {name!r}")
        missing.hint = ", ".join([*near, "/list or /list chats"])
        raise missing

    def _introduce(self) -> None:
        """Print the facts of a model that has been loaded, as at the start of a conversation."""
        partner = self._partner
        for note in (*(partner.choices if self.verbose else ()), *partner.notes()):
            self._out.note(note)
        self._out.line(partner.summary)

    def _resize(self, context: int) -> None:
        if context < 1:
            raise InvalidValue(f"num_ctx must be at least 1, got {context}")
        with self._out.spinner(f"loading {self._partner.model}"):
            self._partner.resize(context)
        self._introduce()

    def _list(self, what: str) -> None:
        if what not in ("", "models", "chats"):
            raise BadCommand("usage: /list or /list chats")
        if what != "chats":
            for entry in Library(self._settings).installed():
                self._out.line(str(entry.name))
            return
        chats = saved_conversations(self._settings)
        rows = [[c.name, c.model or "damaged", str(c.messages or "-")] for c in chats]
        self._out.table(["NAME", "MODEL", "MESSAGES"], rows)

    def _delete(self, name: str) -> None:
        delete_conversation(self._settings, name)
        self._out.line(f"Deleted the conversation '{name}'.")

    def _clear(self) -> None:
        self._partner.clear()
        self._out.line("Cleared the conversation.")


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidValue(f"{name} must be an integer, got {text}") from None
