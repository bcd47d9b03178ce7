"""Read the short names of models from aliases.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from moeinf.runtime.names import DEFAULT_TAG, DEMO, KEPT_TAGS, TAGS, BadName, parse_name

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's takes a tenth of the time
# Bits per weight, with the scales of quantised groups, without 8-bit embeddings and headers.
_BITS = {
    "f32": 32.0,
    "bf16": 16.0,
    "q8": 8.5,
    "q6k": 6.56,
    "q4d8": 5.8,
    "q5k": 5.5,
    "q4k": 4.5,
    "q4": 4.5,
    "mxfp4": 4.25,
    "q3": 3.5,
    "q2": 2.5,
}


@dataclass(frozen=True)
class Entry:
    """One model with a short name. The head of aliases.yaml describes the fields."""

    name: str
    repo: str
    family: str
    licence: str
    parameters: float  # billions
    aliases: tuple[str, ...] = ()
    revision: str | None = None
    tag: str = DEFAULT_TAG
    bits: float = 16

    @property
    def disk_bytes(self) -> int:
        """The estimated size on disk with the default tag."""
        return self.sizes()[self.tag]

    @property
    def download_bytes(self) -> int:
        """The estimated size of the published weights."""
        return int(self.parameters * 1e9 * self.bits / 8)

    def sizes(self) -> dict[str, int]:
        """Return the estimated size on disk of each tag, in bytes."""
        tags = [tag for tag in TAGS if tag not in KEPT_TAGS or self.tag == tag]
        return {tag: int(self.parameters * 1e9 * _BITS[tag] / 8) for tag in tags}


@cache
def registry() -> Mapping[str, Entry]:
    """Return every entry by its name."""
    text = resources.files("moeinf.runtime.hub").joinpath("aliases.yaml").read_text("utf-8")
    return {
        name: Entry(name=name, **{**raw, "aliases": tuple(raw["aliases"])})
        for name, raw in yaml.load(text, Loader=_LOADER).items()  # noqa: S506
    }


def licence_of(source: str) -> str | None:
    """Return the licence of a source, `demo` or `hub:ORG/NAME[:QUANT]`, or None if unknown."""
    if source == DEMO:
        return "apache-2.0"  # the package's own
    repo = source.removeprefix("hub:").partition(":")[0]
    return next((entry.licence for entry in registry().values() if entry.repo == repo), None)


def entry_of(name: str) -> Entry | None:
    """Return the entry of `name[:tag]`, or None. The name may be an alias or Ollama's name.

    Names with an invalid tag have no entry.
    """
    try:
        wanted = parse_name(name).name
    except BadName:
        return None
    for entry in registry().values():
        if wanted in (entry.name, *entry.aliases):
            return entry
    return None
