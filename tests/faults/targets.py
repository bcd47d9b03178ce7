"""The fuzzer's targets: every reader of untrusted bytes, as a function of bytes.

A target reads its input or refuses it with the one error that its reader documents. Anything else
is a finding: another exception, a crash, more than a few seconds.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from moeinf.models.base import ModelDataError
from moeinf.models.families import FAMILIES, family_of
from moeinf.native import crc32c
from moeinf.offload.format.array_file import BadContainer
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.recording_file import recording_from_bytes, recording_to_bytes
from moeinf.offload.routing.requests_file import read_requests
from moeinf.offload.routing.route_csv import BadRouteTrace, read_route_csv
from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape
from moeinf.runtime.checkpoints.checkpoint import (
    BadCheckpoint,
    Checkpoint,
    open_checkpoint,
)
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.checkpoints.torch_bin import read_torch_file
from moeinf.runtime.config import Settings
from moeinf.runtime.eamc.collection_file import EamcState, ForeignEamc, import_eamc
from moeinf.runtime.generation.saved_chats import BadConversation, load_conversation
from moeinf.runtime.jobs.datasets.items import BadDataset, Wanted
from moeinf.runtime.jobs.datasets.local import read_file
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.library.manifest import MANIFEST, DamagedModel, read_manifest
from moeinf.runtime.library.staging import JOURNAL, StagingFolder
from moeinf.runtime.names import ModelName
from moeinf.runtime.sampling.sampler import model_defaults
from moeinf.runtime.text.tokenizer import Tokenizer, end_tokens
from tests.faults import request_targets, schema_targets
from tests.faults import tokenizer_targets as files
from tests.faults.checkpoint_targets import CHECKPOINT_TARGETS
from tests.faults.gguf_targets import GGUF_TARGETS
from tests.faults.hub_targets import HUB_TARGETS
from tests.faults.text_targets import TEXT_TARGETS

Seeds = Callable[[], list[bytes]]
_SHAPE = (2, 3)  # layers and experts of the EAMC
_MAKING: dict[str, object] = {"of": "x", "as": "y"}


@dataclass(frozen=True)
class Target:
    """A reader of untrusted bytes.

    check(data, folder) reads `data`, with `folder` for files; refuses: the errors it may raise.
    """

    check: Callable[[bytes, Path], None]
    refuses: tuple[type[Exception], ...]
    seeds: Seeds


def _index(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(b"{}")
    (folder / "a.safetensors").write_bytes(save({"a": torch.ones(2)}))
    (folder / "model.safetensors.index.json").write_bytes(data)
    found = open_checkpoint(folder)
    assert all(tensor.path.parent == folder for tensor in found.tensors.values())


def _config(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(save({"a": torch.ones(2)}))
    (folder / "config.json").write_bytes(data)
    checkpoint = open_checkpoint(folder)
    take_inventory(family_of(checkpoint.config), Checkpoint(folder, checkpoint.config, {}))


def _manifest(data: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(data)
    manifest = read_manifest(folder)
    assert all((folder / f.path).resolve().is_relative_to(folder) for f in manifest.files)


def _eamc_log(data: bytes, folder: Path) -> None:
    shape = SimpleNamespace(layers=_SHAPE[0], experts=_SHAPE[1], model=ModelName("x", "f32"))
    settings = Settings(folder)
    state = settings.state_of(shape.model)
    state.mkdir(parents=True, exist_ok=True)
    for old in state.iterdir():
        old.unlink()
    (state / "eamc.log").write_bytes(data)
    notes: list[str] = []
    EamcState(settings, shape, notes.append).load()  # type: ignore[arg-type]
    kept = sum(path.stat().st_size for path in state.iterdir())
    assert kept >= len(data) or not notes, "something was thrown away"


def _eamc_record(data: bytes, folder: Path) -> None:
    head = json.dumps({"kind": "eamc", "version": 1, "layers": _SHAPE[0], "experts": _SHAPE[1]})
    framed = (struct.pack("<II", len(x), crc32c(x)) + x for x in (head.encode(), data) if x)
    _eamc_log(b"MOEINFL\n" + b"".join(framed), folder)


def _eamc_header(data: bytes, folder: Path) -> None:
    _eamc_log(b"MOEINFL\n" + struct.pack("<II", len(data), crc32c(data)) + data, folder)


def _eamc_export(data: bytes, folder: Path) -> None:
    (folder / "x.eamc").write_bytes(data)
    shape = SimpleNamespace(layers=_SHAPE[0], experts=_SHAPE[1], model="x")
    import_eamc(folder / "x.eamc", shape)  # type: ignore[arg-type]


def _eamc_document(data: bytes, folder: Path) -> None:
    """Read a container with a correct header checksum and the arrays of a valid one."""
    whole = _an_eamc().to_bytes()
    body = whole[16 + struct.unpack_from("<I", whole, 8)[0] :]
    prefix = struct.pack("<8sII", b"MOEINF\r\n", len(data), zlib.crc32(data))
    _eamc_export(prefix + data + body, folder)


def _recording(data: bytes, folder: Path) -> None:
    recording_from_bytes(data)


def _route(data: bytes, folder: Path) -> None:
    (folder / "x.csv").write_bytes(data)
    read_route_csv(folder / "x.csv")


def _recorded_requests(data: bytes, folder: Path) -> None:
    (folder / "x.npz").write_bytes(data)
    read_requests(folder / "x.npz")


def _torch_file(data: bytes, folder: Path) -> None:
    (folder / "x.bin").write_bytes(data)
    for tensor in read_torch_file(folder / "x.bin").values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.size_bytes <= len(data)


def _torch_pickle(data: bytes, folder: Path) -> None:
    """Read a zip file in torch's format around any pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x/data.pkl", data)
        archive.writestr("x/byteorder", b"little")
        archive.writestr("x/data/0", bytes(64))
        archive.writestr("x/version", b"3\n")
    _torch_file(out.getvalue(), folder)


