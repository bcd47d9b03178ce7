"""Hostile repositories: names, sizes, headers, configs, tokenizers and templates, combined.

A pull makes a model that verifies, or ends in a documented error. It writes nothing outside the
model's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeinf.models.base import ModelDataError
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.hub.listing import RepositoryError, read_listing
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.verify import verify
from moeinf.runtime.names import ModelName
from moeinf.runtime.sizes import parse_memory
from moeinf.runtime.text.chat_template import TemplateError
from scripts.make_checkpoint import config, make_checkpoint
from tests.faults.conftest import STRIDE, Tally

NAMES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "../x.safetensors", "/etc/x.safetensors", "..", ".", "", "C:\\x.safetensors",
            "a\0.safetensors", "\u202etxt.safetensors", "A.safetensors", "a" * 300, "x/../../y",
            "config.json", "model.safetensors", "model.safetensors.index.json", "CON", "\ud800",
            "tokenizer.json", "modeling_evil.py", "./config.json", "config.json/",
        ]
    ),
)  # fmt: skip
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), NAMES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def slowly(every_point: bool) -> settings:
    many = 2000 // STRIDE if every_point else 60
    return settings(
        max_examples=many, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )


def ignore(*_: object) -> None:
    """Ignore progress and notes."""


def test_what_the_hub_says(every_point: bool, tally: Tally) -> None:
    siblings = st.lists(
        st.one_of(
            st.fixed_dictionaries(
                {"rfilename": NAMES},
                optional={"size": JUNK, "blobId": JUNK, "lfs": JUNK},
            ),
            JUNK,
        ),
        max_size=4,
    )

    @slowly(every_point)
    @given(
        st.fixed_dictionaries(
            {"id": st.just("org/x")},
            optional={
                "sha": st.one_of(st.just("a" * 40), st.just("../" * 13 + "a"), JUNK),
                "siblings": st.one_of(siblings, JUNK),
            },
        )
    )
    def look(about: dict[str, Any]) -> None:
        try:
            found = read_listing(json.dumps(about).encode(), "org/x", None, "model")
        except RepositoryError:
            tally("refused")
            return
        for name, file in found.files.items():
            assert not {"", "..", "."}.intersection(name.split("/"))
            assert file.name == name.rpartition("/")[2]
            assert 0 <= file.size_bytes < 1 << 48
        assert len(found.commit) == 40
        assert found.commit.isalnum()
        tally("read")

    look()


FILES = (
    "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    "generation_config.json", "chat_template.jinja",
)  # fmt: skip


def test_what_a_repository_holds(tmp_path: Path, every_point: bool, tally: Tally) -> None:
    """One JSON value or some bytes of a file are invalid."""
    whole = tmp_path / "whole"
    make_checkpoint(whole, config(1, 2, 64, 48, 1), file_bytes=30_000)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if not (whole / name).exists():
            shutil.copy(DEMO_CHECKPOINT / name, whole / name)
    home, folder = tmp_path / "home", tmp_path / "hostile"
    weights = sorted(path.name for path in whole.glob("*.safetensors"))

    @slowly(every_point)
    @given(st.sampled_from([*FILES, *weights]), st.data())
    def take(name: str, data: st.DataObject) -> None:
        for old in (folder, home):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(whole, folder)
        _spoil(folder / name, data)
        before = _everything(tmp_path, home)
        library, model = Library(Settings(home)), ModelName("x", "bf16")
        try:
            source = LocalSource(open_checkpoint(folder), "x")
            manifest = repack(source, library, model, ignore, ignore)
        except (BadCheckpoint, ModelDataError) as error:
            assert len(str(error)) < 2000
            assert not library.has(model)
            tally("refused")
        else:
            assert verify(library.folder(model), manifest, ignore) == []
            try:
                run = EngineConfig(memory=parse_memory("100%"), context=32, trace=False)
                Engine.open(manifest, library.folder(model), run, Settings(home)).close()
                tally("a model that verifies")
            except (BadCheckpoint, ModelDataError, TemplateError, ValueError):
                tally("refused when run")
        assert _everything(tmp_path, home) == before

    take()


def _spoil(path: Path, data: st.DataObject) -> None:
    raw = path.read_bytes() if path.exists() else b"{}"
    if path.suffix == ".json" and data.draw(st.booleans()):
        document = json.loads(raw)
        holder = document
        while isinstance(holder, dict) and holder:
            key = data.draw(st.sampled_from(sorted(holder)))
            if not isinstance(holder[key], dict) or data.draw(st.booleans()):
                holder[key] = data.draw(JUNK)
                break
            holder = holder[key]
        path.write_text(json.dumps(document))
        return
    if path.suffix == ".safetensors" and data.draw(st.booleans()):
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        name = data.draw(st.sampled_from(sorted(header)))
        header[data.draw(st.one_of(st.just(name), NAMES))] = data.draw(
            st.one_of(JUNK, st.just(header.pop(name)))
        )
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
        return
    changed = bytearray(raw)
    at = data.draw(st.integers(0, len(changed)))
    changed[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    path.write_bytes(changed)


def _everything(root: Path, but: Path) -> set[str]:
    """Return every file outside a home."""
    found = (str(Path(at) / name) for at, _, names in os.walk(root) for name in names)
    return {path for path in found if not path.startswith(str(but))}
