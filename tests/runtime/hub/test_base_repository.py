"""The repository that a GGUF file was made from: its tokenizer, its rows, its faults."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from moeinf.runtime.checkpoints import row_samples
from moeinf.runtime.checkpoints.checkpoint import Checkpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.gguf.base_model import base_names
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.hub import base_repository
from moeinf.runtime.hub.base_weights import OtherWeights
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from scripts.make_checkpoint import byte_tokenizer
from tests import gguf_files
from tests.conftest import ignore
from tests.gguf_files import matrices, write_gguf
from tests.hub_server import COMMIT, Answer, Hub
from tests.runtime.hub_pulls import serving
from tests.tiny import save_tiny
from tests.tiny_mxfp4 import save_mxfp4

BASE = "Org/Base"
REPO = "Some/Tiny-GGUF"


def base_of(name: str, folder: Path) -> Path:
    """Write a repository of a tiny model, whose tokenizer files differ from a GGUF's."""
    if name == "mxfp4":
        save_mxfp4(folder)
    else:
        save_tiny(name, folder, seed=3, dtype=torch.bfloat16)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    (folder / "chat_template.jinja").write_text("the repository's")
    return folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Serve an empty repository of GGUF files, and Org/Base beside it."""
    for name in ("files", "base"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "files", tmp_path / "cache", REPO) as hub:
        hub.beside.append(Hub(BASE, tmp_path / "base"))
        hub.card = {"base_model": BASE}
        yield hub


def settled(model: str, home: Path, notes: list[str]) -> tuple[Checkpoint, str | None]:
    """Return the checkpoint with its small files, and the base; collect the notes."""
    _, source = find_source(model, None, Settings(home), notes.append)
    return source.small_files(), source.settled


def template(checkpoint: Checkpoint) -> str:
    """Return the chat template as a pull keeps it."""
    made = checkpoint.made or {}
    own = json.loads(made["tokenizer_config.json"]).get("chat_template")
    return own if own is not None else made["chat_template.jinja"].decode()


FAMILIES = ["mixtral", "deepseek-v3", "qwen3.5"]
LEFT_OUT = {"gpt-oss": 6, "mxfp4": 3}  # kinds of tensors: transposed or interleaved, fused experts
MORE = ["olmoe", "granite", "arctic", "mxfp4", "qwen2", "glm4", "gpt-oss"]


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)
def test_rows_of_every_kind_agree(name: str, hub: Hub, tmp_path: Path) -> None:
    base = base_of(name, tmp_path / "base")
    write_gguf(base, tmp_path / "files" / "tiny-Q8_0.gguf", matrices(Kind.Q8_0))
    (base / "chat_template.jinja").write_text("the repository's")
    for most_bytes in (1 << 20, 4000):  # whole tensors, then rows
        notes: list[str] = []
        with mock.patch.object(row_samples, "_MOST_BYTES", most_bytes):
            found, settles = settled(REPO, tmp_path / "home", notes)
        assert settles == f"{BASE}@{COMMIT}"
        assert template(found) == "the repository's"
        assert (found.made or {})["tokenizer.json"] == (base / "tokenizer.json").read_bytes()
        assert json.loads((found.made or {})["config.json"]) == found.config
        kinds = int(notes[-1].split("; ")[1].split(" ")[0])
        layers = {re.sub(r"layers\.\d+", "", name) for name in found.tensors}
        roles = {role for _, _, role in found.experts}
        assert kinds == len(layers) + len(roles) - LEFT_OUT.get(name, 0)
    sent = [entry for entry in hub.beside[0].sent if entry[0].endswith(".safetensors")]
    assert sum(count for _, _, count in sent) < 1 << 20


def unchanged(name: str, values: Tensor, config: Any) -> tuple[str, Tensor]:
    """Write a tensor of Qwen3.5 without its changes, except for names."""
    return name.replace(".dt_bias", ".dt_proj.bias"), values


@pytest.mark.parametrize(
    ("name", "how", "value", "tensor"),
    [
        ("mixtral", "_PAIRED", (), r"blk\.\d+\.attn_[qk]\.weight"),
        ("qwen3.5", "delta", unchanged, r"blk\.\d+\.(ssm|attn|post).*"),
        ("deepseek-v3", "_latent", None, r"blk\.\d+\.attn_[kv]_b\.weight"),
    ],
)
@pytest.mark.parametrize("most_bytes", [1 << 20, 4000])
def test_a_file_with_rows_in_another_order_is_refused(
    name: str, how: str, value: Any, tensor: str, most_bytes: int, hub: Hub, tmp_path: Path
) -> None:
    base = base_of(name, tmp_path / "base")
    right = gguf_files._latent

    def exchanged(name: str, values: Tensor, config: Any) -> Any:
        for part, rows in right(name, values, config):
            yield part, rows.flip(0)

    with mock.patch.object(gguf_files, how, exchanged if value is None else value):
        write_gguf(base, tmp_path / "files" / "tiny-Q8_0.gguf", matrices(Kind.Q8_0))
    settings, notes = Settings(tmp_path / "home"), list[str]()
    name_, source = find_source(REPO, None, settings, notes.append)
    with (
        mock.patch.object(row_samples, "_MOST_BYTES", most_bytes),
        pytest.raises(OtherWeights, match=rf"{tensor} differs from .* of {BASE}: the cosine"),
    ):
        repack(source, Library(settings), name_, ignore, notes.append)
    assert not Library(settings).has(name_)
    _, source = find_source(REPO, None, settings, notes.append, compare=False)
    assert source.small_files() is source.checkpoint


def test_a_wrong_expert_is_refused(hub: Hub, tmp_path: Path) -> None:
    base = base_of("olmoe", tmp_path / "base")
    path = write_gguf(base, tmp_path / "x.gguf")
    tensor = open_gguf(path).experts[0, 0, "up"]
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.random.default_rng(0).standard_normal(tensor.size_bytes // 4, "f").tobytes())
    checkpoint = replace(open_gguf(path), metadata=with_source(path))
    source = LocalSource(checkpoint, "x")
    source.base = base_repository.base_of(checkpoint, None, ignore)
    with pytest.raises(OtherWeights, match=r"ffn_up_exps\.weight differs from the experts' up"):
        source.small_files()


def with_source(path: Path) -> dict[str, Any]:
    """Return the metadata of a file, with the address of Org/Base."""
    address = f"https://huggingface.co/{BASE}"
    return {**open_gguf(path).metadata, "general.source.repo_url": address}


def kept(hub: Hub, tmp_path: Path, told: str) -> None:
    """Check that the file's own tokenizer is kept, and that a note says why."""
    notes: list[str] = []
    start = time.monotonic()
    found, settles = settled(REPO, tmp_path / "home", notes)
    assert time.monotonic() - start < 10
    assert settles is None
    assert template(found) == "the file's"
    assert [told in note for note in notes] == [True], notes


