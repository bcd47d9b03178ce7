"""Look up the metadata of a GGUF file by the keys of its architecture.

Values are passed on as they are: a family's parse checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moeinf.models.config import MAX_LAYERS
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.gguf.reader import GgufFile

_THETA = 10000.0  # llama.cpp's default
_JOINING = "nextn.eh_proj.weight"
_READ_FREQS = ("llama", "granitemoe")  # architectures in which llama.cpp reads rope_freqs


@dataclass(frozen=True)
class Keys:
    """The metadata and tensors of a file of architecture `name`."""

    name: str
    file: GgufFile

    def get(self, key: str) -> Any:
        """Return the value of `<architecture>.<key>`, or None."""
        return self.file.metadata.get(f"{self.name}.{key}")

    def count(self, key: str) -> int:
        """Return a positive integer. Raises BadCheckpoint."""
        value = self.get(key)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.bad(f"has no valid {self.name}.{key}")
        return value

    def bad(self, problem: str) -> BadCheckpoint:
        """Return an error that names the file."""
        return BadCheckpoint(f"{self.file.paths[0]} {problem}")

    @property
    def layers(self) -> int:
        """The number of decoder layers, without those that predict further tokens."""
        extra = self.get("nextn_predict_layers") or 0
        count = self.count("block_count")
        if type(extra) is not int or not 0 <= extra < count <= MAX_LAYERS:
            raise self.bad(f"has an invalid {self.name}.nextn_predict_layers or block_count")
        return count - extra

    @property
    def modules(self) -> int:
        """The number of modules that predict further tokens, if the file has their tensors."""
        blocks = range(self.layers, self.count("block_count"))
        return len(blocks) if all(self.has_tensor(_JOINING, block) for block in blocks) else 0

    def numbers(self, key: str, below: int = 1 << 63) -> list[int]:
        """Return a list of integers from 0 on. Raises BadCheckpoint."""
        found = self.get(key)
        valid = isinstance(found, list) and all(isinstance(number, int) for number in found)
        if not valid or not all(0 <= number < below for number in found):
            raise self.bad(f"has no valid {self.name}.{key}")
        return [int(number) for number in found]

    def of_layers(self, key: str) -> list[int]:
        """Return a number for each layer, where the file has a list. Raises BadCheckpoint."""
        found = self.numbers(key, 1 << 31)
        if len(found) < self.layers:
            raise self.bad(f"has no valid {self.name}.{key}")
        return found[: self.layers]

    @property
    def kv_heads(self) -> int:
        """The key heads of a layer; the most that a layer has if the file lists them."""
        if isinstance(self.get("attention.head_count_kv"), list):
            return max(self.of_layers("attention.head_count_kv"))
        absent = self.get("attention.head_count_kv") is None
        return self.count("attention.head_count" if absent else "attention.head_count_kv")

    @property
    def vocab(self) -> int:
        """The number of rows of the embedding."""
        tensor = self.file.tensors.get("token_embd.weight")
        if tensor is None:
            raise self.bad("lacks token_embd.weight")
        return tensor.shape[0]

    def has_tensor(self, name: str, block: int = 0) -> bool:
        """Return True if the block has a tensor of this name."""
        return f"blk.{block}.{name}" in self.file.tensors

    def side(self, name: str, number: int) -> int | None:
        """Return a side of a tensor in the first block that has it, or None."""
        for block in range(self.layers):
            tensor = self.file.tensors.get(f"blk.{block}.{name}")
            if tensor is not None:
                return tensor.shape[number]
        return None

    def first(self, key: str, older: str) -> str:
        """Return `key`, or in its place `attention.<older>` if the file lacks it."""
        return f"attention.{older}" if self.get(key) is None else key

    def partial_rope(self) -> dict[str, Any]:
        """Return `rope_parameters` of heads of which a part rotates."""
        whole, part = self.count("attention.key_length"), self.get("rope.dimension_count")
        if part is None:
            return self.rope()
        return self.rope() | {"partial_rotary_factor": self.count("rope.dimension_count") / whole}

    def mscale(self) -> dict[str, Any]:
        """Return DeepSeek's mscale; llama.cpp knows only models whose two values are equal."""
        value = self.get("rope.scaling.yarn_log_multiplier")
        if type(value) is not float:
            return {}
        both = round(10 * value, 6)
        return {"mscale": both, "mscale_all_dim": both}

    def long_rope(self) -> dict[str, Any]:
        """Return `rope_parameters` of phimoe, with the one attention factor that files have."""
        names = ("rope_factors_short.weight", "rope_factors_long.weight")
        short, long = (self.file.factors.get(name) for name in names)
        if short is None or long is None:
            return self.rope()
        factor = self.get("rope.scaling.attn_factor")
        factor = 1.0 if factor is None else factor
        theta = self.get("rope.freq_base")
        return {
            "rope_type": "longrope",
            "rope_theta": _THETA if theta is None else theta,
            "original_max_position_embeddings": self.get("rope.scaling.original_context_length"),
            "short_factor": [*short],
            "long_factor": [*long],
            "short_mscale": factor,
            "long_mscale": factor,
        }

    def rope(self) -> dict[str, Any]:
        """Return `rope_parameters`. Raises BadCheckpoint for a scaling that we do not know."""
        theta = self.get("rope.freq_base")
        found: dict[str, Any] = {"rope_theta": _THETA if theta is None else theta}
        kind = self.get("rope.scaling.type")
        freqs = self.file.factors.get("rope_freqs.weight")
        if freqs is not None and (kind not in (None, "none") or self.name not in _READ_FREQS):
            raise self.bad(
                f"has rope_freqs beside {self.name} and the rope scaling {str(kind)[:40]!r}, which "
                "is not supported"
            )
        if freqs is not None:
            factors = {"short_factor": [*freqs], "long_factor": [*freqs], "attention_factor": 1.0}
            return found | {"rope_type": "longrope"} | factors
        if kind in (None, "none"):
            return found | {"rope_type": "default"}
        if kind not in ("linear", "yarn"):
            raise self.bad(f"has the rope scaling {str(kind)[:40]!r}, which is not supported")
        found |= {"rope_type": kind, "factor": self.get("rope.scaling.factor")}
        if kind == "linear":
            return found
        if self.get("rope.scaling.yarn_ext_factor") not in (None, 1.0):
            raise self.bad("has a rope.scaling.yarn_ext_factor, which is not supported")
        more = {
            "original_max_position_embeddings": self.get("rope.scaling.original_context_length"),
            "attention_factor": self.get("rope.scaling.yarn_attn_factor"),
            "beta_fast": self.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": self.get("rope.scaling.yarn_beta_slow"),
        }
        return found | {key: value for key, value in more.items() if value is not None}
