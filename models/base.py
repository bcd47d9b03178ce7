"""The interface between models and expert stores, and the one that every family implements.

Does not know where weights come from, which experts are resident, or what text is.

The letters that all modules use:
    T  tokens (rows) in a pass        E  routed experts per layer      D  hidden size
    K  experts per token (top-k)      L  MoE layers, a flat index      N  entries in the EAMC
    F  intermediate size of one expert                                 S  tokens in a KV cache
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.errors import ContextExceeded, UnusableInput

Phase = Literal["encode", "prefill", "decode"]
Role = Literal["gate", "up", "down", "gate_bias", "up_bias", "down_bias"]
KvForm = Literal["full", "q8"]  # of the KV cache: the model's dtype, or rows of layers/kv_q8.py
Activation = Literal["swiglu", "swiglu10", "clamped_swiglu", "geglu", "relu", "relu2"]  # see ffn.py
UNGATED: tuple[Activation, ...] = ("relu", "relu2")  # their experts have no gate
Linear = Callable[[Tensor], Tensor]  # [T, in] -> [T, out]
Piece = TypeVar("Piece", bound=Callable[..., Any])


class Pending(Protocol):
    """The routed output of one layer, possibly still being computed."""

    def result(self) -> Tensor:
        """Block until the layer is done and return its output [T, D].

        Row t is the sum over k of weights[t, k] * ffn(expert ids[t, k], x[t]).
        """
        ...


class Experts(Protocol):
    """The routed experts of every layer: the only interface of a model to offloading."""

    @property
    def wants_hints(self) -> bool:
        """True if `hint` is of use now; a hint costs the model one more gate per layer."""
        ...

    def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
        """Open a pass of T rows; rows [T] int64, on the CPU, holds the request of each row.

        pieces: rows that are computed as if each piece were a pass of its own, in ascending order;
        (): all are one piece. Only where rows interact does this change bits.
        """
        ...

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """Announce the experts that `layer` will probably use, [T, K] each.

        A hint never changes a result. It comes just before the `submit` of the layer before, and
        only while `wants_hints`. So both are known before anything starts, and one read brings
        both from a device.
        """
        ...

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """Start layer `layer` (0 … L-1) on x [T, D] with ids [T, K] int64 and weights [T, K] f32.

        The three tensors and the result are on the device of the dense weights. An id of -1 means
        no expert (padding, a dropped token). `submit` does not modify its arguments, and the
        caller must not change them before `result`. At most one submit is in flight at a time.
        """
        ...

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        """Close the pass; accepted_rows [T] bool marks the rows that count as history.

        None marks all rows.
        """
        ...


@dataclass(frozen=True)
class Embedding:
    """A lookup from ids [T] int64 to rows [T, D] of `dtype`, on `device`."""

    rows: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, weight: Tensor) -> Embedding:
        """Return the embedding whose rows are those of weight [V, D]."""
        return cls(lambda ids: functional.embedding(ids, weight), weight.dtype, weight.device)


class Table(Protocol):
    """Rows of a large table, which may be on disk: a token uses a few of them."""

    def ahead(self, ids: Tensor) -> None:
        """Start to read rows ids [n] int64 that `rows` will need. It changes no result."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows ids [n] int64 as [n, width], in the dtype and on the device of x."""
        ...


@dataclass(frozen=True)
class MemoryTable:
    """A Table in memory: weight [count, width]."""

    weight: Tensor

    def ahead(self, ids: Tensor) -> None:
        """Do nothing: all rows are here."""

    def rows(self, ids: Tensor) -> Tensor:
        """See Table."""
        return functional.embedding(ids, self.weight)


class Parts(Protocol):
    """The dense weights of a model, by checkpoint name. The loader decides their form."""

    @property
    def kv(self) -> KvForm:
        """The form of the KV cache that the model is to have."""
        ...

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return the tensor `name`.

        Raises ModelDataError when it is missing or has another shape.
        """
        ...

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        """Return the map x -> x @ `prefix`.weight.T (+ `prefix`.bias).

        The weight is [out_features, in_features].
        """
        ...

    def embedding(self, prefix: str, count: int, width: int) -> Embedding:
        """Return the rows of `prefix`.weight [count, width].

        A model with a tied head also uses the same weight as a linear.
        """
        ...

    def table(self, prefix: str, count: int, width: int) -> Table:
        """Return the rows of `prefix`.weight [count, width], too large for memory.

        A checkpoint may store it in pieces, `prefix`.shard_N.weight.
        """
        ...

    def tuned(self, piece: Piece) -> Piece:
        """Return `piece` or a faster equivalent.

        A piece is a part of a model: a norm, a router, an attention core, the tuple of all blocks,
        a whole decode step.
        """
        ...


class ModelDataError(UnusableInput, ValueError):
    """A checkpoint or a configuration does not describe a model that we can run."""

    code = "unsupported_model"
    hint = "`moeinf pull --help`, which names the families"


@dataclass(frozen=True)
class MoeShape:
    """The sizes that an expert store needs: L layers of E experts, K per token."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation = "swiglu"
    biased: bool = False  # every matrix of an expert has a bias
    encoder_layers: int = 0  # the first of the layers; they run once, when a source is read
    width: int = 0  # of the model's hidden states where experts see fewer numbers; 0: hidden

    @property
    def parts(self) -> dict[Role, tuple[int, ...]]:
        """The tensors of an expert and their shapes, in storage order."""
        f, d = self.intermediate, self.hidden
        found: dict[Role, tuple[int, ...]] = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        if self.biased:
            found |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
        if self.activation in UNGATED:
            return {role: shape for role, shape in found.items() if not role.startswith("gate")}
        return found