@pytest.fixture
def files(hub: Hub, tmp_path: Path) -> Path:
    """Write OLMoE as a GGUF file with a template of its own; return the folder of Org/Base."""
    base = base_of("olmoe", tmp_path / "base")
    (base / "chat_template.jinja").write_text("the file's")
    write_gguf(base, tmp_path / "files" / "tiny-Q8_0.gguf", matrices(Kind.Q8_0))
    (base / "chat_template.jinja").write_text("the repository's")
    return base


def test_another_model_gives_no_tokenizer(files: Path, hub: Hub, tmp_path: Path) -> None:
    save_tiny("olmoe", files, seed=4, dtype=torch.bfloat16)
    kept(hub, tmp_path, f"{BASE} has other weights")
    save_tiny("qwen2", files, seed=4, dtype=torch.bfloat16)
    kept(hub, tmp_path, f"{BASE} has other weights")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda known: known["model"]["vocab"].update(a=1, b=0), "another vocabulary: its token"),
        (lambda known: known["model"]["vocab"].update({"new": 256}), "is not in the file"),
        (lambda known: known["model"]["vocab"].popitem(), "another vocabulary"),
        (lambda known: known["added_tokens"].append({"id": "x", "content": "y"}), "is refused"),
        (lambda known: known.update(model={}), "is refused"),
        (lambda known: known.clear(), "is refused"),
    ],
)
def test_another_vocabulary_is_not_used(
    change: Any, told: str, files: Path, hub: Hub, tmp_path: Path
) -> None:
    known = json.loads((files / "tokenizer.json").read_text())
    change(known)
    (files / "tokenizer.json").write_text(json.dumps(known))
    kept(hub, tmp_path, told)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("config.json", "{}{}"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../b.safetensors"}}'),
        ("model.safetensors", "x" * 100),
    ],
)
def test_hostile_files_of_a_base_leave_the_files_own(
    file: str, text: str, files: Path, hub: Hub, tmp_path: Path
) -> None:
    (files / file).write_text(text)
    kept(hub, tmp_path, f"({BASE}")


