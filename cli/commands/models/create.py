"""Define `moeinf create`: a name with its own system text, parameters and template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeinf.cli.errors import Usage
from moeinf.cli.options import Json, Quiet
from moeinf.cli.output import Output
from moeinf.errors import problem
from moeinf.runtime.config import read_environment
from moeinf.runtime.files.regular import read_regular
from moeinf.runtime.library.modelfile import MOST_BYTES, BadModelfile

NO_QUANTIZE = (
    "name the model with a tag, as in FROM mixtral:q8, or `moeinf pull ./FILE --name N:q8`"
)


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    file: Annotated[
        Path, typer.Option("--file", "-f", metavar="FILE", help="The Modelfile.")
    ] = Path("Modelfile"),
    quantize: Annotated[str | None, typer.Option(hidden=True)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Create a model from a Modelfile: the files of another model with defaults of its own.

    A Modelfile has FROM (a model, or ./FILE.gguf), and SYSTEM, PARAMETER, TEMPLATE (in Jinja),
    MESSAGE and LICENSE as in Ollama. The new model takes no space: its files are links. Requests
    override the defaults. A model that `create` made before is replaced.

    Example: moeinf create mario -f Modelfile
    """
    if quantize is not None:
        raise Usage(f"--quantize is not supported: {NO_QUANTIZE}")
    from moeinf.runtime.jobs.create import create_model, read_modelfile  # imports torch

    out = Output(json=json, quiet=quiet)
    try:
        text = read_regular(file, MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise BadModelfile(f"{file}: {problem(error)}") from error
    except UnicodeDecodeError as error:
        raise BadModelfile(f"{file} is not text in UTF-8") from error
    made = create_model(
        read_environment(), name, read_modelfile(text, file), out.note, out.progress
    )
    base = "" if made.defaults is None else made.defaults.base
    if json:
        out.document({"name": made.name, "tag": made.tag, "base": base})
    else:
        out.done(f"created '{made.model}' from '{base}'")