@dataclass(frozen=True)
class ExpertPart:
    """The place of one source tensor: `role` of expert `expert` of MoE layer `layer`.

    gate and up are [F, D], down is [D, F]; biases are as long as their matrix has rows.
    """

    layer: int
    expert: int
    role: Role


@dataclass(frozen=True)
class FusedPart:
    """A source tensor that holds all experts of MoE layer `layer`, one after the other.

    gate_up is [E, 2F, D], each expert's gate rows before its up rows; down is [E, D, F]; their
    biases are [E, 2F] and [E, D].

    transposed    gate_up is [E, D, 2F] and down [E, F, D]; blocks of MXFP4 never are
    interleaved   rows of gate and up alternate, gate first
    """

    layer: int
    role: Literal["gate_up", "down", "gate_up_bias", "down_bias"]
    transposed: bool = False
    interleaved: bool = False


class State(Protocol):
    """The memory of one request in the layers (the KV cache), as a value.

    request is the number that `Experts.begin_pass` receives for the rows of this state. The owner
    of the state sets it.
    """

    request: int

    @property
    def length(self) -> int:
        """Tokens held."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens it can hold; extending beyond raises ContextFull before anything is computed."""
        ...

    def truncate(self, length: int) -> None:
        """Drop every token after the first `length`, and maybe more: read `length` afterwards.

        Recurrent layers can go back to a few earlier tokens only.
        """
        ...

    def snapshot(self) -> State:
        """Return an independent copy of the same capacity."""
        ...


class ContextFull(ContextExceeded):
    """The state has no room for more tokens."""

    code = "context_full"
    hint = "a larger --ctx"


class Model(Protocol):
    """One decoder-only family at one size, with its dense weights."""

    moe: MoeShape
    vocab_size: int
    max_context: int
    usual_context: int | None  # the default capacity of a state; None: max_context
    kv_bytes_per_token: int
    state_bytes: int  # the part of a state that does not grow with its tokens

    def new_state(self, capacity: int) -> State:
        """Return an empty state for up to `capacity` tokens.

        Memory is touched only as tokens arrive.
        """
        ...

    def extend(
        self,
        batch: Sequence[tuple[Sequence[int], State]],
        experts: Experts,
        logits: Literal["last", "all", "states"] = "last",
        piece: int | None = None,
        accept: Callable[[Tensor], int] | None = None,
    ) -> Tensor:
        """Append token ids to each state in one pass; return logits in float32 on the CPU.

        piece     tokens of a request that are computed together, as if they were a pass of their
                  own; the experts of a layer are requested for all pieces at once. None: all tokens

        last     [requests, vocab]: the last token of each request
        all      [T, vocab]: every token, in batch order
        states   [T, hidden]: every token after the final norm, before the head

        accept    drafted tokens of one state with history: each is computed as if it came alone,
                  after those before it. Called with the logits of all of them [T, vocab] before the
                  pass ends; returns how many of the first ones the state keeps. The other rows are
                  not history

        The phase is decode when every request brings exactly one token and has history, or `accept`
        is given, else prefill. Raises ContextFull. A failed pass leaves all lengths as they were.
        """
        ...


@dataclass(frozen=True)
class Family:
    """One line of the table in models/families.py: what a family's file offers.

    parse     config.json as a mapping -> the family's frozen config (unknown keys are ignored);
              raises ModelDataError for values that are absent, absurd or not supported
    build     (config, parts) -> Model
    expert    (tensor name, config) -> the part it is, or None for a dense tensor
    ignores   (tensor name, config) -> whether the tensor is deliberately not loaded
    fused     (tensor name, config) -> the experts it holds, where a checkpoint stores them fused
    rename    dense tensor name -> the name that build uses, where checkpoints differ
    mtp       config -> the family of the modules of multi-token prediction (layers/mtp.py) that a
              checkpoint with this config may have; its build returns MtpModules
    """

    model_type: str
    parse: Callable[[Mapping[str, Any]], Any]
    build: Callable[[Any, Parts], Model]
    expert: Callable[[str, Any], ExpertPart | None]
    ignores: Callable[[str, Any], bool]
    fused: Callable[[str, Any], FusedPart | None] = lambda _name, _config: None
    rename: Callable[[str], str] = lambda name: name
    mtp: Callable[[Any], Family | None] = lambda _config: None