def _tokenizer_config(data: bytes, folder: Path) -> None:
    target = folder / "tokenizer.json"
    if not target.exists():
        target.write_bytes((DEMO_CHECKPOINT / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_bytes(data)
    tokenizer = Tokenizer(folder)
    tokenizer.encode_rendered(tokenizer.guard("a<s>b"))


def _generation(data: bytes, folder: Path) -> None:
    """Read generation settings; invalid values count as missing."""
    (folder / "generation_config.json").write_bytes(data)
    assert all(type(end) is int for end in end_tokens(folder, SimpleNamespace(eos=None)))  # type: ignore[arg-type]
    model_defaults(folder)


def _conversation(data: bytes, folder: Path) -> None:
    settings = Settings(folder)
    settings.conversations.mkdir(parents=True, exist_ok=True)
    (settings.conversations / "x.json").write_bytes(data)
    kept = SimpleNamespace(messages=[], system="", clear=lambda: None)
    load_conversation(settings, "x", kept)  # type: ignore[arg-type]
    assert all(isinstance(message.content, str) for message in kept.messages)


def _journal(data: bytes, folder: Path) -> None:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    (work / JOURNAL).write_bytes(data)
    found = StagingFolder(work, _MAKING)
    assert all((work / path).resolve().is_relative_to(work) for path in found.files)


def _prompts(data: bytes, folder: Path) -> None:
    (folder / "x.jsonl").write_bytes(data)
    read_file(folder / "x.jsonl", Wanted(limit=50))


def _parquet(data: bytes, folder: Path) -> None:
    (folder / "x.parquet").write_bytes(data)
    read_file(folder / "x.parquet", Wanted(limit=50))


@cache
def _an_eamc() -> Eamc:
    eamc = Eamc(4, *_SHAPE)
    eamc.add(np.arange(6, dtype=np.uint32).reshape(_SHAPE), np.ones(_SHAPE, np.uint32))
    return eamc


def _configs() -> list[bytes]:
    from tests.tiny import TINY, tiny_config

    def plain(value: object) -> str:
        return str(value)

    found = [json.dumps(tiny_config(name).to_dict(), default=plain).encode() for name in TINY]
    return [data for data in found if json.loads(data).get("model_type") in FAMILIES]


def _manifests() -> list[bytes]:
    page = 4096
    files = [
        {"path": f"experts/L000/E00{e}.safetensors", "size_bytes": page + 768, "data_offset": page,
         "crc32c": 1, "sha256": "0" * 64}
        for e in range(2)
    ]  # fmt: skip
    about: dict[str, Any] = {
        "name": "x", "tag": "f32", "family": "olmoe", "source": "s", "revision": None,
        "created_at": "2026-01-01T00:00:00+00:00", "layers": 1, "experts": 2, "top_k": 1,
        "hidden": 8, "intermediate": 8, "dtype": "F32", "dense_bytes": 9, "kv_bytes_per_token": 4,
        "max_context": 64, "files": files, "layout": 1, "format": 1,
    }  # fmt: skip
    return [json.dumps({**about, "layout": layout}).encode() for layout in (1, 2)]


def _logs() -> list[bytes]:
    found: list[bytes] = []
    head = json.dumps({"kind": "eamc", "version": 1, "layers": _SHAPE[0], "experts": _SHAPE[1]})
    record = _records()[0]
    log = b"MOEINFL\n"
    for piece in (head.encode(), record, record):
        log += struct.pack("<II", len(piece), crc32c(piece)) + piece
        found.append(log)
    return found


def _records() -> list[bytes]:
    counts = np.ones((2, *_SHAPE), "<u4").tobytes()
    return [struct.pack("<II", *_SHAPE) + zlib.compress(counts, 1)]


def _archives() -> list[bytes]:
    arrays: dict[str, Any] = {
        "ids": np.array([[[0, 1]], [[1, 2]]], np.uint8),
        "weights": np.ones((2, 1, 2), np.float16),
        "offsets": np.array([0, 1, 2]),
        "prompt_len": np.array([0, 1]),
        "label": np.array(["a", "b:c"]),
        "experts": np.int64(4),
    }
    found = []
    for save_arrays in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save_arrays(file, **arrays)
        found.append(file.getvalue())
    return found


def _recordings() -> list[bytes]:
    shape = RoutingShape(2, 3, 1)
    recording = Recording("x", shape)
    builder = PassBuilder(shape, np.zeros(2, np.int64), "prefill")
    builder.ids[:] = 1
    recording.add(builder.end())
    return [recording_to_bytes(recording)]


def _torch_files() -> list[bytes]:
    found = []
    for state in ({"a": torch.ones(2, 3)}, {"b": torch.ones(4, dtype=torch.bfloat16)[1:]}):
        out = io.BytesIO()
        torch.save(state, out)
        found.append(out.getvalue())
    return [*found, b"GGUF\x03\0\0\0" + bytes(32)]


def _pickles() -> list[bytes]:
    found = [pickle.dumps({"a": [1, 2.0, "x"]}, protocol=2)]
    for data in _torch_files()[:2]:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            found.append(archive.read(name))
    return found


def _parquets() -> list[bytes]:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    table = pyarrow.table({"prompt": ["a", "b"], "task": ["x", "y"]})
    pyarrow.parquet.write_table(table, out)
    return [out.getvalue()]


def _of(*texts: str) -> Seeds:
    return lambda: [text.encode() for text in texts]


def _demo(file: str) -> Seeds:
    return lambda: [(DEMO_CHECKPOINT / file).read_bytes()]


def _eamc_documents() -> list[bytes]:
    whole = _an_eamc().to_bytes()
    return [whole[16 : 16 + struct.unpack_from("<I", whole, 8)[0]]]


_ROUTE = (
    "# n_layer=2 n_expert=3 n_expert_used=1 expert_bytes=8 dense_bytes=9\n"
    "phase,step,layer,slot,expert\n0,0,0,0,1\n0,0,1,0,2\n1,0,0,0,0\n"
)
_JOURNAL = "\n".join(
    json.dumps(line)
    for line in (
        {"making": _MAKING},
        {"file": {"path": "a", "size_bytes": 0, "data_offset": 0, "crc32c": 0, "sha256": ""}},
        {"part": ["b", 1, 7]},
        {"done": "c"},
    )
)  # fmt: skip
_CONVERSATION = (
    '{"model": "demo:f32", "system": "", "messages": [{"role": "user", "content": "x"}]}'
)

TARGETS: dict[str, Target] = {
    "index": Target(_index, (BadCheckpoint,), _of('{"weight_map": {"a": "a.safetensors"}}')),
    "config": Target(_config, (BadCheckpoint, ModelDataError), _configs),
    "manifest": Target(_manifest, (DamagedModel,), _manifests),
    "eamc-log": Target(_eamc_log, (), _logs),
    "eamc-record": Target(_eamc_record, (), _records),
    "eamc-header": Target(
        _eamc_header, (), _of('{"kind": "eamc", "version": 1, "layers": 2, "experts": 3}')
    ),
    "eamc-export": Target(_eamc_export, (ForeignEamc,), lambda: [_an_eamc().to_bytes()]),
    "eamc-document": Target(_eamc_document, (ForeignEamc,), _eamc_documents),
    "recording": Target(_recording, (BadContainer,), _recordings),
    "route": Target(_route, (BadRouteTrace,), _of(_ROUTE)),
    "recorded-requests": Target(_recorded_requests, (BadRouteTrace,), _archives),
    "torch-file": Target(_torch_file, (BadCheckpoint,), _torch_files),
    "torch-pickle": Target(_torch_pickle, (BadCheckpoint,), _pickles),
    "sentencepiece": Target(files.sentencepiece, (BadCheckpoint,), files.sentencepieces),
    "tiktoken": Target(files.tiktoken, (BadCheckpoint,), files.tiktokens),
    "tokenizers": Target(files.tokenizer, (BadCheckpoint,), files.tokenizers),
    "tokenizer-config": Target(
        _tokenizer_config,
        (BadCheckpoint,),
        _of(
            '{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true, '
            '"chat_template": [{"name": "default", "template": "{{ x }}"}]}'
        ),
    ),
    "generation": Target(
        _generation,
        (),
        _of(
            '{"eos_token_id": [1, 2], "temperature": 0.5, "top_k": 3, "top_p": 0.9, '
            '"repetition_penalty": 1.1, "do_sample": true, "text_config": {"eos_token_id": 3}}'
        ),
    ),
    "conversation": Target(_conversation, (BadConversation,), _of(_CONVERSATION)),
    "journal": Target(_journal, (), _of(_JOURNAL)),
    "prompts": Target(_prompts, (BadDataset,), _of('{"prompt": "a", "task": "b"}\n"c"\n')),
    "parquet": Target(_parquet, (BadDataset,), _parquets),
    "requests": Target(*request_targets.TARGET),
    "schema": Target(*schema_targets.TARGET),
}
MORE = {**CHECKPOINT_TARGETS, **GGUF_TARGETS, **HUB_TARGETS, **TEXT_TARGETS}
TARGETS |= {name: Target(*about) for name, about in MORE.items()}
