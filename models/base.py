"""The seam between models and expert stores, and the verbs that every family speaks.

Does not know where weights come from, which experts are resident, or what text is.

One legend for all floors:
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
Activation = Literal["swiglu", "clamped_swiglu", "relu"]  # see ffn.py
Linear = Callable[[Tensor], Tensor]  # [T, in] -> [T, out]
Piece = TypeVar("Piece", bound=Callable[..., Any])


class Pending(Protocol):
    """The routed output of one layer, possibly still being computed."""

    def result(self) -> Tensor:
        """[T, D]: sum over k of weights[t, k] * ffn(expert ids[t, k], x[t]); blocks until done."""
        ...


class Experts(Protocol):
    """Runs the routed experts of every layer. The only thing a model knows about offloading."""

    @property
    def wants_hints(self) -> bool:
        """Whether `hint` is of any use now: a hint costs the model one more gate per layer."""
        ...

    def begin_pass(self, rows: Tensor, phase: Phase) -> None:
        """Opens a pass of T rows; rows [T] int64, on the CPU, names each row's request."""
        ...

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """What `layer` will probably route to, [T, K] each; it never changes a result.

        Told just before the `submit` of the layer before, only while `wants_hints`, so that both
        are known before anything is started: of a device they are read together.
        """
        ...

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """Starts layer `layer` (0 … L-1) on x [T, D] with ids [T, K] int64 and weights [T, K] f32.

        All three lie where the dense weights lie, and so does the result. An id of -1 means no
        expert (padding, a dropped token). Does not modify its arguments; they must not change
        before `result`. At most one submit is outstanding at a time.
        """
        ...

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        """Closes the pass; accepted_rows [T] bool says which rows count as history (None: all)."""
        ...


@dataclass(frozen=True)
class Embedding:
    """ids [T] int64 -> rows [T, D] of `dtype`, on `device`."""

    rows: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, weight: Tensor) -> Embedding:
        """The rows of weight [V, D]."""
        return cls(lambda ids: functional.embedding(ids, weight), weight.dtype, weight.device)


class Parts(Protocol):
    """Hands a family its dense weights, by checkpoint name. The loader decides their form."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`; raises ModelDataError when it is missing or has another shape."""
        ...

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        """x @ `prefix`.weight.T (+ `prefix`.bias), with weight [out_features, in_features]."""
        ...

    def embedding(self, prefix: str, count: int, width: int) -> Embedding:
        """The rows of `prefix`.weight [count, width]; tied heads ask for it as a linear, too."""
        ...

    def tuned(self, piece: Piece) -> Piece:
        """`piece`, whatever a layer is made of beside its products, or a faster equivalent."""
        ...


class ModelDataError(UnusableInput, ValueError):
    """A checkpoint or a configuration does not describe a model that we can run."""

    code = "unsupported_model"
    hint = "`moeinf pull --help`, which names the families"


@dataclass(frozen=True)
class MoeShape:
    """What an expert store must know of a family: L layers of E experts, K per token."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation = "swiglu"
    biased: bool = False  # every matrix of an expert has a bias
    encoder_layers: int = 0  # of the layers, the first: they run once, when a source is read

    @property
    def parts(self) -> dict[Role, tuple[int, ...]]:
        """The tensors of an expert and their shapes, in the order in which they are stored."""
        f, d = self.intermediate, self.hidden
        found: dict[Role, tuple[int, ...]] = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        if self.biased:
            found |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
        if self.activation == "relu":
            return {role: shape for role, shape in found.items() if not role.startswith("gate")}
        return found


@dataclass(frozen=True)
class ExpertPart:
    """Where one source tensor belongs: it is `role` of expert `expert` of MoE layer `layer`.

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
    interleaved   rows of gate and up take turns, gate first
    """

    layer: int
    role: Literal["gate_up", "down", "gate_up_bias", "down_bias"]
    transposed: bool = False
    interleaved: bool = False


class State(Protocol):
    """What one request has left behind in the layers (the KV cache), as a value.

    request names whose rows these are to `Experts.begin_pass`; whoever owns the state sets it.
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
        """Forgets every token after the first `length`, and maybe more: read `length` afterwards.

        Layers whose memory is recurrent cannot go back to any token, only to a few earlier ones.
        """
        ...

    def snapshot(self) -> State:
        """An independent copy, of the same capacity."""
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
    usual_context: int | None  # to be taken where nobody asks for another; None: max_context
    kv_bytes_per_token: int
    state_bytes: int  # what a state takes besides, however many tokens it holds

    def new_state(self, capacity: int) -> State:
        """An empty state for up to `capacity` tokens; memory is touched only as tokens arrive."""
        ...

    def extend(
        self,
        batch: Sequence[tuple[Sequence[int], State]],
        experts: Experts,
        logits: Literal["last", "all", "states"] = "last",
    ) -> Tensor:
        """Appends token ids to each state in one pass, and returns the logits in float32, on the
        CPU wherever they were computed.

        "last": [requests, vocab], one row for the last token of each request; "all": [T, vocab] for
        every token, in batch order; "states": [T, hidden], what the last layer leaves for every
        token, after the final norm and before the head. The phase is decode when every request
        brings exactly one token and has history, else prefill. Raises ContextFull; a failed pass
        leaves all lengths as they were.
        """
        ...


@dataclass(frozen=True)
class Family:
    """One line of the table in models/__init__.py: what a family's file offers.

    parse     config.json as a mapping -> the family's frozen config (unknown keys are ignored);
              raises ModelDataError for values that are absent, absurd or not supported
    build     (config, parts) -> Model
    expert    (tensor name, config) -> the part it is, or None for a dense tensor
    ignores   (tensor name, config) -> whether the tensor is deliberately not loaded
    fused     (tensor name, config) -> the experts it holds, where a checkpoint stores them fused
    rename    dense tensor name -> the name that build asks for, where checkpoints differ
    """

    model_type: str
    parse: Callable[[Mapping[str, Any]], Any]
    build: Callable[[Any, Parts], Model]
    expert: Callable[[str, Any], ExpertPart | None]
    ignores: Callable[[str, Any], bool]
    fused: Callable[[str, Any], FusedPart | None] = lambda _name, _config: None
    rename: Callable[[str], str] = lambda name: name
