"""A model in an older layout becomes today's where it lies, whenever it is killed on the way.

Does not know how a model is found or run: the commands' part is in
tests/cli/commands/test_retile.py.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moeinf.offload.format.layout import ExpertKey, stored_bytes
from moeinf.offload.format.shards import padded_header, shard_path, write_file
from moeinf.runtime.checkpoints.checkpoint import open_checkpoint, read_header
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library import retile as retiling
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import (
    DENSE,
    DamagedModel,
    NewerModel,
    read_manifest,
    write_manifest,
)
from moeinf.runtime.library.repack import LocalSource, repack
from moeinf.runtime.library.retile import retile
from moeinf.runtime.library.verify import verify
from moeinf.runtime.names import ModelName


def untiled(tiles: torch.Tensor, form: str, rows: int, columns: int) -> bytes:
    """Layout 1 of a matrix: codes row by row, then scales. Written from docs/formats.md."""
    blocks, tile_count = -(-rows // 16), -(-columns // 64)
    data = tiles.view(blocks, tile_count, -1)
    words = 4 if form == "Q4" else 8
    codes = data[:, :, : 2 * words * 64].reshape(blocks, tile_count, 2, words, 16, 4)
    scales = data[:, :, 2 * words * 64 :].contiguous().view(torch.float16)
    scales = scales.reshape(blocks, tile_count, 2, 16).permute(0, 3, 1, 2)
    byrow = codes.permute(0, 4, 1, 2, 3, 5).reshape(16 * blocks, 2 * tile_count, 4 * words)
    if form == "Q4":
        whole = torch.cat((byrow & 15, byrow >> 4), -1).view(16 * blocks, -1)
        byrow = whole[:, 0::2] | whole[:, 1::2] << 4
    codes_of = byrow.reshape(16 * blocks, -1)[:rows]
    sizes = scales.reshape(16 * blocks, -1)[:rows]
    return bytes(codes_of.contiguous().numpy().tobytes()) + sizes.contiguous().numpy().tobytes()


def fabricate(folder: Path) -> None:
    """Makes a model of today's layout one of layout 1."""
    manifest = read_manifest(folder)
    source = open_checkpoint(DEMO_CHECKPOINT).tensors
    f, d = manifest.intermediate, manifest.hidden
    records = []
    for record in manifest.files:
        if not record.data_offset:
            records.append(record)
            continue
        tensors = read_header(folder / record.path)
        raw = (folder / record.path).read_bytes()
        header, data = {"__metadata__": {"format": "moeinf", "layout": "1"}}, b""
        for name, tensor in tensors.items():
            part = raw[tensor.offset : tensor.offset + tensor.size_bytes]
            if tensor.dtype == "U8":
                sides = (d, f) if name == "down" else (f, d)
                sides = source[name].shape if record.path == DENSE else sides
                form = "Q4" if stored_bytes("Q4", sides) == len(part) else "Q8"
                part = untiled(torch.frombuffer(bytearray(part), dtype=torch.uint8), form, *sides)
            shape = [len(part)] if tensor.dtype == "U8" else list(tensor.shape)
            span = [len(data), len(data) + len(part)]
            header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": span}
            data += part
        records.append(
            write_file(folder, record.path, padded_header(header, 4096), [memoryview(data)])
        )
    write_manifest(folder, replace(manifest, layout=1, files=tuple(records)))


@pytest.fixture(scope="module", params=["q4", "q8"])
def models(request, tmp_path_factory) -> tuple[Path, Path, ModelName]:
    """Homes with the demo in today's layout, and in layout 1."""
    name = ModelName("demo", request.param)
    today, older = (tmp_path_factory.mktemp(n) for n in ("today", "older"))
    library = Library(Settings(home=today))
    source = LocalSource(open_checkpoint(DEMO_CHECKPOINT), "demo")
    repack(source, library, name, lambda *_: None, lambda _: None)
    shutil.copytree(today, older, dirs_exist_ok=True)
    fabricate(Library(Settings(home=older)).folder(name))
    return today, older, name


def files_of(home: Path, name: ModelName) -> dict[str, bytes]:
    folder = Library(Settings(home=home)).folder(name)
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {os.fspath(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_every_file_becomes_what_a_pull_would_have_written(models, tmp_path):
    today, older, name = models
    home = tmp_path / "home"
    shutil.copytree(older, home)
    library = Library(Settings(home=home))
    told = []
    manifest = retile(library, name, lambda *progress: told.append(progress))
    assert files_of(home, name) == files_of(today, name)
    assert manifest == read_manifest(library.folder(name))
    wanted = read_manifest(Library(Settings(home=today)).folder(name))
    assert (manifest.files, manifest.layout, manifest.dense_bytes) == (
        wanted.files, wanted.layout, wanted.dense_bytes,
    )  # fmt: skip
    assert verify(library.folder(name), manifest, lambda *_: None) == []
    phase, done, total = told[-1]
    assert (phase, done) == ("re-tiling", total)
    assert retile(library, name, lambda *_: pytest.fail("there was nothing to do")) == manifest


def killed_at(point: int, library: Library, name: ModelName) -> bool:
    """Whether a re-tiling that dies at its `point`-th rename or sync died, and did not end."""
    child = os.fork()
    if child == 0:
        count = 0

        def dying(function):
            def call(*arguments, **named):
                nonlocal count
                count += 1
                if count == point:
                    os._exit(9)
                return function(*arguments, **named)

            return call

        for owner, function in (
            (os, "rename"),
            (os, "replace"),
            (Path, "rename"),
            (Path, "replace"),
        ):
            setattr(owner, function, dying(getattr(owner, function)))
        retiling.sync_filesystem = dying(retiling.sync_filesystem)
        retiling._WORKERS = 1
        try:
            retile(library, name, lambda *_: None)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_killed_anywhere_it_goes_on(models, tmp_path, monkeypatch):
    today, older, name = models
    monkeypatch.setattr(retiling, "_BATCH_BYTES", 1 << 20)
    points = 0
    for point in (1, 7, 120, 260, 420):
        home = tmp_path / str(point)
        shutil.copytree(older, home)
        library = Library(Settings(home=home))
        points += killed_at(point, library, name)
        assert killed_at(3, library, name) or point > 300  # and again, going on
        retile(library, name, lambda *_: None)
        assert files_of(home, name) == files_of(today, name)
    assert points >= 3


def test_a_file_of_neither_layout_is_named(models, tmp_path):
    _, older, name = models
    home = tmp_path / "home"
    shutil.copytree(older, home)
    library = Library(Settings(home=home))
    shard = library.folder(name) / shard_path(ExpertKey(2, 5))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:])
    with pytest.raises(DamagedModel, match=r"L002/E005.* is not what was pulled"):
        retile(library, name, lambda *_: None)


def test_what_is_not_of_today_does_not_run_and_what_is_newer_is_refused(models, tmp_path):
    _, older, name = models
    settings = Settings(home=older)
    folder = Library(settings).folder(name)
    with pytest.raises(DamagedModel, match="has an older layout"):
        Engine(read_manifest(folder), folder, EngineConfig(), settings)
    text = json.loads((folder / "manifest.json").read_text())
    for changed in ({"layout": 3}, {"format": 2}):
        (tmp_path / "manifest.json").write_text(json.dumps({**text, **changed}))
        with pytest.raises(NewerModel, match="is newer than this moeinf"):
            read_manifest(tmp_path)
