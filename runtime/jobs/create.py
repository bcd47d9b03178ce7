"""Make a name with defaults of its own over a model's files, as `ollama create` does."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from moeinf.runtime.config import Settings
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.jobs.ensure import Bars, Note, ensure, make
from moeinf.runtime.library.clone import ModelExists, link_model, name_of_copy
from moeinf.runtime.library.defaults import Defaults, with_defaults
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest, read_manifest, storable, write_manifest
from moeinf.runtime.library.modelfile import Modelfile, parse_modelfile
from moeinf.runtime.library.staging import only_maker
from moeinf.runtime.names import OLLAMA, ModelName, is_path
from moeinf.runtime.text.chat_template import TemplateWorker
from moeinf.runtime.text.tokenizer import chat_template, marks_of

_GGUF = ".gguf"
_UPLOAD = "upload:"  # before the name of a file, as the source of a model
_PROBE = "moeinf-checks-this-template"


def read_modelfile(text: str, file: Path) -> Modelfile:
    """Parse a Modelfile; a path in FROM becomes one from the file's folder. Raises BadModelfile."""
    found = parse_modelfile(text, str(file))
    if found.base.startswith(OLLAMA) or not _is_file(found.base):
        return found
    place = Path(found.base).expanduser()
    found.base = str(place if place.is_absolute() else file.absolute().parent / place)
    return found


def _is_file(base: str) -> bool:
    return is_path(base) or base.lower().endswith(_GGUF)


def create_model(
    settings: Settings,
    target: str,
    given: Modelfile,
    note: Note,
    bars: Bars,
    said: Callable[[str], None] = lambda _: None,
    uploaded: Path | None = None,
) -> Manifest:
    """Make the model `target` of a Modelfile, and return its manifest.

    A model FROM a name shares the files of that model, which is pulled if it is absent. A path is
    imported, and so is `uploaded`, a GGUF file in place of FROM. A model of that name is replaced
    if it was created, too. said: takes what is done.

    Raises InvalidValue, TemplateError, ModelExists, ModelInUse and what ensure and pulling raise.
    """
    for without in given.without_effect:
        note(f"{without} has no effect here, and is left out")
    defaults = given.defaults()
    defaults.check()
    if uploaded is not None or _is_file(given.base):
        return _imported(settings, target, defaults, note, bars, said, uploaded)
    base, folder = ensure(given.base, settings, note, bars)
    name = name_of_copy(target, base)
    defaults = replace(defaults, base=str(base.model)).over(base.defaults)
    said(f"using existing layer sha256:{base.digest}")
    _check(base, folder, defaults)
    made = _with(base, name, defaults)
    said("writing manifest")
    link_model(settings, base, folder, made, lambda before: before.defaults is not None)
    return made


def _imported(
    settings: Settings,
    target: str,
    defaults: Defaults,
    note: Note,
    bars: Bars,
    said: Callable[[str], None],
    uploaded: Path | None,
) -> Manifest:
    """Import a GGUF file or a checkpoint folder under the name, and give it the defaults.

    Without them the name is a plain model for a moment, and stays so after a kill: `create` again.
    """
    path = defaults.base if uploaded is None else str(uploaded)
    name, source = find_source(path, target, settings, note)
    if uploaded is not None:  # it will be gone: the name itself is what can be copied
        source.origin = f"{_UPLOAD}{uploaded.name}"
        defaults = replace(defaults, base=str(name))
    library = Library(settings)
    made_before = library.made_of(name, source.origin, source.revision)
    if made_before is None and library.has(name):
        before = read_manifest(library.folder(name))
        if before.defaults is None and before.source != storable(source.origin):
            raise ModelExists(f"{name} already exists; `moeinf rm {name}` removes it")
    said("parsing GGUF" if path.lower().endswith(_GGUF) else "parsing checkpoint")
    base = made_before or make(name, source, settings, note, bars)
    folder = library.folder(name)
    _check(base, folder, defaults)
    made = _with(base, name, defaults)
    said("writing manifest")
    with only_maker(folder, settings.run):
        library.check_unused(name)
        write_manifest(folder, made)
    return made


def _with(base: Manifest, name: ModelName, defaults: Defaults) -> Manifest:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return replace(base, name=name.name, created_at=now, defaults=defaults)


def _check(base: Manifest, folder: Path, defaults: Defaults) -> None:
    """Raise InvalidValue or TemplateError where a model cannot use the defaults."""
    defaults.check()
    context = defaults.options.limits.context
    if context is not None and context > base.max_context:
        most = f"the context of {base.model} has at most {base.max_context} tokens"
        raise InvalidValue(f"num_ctx: {context} is invalid ({most})")
    template = defaults.template if defaults.template is not None else chat_template(folder)
    if template is None or (
        defaults.template is None and not (defaults.system or defaults.messages)
    ):
        return
    worker = TemplateWorker(template)
    try:
        asked: list[dict[str, Any]] = [{"role": "user", "content": _PROBE}]
        messages = [dict(one) for one in with_defaults(defaults, asked)]
        text = worker.render(messages, add_generation_prompt=True, **marks_of(folder))
    finally:
        worker.close()
    if _PROBE not in text:
        raise InvalidValue("TEMPLATE: it leaves out the user's message (messages[-1].content)")
