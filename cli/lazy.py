"""Import a command's module when the command runs, so that the others cost nothing."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group


@dataclass(frozen=True)
class Lazy:
    """Where a command is: `function` of moeinf.cli.commands.`module`.

    summary  the first sentence of its help
    hidden   True: the list of commands leaves it out
    """

    module: str
    function: str
    summary: str
    hidden: bool = False


class LazyCommands(MutableMapping[str, Any]):
    """The commands by their names. Reading one imports its module; keys and lengths do not."""

    def __init__(self, places: dict[str, Lazy]) -> None:
        self.places = places
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            self._found[name] = _imported(name, self.places[name])
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __setitem__(self, name: str, command: Any) -> None:
        self._found[name] = command

    def __delitem__(self, name: str) -> None:
        raise TypeError("a command cannot be removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class LazyGroup(TyperGroup):
    """A group whose help shows the commands without importing them."""

    commands: LazyCommands

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, those of hidden commands as well."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table of commands into the help."""
        places = self.commands.places.items()
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.summary) for name, one in places if not one.hidden])


def _imported(name: str, place: Lazy) -> Any:
    module = import_module(f"moeinf.cli.commands.{place.module}")
    found = getattr(module, place.function)
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    else:
        epilog = getattr(module, "EPILOG", None)
        app.command(name, hidden=place.hidden, epilog=epilog)(found)
    app.callback()(_nothing)
    return light(get_group(app).commands[name])


def light(command: Any) -> Any:
    """Return the command; what needs no conversion is not converted.

    typer's conversion imports pydantic, which takes as long as a third of `list`.
    """
    parameters = command.get_params  # with --help, which is not in command.params

    def get_params(context: Any) -> list[Any]:
        return [_light(parameter) for parameter in parameters(context)]

    command.get_params = get_params
    return command


def _light(parameter: Any) -> Any:
    if not isinstance(parameter.process_value, partial):
        parameter.process_value = partial(_process, parameter, parameter.process_value)
    return parameter


def _process(parameter: Any, convert: Any, context: Any, value: Any) -> Any:
    """Convert a value unless it is a default of its type, or a text without a parser."""
    kind = parameter.type_descriptor
    text = kind.annotation in (str, list[str]) and kind.parameter_info.parser is None
    typed = not isinstance(kind.annotation, type) or isinstance(value, kind.annotation)
    missing = value is None or value == ()
    keep = not parameter.required if missing else text or (typed and value == parameter.default)
    if not keep:
        return convert(context, value)
    if value is None and (parameter.multiple or parameter.nargs == -1):
        value = ()
    called = parameter.callback
    return value if called is None else called(context, parameter, value)


def _nothing() -> None: ...