def test_a_base_that_cannot_be_reached(files: Path, hub: Hub, tmp_path: Path) -> None:
    other = hub.beside.pop()
    kept(hub, tmp_path, "has no repository Org/Base")
    hub.beside.append(other)
    other.fault = lambda request: Answer(status=403)
    kept(hub, tmp_path, "the server answers 403")
    other.fault = lambda request: Answer(status=500)
    kept(hub, tmp_path, "2 times in a row")


def test_a_base_that_stalls_is_waited_for_briefly(files: Path, hub: Hub, tmp_path: Path) -> None:
    end = threading.Event()
    for count in (0, 1):  # nothing, or a byte per request for ever
        hub.beside[0].fault = lambda _, sent=count: Answer(cut_after=sent, stall=end)  # type: ignore[misc]
        with (
            mock.patch.object(base_repository, "_STALL_SECONDS", 0.1),
            mock.patch.object(base_repository, "_SECONDS", 1.0),
        ):
            kept(hub, tmp_path, f"({BASE}")
    end.set()


def test_offline_nothing_is_asked(files: Path, hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "files" / "tiny-Q8_0.gguf"
    metadata = with_source(path)
    assert base_repository.base_of(replace(open_gguf(path), metadata=metadata), None, ignore)
    with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        checkpoint = replace(open_gguf(path), metadata=metadata)
        assert base_repository.base_of(checkpoint, None, ignore) is None


def test_a_template_that_only_the_file_has_is_kept(files: Path, hub: Hub, tmp_path: Path) -> None:
    (files / "chat_template.jinja").unlink()
    (files / "generation_config.json").write_text('{"eos_token_id": [7, 9], "top_p": 0.5}')
    found, settles = settled(REPO, tmp_path / "home", [])
    assert settles is not None
    assert template(found) == "the file's"
    about = json.loads((found.made or {})["generation_config.json"])
    assert (about["top_p"], {7, 9} <= set(about["eos_token_id"])) == (0.5, True)


@pytest.mark.parametrize(
    ("metadata", "card", "names"),
    [
        ({"general.base_model.0.repo_url": "https://huggingface.co/A/b"}, "C/d", ["C/d", "A/b"]),
        ({"general.source.huggingface.repository": "A/b.c-1"}, "A/b.c-1", ["A/b.c-1"]),
        ({"general.source.url": "https://example.com/A/b"}, None, []),
        ({"general.source.url": 7, "general.source.repo_url": "../.."}, "a/b/c", []),
        ({"general.source.repo_url": "https://huggingface.co/A/b?x=1"}, "A", []),
    ],
)
def test_names_of_bases(metadata: dict[str, Any], card: str | None, names: list[str]) -> None:
    assert base_names(metadata, card) == names
