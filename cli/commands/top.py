"""Define `moeinf top`: watch where a running model's experts are, and their use."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import quote

import typer

from moeinf.cli.chat.client import Client, ServerError, serving
from moeinf.cli.commands.stop import NotRunning
from moeinf.cli.options import Json, installed_models
from moeinf.cli.output import Output, draw
from moeinf.cli.views.expert_frame import History, lines_of
from moeinf.runtime.config import read_environment, read_server_environment
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.system import Unsupported

try:
    import termios
    import tty
except ImportError:  # Windows
    NO_KEYS = True
else:
    NO_KEYS = False

_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, no cursor
_HOME, _LINE_END, _SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
_LEAVE = ("q", "Q", "\x03", "")
_SIZE = os.terminal_size((80, 24))


def top(
    model: Annotated[str, typer.Argument(metavar="MODEL[:TAG]", autocompletion=installed_models)],
    json: Json = False,
) -> None:
    """Watch where the experts of a model on a server are, and how often they are used.

    A character is an expert, a line a layer. Press q to quit. Without a terminal, print one frame.

    Example: moeinf top demo
    """
    out, settings = Output(json=json), read_environment()
    name = str(Library(settings).find(model)[0])
    registry = Registry(settings.run)
    servers = serving(registry, name)
    if not servers:
        error = NotRunning(f"no server runs {name}")
        error.hint = f"`moeinf serve`, then `moeinf run {name}`"
        raise error
    client = Client.at(servers[0], read_server_environment().api_key, registry)
    path = f"/api/experts?model={quote(name, safe='')}"
    history = History()
    if json:
        out.document(client.ask("GET", path, None))
    elif NO_KEYS:
        raise Unsupported(f"single keys cannot be read on {sys.platform}")
    elif not _can_draw():
        _show(client.ask("GET", path, None), history, out)
    else:
        _watch(client, path, history)


def _can_draw() -> bool:
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and not dumb


def frame_lines(
    frame: dict[str, Any], history: History, size: os.terminal_size, moves: bool
) -> list[str]:
    """Return the lines of a frame. moves: at a terminal, where others follow it."""
    try:
        history.add(frame)
        return lines_of(
            frame,
            history,
            size.columns,
            size.lines,
            colour=moves and not os.environ.get("NO_COLOR"),
            ascii_only="utf" not in (sys.stdout.encoding or "").lower(),
            foot="    q leaves" if moves else "",
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ServerError(f"the server's answer has another form than expected: {error}") from error


def _show(frame: dict[str, Any], history: History, out: Output) -> None:
    for line in frame_lines(frame, history, _SIZE, False):
        out.line(line)


def _watch(client: Client, path: str, history: History) -> None:
    """Draw frames until a key or the end of the model."""
    with _screen():
        left = False

        def leave() -> bool:
            nonlocal left
            if not left and select.select([sys.stdin], [], [], 0)[0]:
                left = os.read(sys.stdin.fileno(), 1).decode(errors="replace") in _LEAVE
            return left

        for frame in client.lines(f"{path}&stream=1", None, leave, "GET"):
            size = os.get_terminal_size(sys.stdout.fileno())
            lines = frame_lines(frame, history, size, True)
            draw(_HOME + f"{_LINE_END}\r\n".join(lines) + _LINE_END + _SCREEN_END)
    if not left:
        raise NotRunning("the model was unloaded")


@contextmanager
def _screen() -> Iterator[None]:
    """Use another screen and read single keys inside the block."""
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    draw(_BEGIN)
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
        draw(_END)
