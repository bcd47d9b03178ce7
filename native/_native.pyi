"""Slots, the copy queue and checksums: names, units and errors of the compiled module.

The headers beside this file explain how they work.

Arguments of a wrong type, and negative numbers, raise TypeError everywhere.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from moeinf.errors import DeviceError as DeviceError
from moeinf.errors import OutOfDeviceMemory as OutOfDeviceMemory

PAGE_BYTES: Final[int]  # 4096: slots and offsets are multiples of it
SHARD_DATA_OFFSET: Final[int]  # 4096: the offset of the tensor data in a shard
DEMAND: Final[float]  # the largest priority: a layer waits for the expert
RESIDENT: Final[int]  # 0: in place of a ticket, the slot has the bytes already
MAX_READERS: Final[int]  # threads that one queue may have

MAX_COMPUTE_THREADS: Final[int]  # 64

class CorruptShard(OSError):
    """A file ended early (errno ENODATA) or its checksum differs on two reads (errno EBADMSG).

    `filename` is the file; the message has the expected and the found value.
    """

class Cancelled(RuntimeError):
    """The ticket was cancelled, or the queue closed before it was read."""

@final
class SlotPool:
    """An arena of equal slots in host memory, zeroed, 2 MiB aligned.

    Supports the buffer protocol: a writable uint8 array of shape [slots, slot_bytes], without a
    copy. Views keep the arena alive; resident memory never exceeds `bytes`.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """Allocate the slots. slot_bytes is rounded up to PAGE_BYTES.

        Raises ValueError when either is 0, MemoryError (with the number of bytes) when out of
        memory.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next, after rounding."""

    @property
    def bytes(self) -> int:
        """The size of the arena: slots * slot_bytes."""

    def release(self, slot: int) -> None:
        """Give the memory of a slot back to the system. It is zeroed, and may be used again.

        Nothing may write to it meanwhile. Raises IndexError.
        """

    def release_all(self) -> None:
        """Give the memory of all slots back to the system. They are zeroed, and usable."""

DRIVER_LIBRARY: Final[str]  # libcuda.so.1
LEAST_BATCHED_BYTES: Final[int]  # smaller copies go one by one

class NoDriver(RuntimeError):
    """There is no libcuda here, or it lacks a call."""

@final
class Driver:
    """libcuda, opened and initialised. Stays open until the process ends."""

    def __init__(self, library: str = ...) -> None:
        """Open the library. Raises NoDriver; DeviceError, CUDA_ERROR_NO_DEVICE among others."""

    @property
    def version(self) -> int:
        """1000 · major + 10 · minor of the newest CUDA that it serves."""

    @property
    def devices(self) -> int: ...
    @property
    def has_batches(self) -> bool:
        """True if many copies can be one call (CUDA 12.8)."""

    def info(self, device: int) -> tuple[str, int, str]:
        """Return name, bytes of memory, and PCI address ("0000:65:00.0"; "": it has no address)."""

@final
class DeviceContext:
    """A device's primary context, which torch uses as well; held while this lives."""

    def __init__(self, driver: Driver, device: int = 0) -> None:
        """Retain the context. Raises DeviceError."""

    def memory(self) -> tuple[int, int]:
        """Return the free bytes and all bytes of the whole device."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated by the live device slots."""

@final
class HostLock:
    """Page-locks a pool, slice after slice; unlocks it when the last reference goes.

    One thread calls lock_next; any may read locked_slots.
    """

    def __init__(self, context: DeviceContext, pool: SlotPool, slice_bytes: int) -> None:
        """Lock nothing yet. slice_bytes is rounded down to whole slots, at least one."""

    @property
    def next_bytes(self) -> int:
        """Bytes that lock_next would lock; 0 when everything is locked."""

    @property
    def locked_slots(self) -> int:
        """The number of slots, from the first, that are page-locked."""

    def lock_next(self) -> None:
        """Lock one more slice, which touches its pages. Raises DeviceError; nothing is lost."""

@final
class DeviceSlots:
    """An arena of equal slots in device memory, filled from a host pool over a stream of its own.

    For one thread. device_slots.h draws the order of copies and kernels.
    """

    def __init__(
        self,
        context: DeviceContext,
        host: HostLock,
        slots: int,
        stream: int,
        least_batched_bytes: int = ...,
    ) -> None:
        """Allocate the slots. `stream` is the handle of the kernels' stream, 0 the default one.

        One call copies the page-locked slots of a batch, unless they are smaller than
        least_batched_bytes. Raises OutOfDeviceMemory, DeviceError, ValueError without slots.
        """

    @property
    def address(self) -> int:
        """The address of slot 0, in the device's memory."""

    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    def copy(self, host_slots: Sequence[int], slots: Sequence[int], bytes: int) -> int:
        """Queue one batch, host_slots[i] -> slots[i]; return its number.

        The host slots must not change until the batch is done. Raises DeviceError, after which no
        copy of it is in flight; ValueError for invalid slots.
        """

    def done(self, batch: int) -> bool:
        """Return whether the batch has arrived. Raises DeviceError."""

    def wait(self, batch: int) -> None:
        """Wait until the batch has arrived. Raises DeviceError."""

    def begin_read(self, slots: Sequence[int]) -> None:
        """Let later work of the kernels' stream see the bytes of these slots."""

    def end_read(self, slots: Sequence[int]) -> None:
        """Mark the queued work as the last to read these slots before an overwrite."""

    def finish(self) -> None:
        """Wait until everything queued to the kernels' stream has run. Raises DeviceError."""

@final
class Counters:
    """A consistent snapshot; submitted == queued + running + done + errors + cancelled."""

    @property
    def submitted(self) -> int: ...
    @property
    def resident(self) -> int:
        """Submissions that found their bytes in the slot; not in `submitted`."""

    @property
    def queued(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def hung(self) -> int:
        """Readers in a read that was given up after hang_seconds and has still not ended."""

    @property
    def done(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def cancelled(self) -> int: ...
    @property
    def undelivered(self) -> int:
        """Tickets that have ended and were neither waited for nor collected."""

    @property
    def waiting(self) -> int:
        """Threads inside wait, wait_many or drain."""

    @property
    def reads(self) -> int:
        """Reads that brought all their bytes; a reread counts again."""

    @property
    def bytes_read(self) -> int: ...
    @property
    def yields(self) -> int:
        """Times that a read ahead has stopped between two pieces, for demand."""

    @property
    def read_seconds(self) -> float:
        """Time inside reads, summed over the reader threads (checksums not included)."""

    @property
    def whole_calls(self) -> int:
        """Reads of all of a source in one call."""

    @property
    def whole_seconds(self) -> float: ...
    @property
    def piece_calls(self) -> int:
        """Reads of one piece of a read ahead."""

    @property
    def piece_seconds(self) -> float: ...

@final
class CopyQueue:
    """Reads sources into slots, most urgent first, oldest first among equals.

    A ticket is queued, then running, then ends exactly once: done, failed or cancelled. Its end is
    delivered exactly once too: by wait (to every thread that waits at that time) or by collect.
    Afterwards the ticket is forgotten. All methods are safe from any thread.

    Holds a reference to its pool. Closed when it is garbage collected.
    """

    def __init__(
        self,
        pool: SlotPool,
        *,
        readers: int = 2,
        direct: bool = False,
        max_open_files: int = ...,
        block_bytes: int = ...,
        hang_seconds: float = 30.0,
        busy: int = ...,
        piece_bytes: int = ...,
    ) -> None:
        """Start `readers` threads, 1 to MAX_READERS; of two or more a quarter serves demand alone.

        `direct` asks for O_DIRECT; a file whose file system refuses is read through the page
        cache. One system call reads `block_bytes` at most, a multiple of PAGE_BYTES up to the
        default, 1 GiB. The queue keeps at most max_open_files open, all queues of the process
        most_open_files(); each read in progress may hold one more. A read without an end for
        hang_seconds fails its ticket with TimeoutError naming the file.

        Reads ahead run only while no demand is queued or runs, at most `busy` of them at once
        (default: MAX_READERS). They read pieces of piece_bytes, a multiple of PAGE_BYTES (default:
        512 KiB), and yield to demand between two pieces. Raises ValueError.
        """

    def add_source(
        self,
        path: str | bytes | os.PathLike[str],
        offset: int,
        bytes: int,
        crc32c: int | None = None,
    ) -> int:
        """Register a range of a file and return its id; the file is opened when first read.

        `offset` is a multiple of PAGE_BYTES, `bytes` at most a slot: else ValueError. With
        `crc32c` every read is checked against it. Sources live as long as the queue.
        """

    def replace_sources(
        self,
        sources: Sequence[int],
        paths: Sequence[str | bytes | os.PathLike[str]],
        offsets: Sequence[int],
        bytes: int,
    ) -> None:
        """Make sources other ranges of files, of `bytes` each, unchecked. No slot holds them then.

        All are replaced, or an exception tells that none is: as `add_source`, IndexError for an
        unknown id, RuntimeError while one is read or waits to be read.
        """

    def submit(self, source: int, slot: int, priority: float) -> int:
        """Queue a read of `source` into `slot` and return its ticket; larger is more urgent.

        Returns RESIDENT when the slot already has the bytes of `source`. Until the ticket ends the
        slot's bytes are unspecified. Those beyond the source's length stay so afterwards, and all
        of them after a failure. Raises IndexError (no such source or slot), ValueError (priority
        is NaN), RuntimeError (can_submit(slot) is false; the queue is closed).
        """

    def submit_many(
        self, sources: Sequence[int], slots: Sequence[int], priority: float
    ) -> list[int]:
        """Submit each pair, in order, all or none."""

    def raise_priority(self, ticket: int, priority: float) -> None:
        """Raise the priority of a ticket; without effect if it has ended or has a higher one.

        It keeps its age among its new equals. Raises ValueError (NaN, or never issued).
        """

    def cancel(self, ticket: int, half_read: bool = False) -> bool:
        """Cancel a ticket. True: it had not begun, and its slot is free at once, unchanged.

        False when it has begun (it will complete) or has ended. With half_read one that has yielded
        between two pieces is cancelled too; the bytes of its slot are then unspecified. Raises
        ValueError if never issued.
        """

    def invalidate(self, slot: int) -> None:
        """Mark `slot` as written to through a view: the next submit reads it again."""

    def can_submit(self, slot: int) -> bool:
        """Return whether nothing may write to `slot`: neither a live ticket nor a hung reader."""

    def wait(self, ticket: int) -> None:
        """Block, without the GIL, until the ticket ends, and deliver it: return when done.

        RESIDENT has ended, and is never used up. Raises OSError with errno and filename,
        CorruptShard, Cancelled, RuntimeError (a reader failed inside), or ValueError when it was
        never issued or is already delivered. A signal handler's exception (Ctrl-C) also ends the
        wait; the ticket is then not delivered.
        """

    def wait_many(self, tickets: Sequence[int]) -> None:
        """Wait for all of them.

        When all have ended and some failed, raises the error of the first such in the given order
        and delivers only that one: collect() has the others, good and bad.
        """

    def collect(self) -> list[tuple[int, Exception | None]]:
        """Deliver every ended ticket without a waiting thread, in the order of ending; never block.

        The second item is the exception that wait would have raised; None: done.
        """

    def drain(self) -> None:
        """Block, without the GIL, until nothing is queued or running. Delivers nothing."""

    def pause(self) -> None:
        """Start no further read until resume(); running ones end. close() overrides it."""

    def resume(self) -> None: ...
    def close(self) -> None:
        """Cancel queued reads, let running reads end, join the threads, close the files.

        It may be called again. A read that hangs is left alone after hang_seconds, with the memory
        that it writes to.
        """

    def counters(self) -> Counters: ...
    @property
    def direct(self) -> bool:
        """True if O_DIRECT was asked for."""

    @property
    def direct_refusals(self) -> int:
        """The number of files opened without O_DIRECT because their file system refused it."""

    @property
    def open_files(self) -> int:
        """Descriptors in the cache."""

def crc32c(buffer: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of a contiguous buffer, continuing from `crc` of the bytes before.

    Raises BufferError for a buffer that is not contiguous. Large ones are read without the GIL.
    """

def read_bandwidth(
    bytes: int, threads: int, prefetch: bool, huge_pages: bool, rounds: int
) -> float:
    """Return the bytes per second of `threads` threads, each reading its own buffer.

    The best of `rounds`. Without the GIL. Raises ValueError (less than a page per thread),
    MemoryError.
    """

def end_after_signals(seconds: float) -> None:
    """End the process with status 1 this long after its first SIGINT or SIGTERM.

    Python's handlers of both run as before; they must be set. It needs no thread of Python.
    """

def syncfs(fd: int) -> None:
    """Make everything written to the file system of `fd` durable (elsewhere: the one file).

    Raises OSError.
    """

def most_open_files() -> int:
    """Return how many files all queues together keep open: a quarter of the soft limit.

    It is 16 at least, and 4,096 at most.
    """

def _nothing() -> None: ...
def _crc32c_paths() -> list[str]: ...
def _crc32c_on(path: str, buffer: Buffer, crc: int = 0) -> int: ...
def _measure_products(path: str) -> float: ...
def compute_threads() -> int:
    """Return the number of compute threads, the caller included; at first one per usable core."""

def set_compute_threads(threads: int) -> None:
    """Set the thread count after a running kernel. Raises ValueError outside 1 … its maximum.

    The maximum is MAX_COMPUTE_THREADS.
    """

BLOCK_ROWS: Final[int]  # 16: rows of a quantised matrix that are stored together
GROUP: Final[int]  # 32: weights that share a scale

def kernel_path() -> str:
    """Return the path of the kernels: amx, avx512, avx2, neon-i8mm, neon or portable."""

def kernels_are_fast() -> bool:
    """Return False on the portable path."""

def tile_columns(format: str) -> int:
    """Return the columns of a tile: 64, or 256 in q4k, q5k and q6k. Raises ValueError."""

def matrix_bytes(format: str, rows: int, columns: int) -> int:
    """Return the bytes of a matrix in bf16 (row-major) or in tiles (tiles.h). Raises ValueError."""

# Addresses below are of memory that the caller keeps alive: contiguous tensors of the given
# shapes, in bf16, or float32 where f32 is true. Tiles start at multiples of 64 bytes: else
# ValueError.

def quantise_rows(rows: int, count: int, columns: int, f32: bool, format: str, out: int) -> None:
    """Write rows as row blocks of q8, q4, q3, q2, q4k, q5k or q6k to out. Raises ValueError."""

def dequantise_rows(blocks: int, format: str, count: int, columns: int, out: int) -> None:
    """Dequantise row blocks of tiles to out [count, columns] float32. Raises ValueError."""

def interleave_rows(
    rows: int, factors: int, count: int, columns: int, format: str, out: int
) -> None:
    """Sort GGUF blocks [count, ceil(columns / tile_columns), bytes of a block] into tiles.

    Formats: q4k, q5k, q6k and nvfp4. factors: [count] float32 of nvfp4's rows; 0 means that all
    are 1. Raises ValueError. Without the GIL.
    """

def gather_rows(
    blocks: int, format: str, rows: int, columns: int, ids: int, count: int, out: int, f32: bool
) -> None:
    """Copy rows ids [count] int64 of a tiled matrix [rows, columns] to out [count, columns].

    Values are rounded to bf16 once. Raises IndexError for an invalid row.
    """

def combine_rows(
    rows: int, weights: int, tokens: int, top_k: int, width: int, out: int, f32: bool
) -> None:
    """Sum rows [T, K, D] by weights [T, K] float32 -> out [T, D], k by k in float32."""

@final
class LinearKernel:
    """x @ W.T with the weights at an address, on all compute threads. Any thread may run it.

    A row's result does not depend on the other rows, the threads or the path.
    """

    def __init__(self, format: str, out_features: int, in_features: int, weights: int) -> None:
        """Set up the product. Raises ValueError."""

    def run(self, x: int, rows: int, out: int, f32: bool) -> None:
        """Multiply x [rows, in_features] -> out [rows, out_features]. Without the GIL."""

@final
class RouterKernel:
    """Scores of the experts, then the top_k of them (router.h). Any thread may run it."""

    def __init__(
        self,
        weight: int,
        experts: int,
        hidden: int,
        top_k: int,
        renormalise: bool,
        scale: float,
        groups: int,
        kept: int,
        scoring: str = "softmax",
        bias: int = 0,
    ) -> None:
        """Set up. weight: bf16 [experts, hidden]; scoring: softmax, sigmoid or top_softmax.

        bias: f32 [experts], added for the choice, or 0. Both must not move. Raises ValueError.
        """

    def run(self, x: int, rows: int, ids: int, weights: int) -> None:
        """Route x [rows, hidden] bf16 -> ids [rows, top_k] int64, weights f32. Without the GIL."""

@final
class ExpertKernel:
    """The experts of one layer, each on its own rows of x.

    An expert is gate, up and down in this order, each of matrix_bytes: gate and up in `format`,
    down in `down` ("": in `format`, too). Where `biased`, their biases in bf16 follow. It
    computes down @ act(gate @ x, up @ x):

        swiglu          silu(gate) * up
        swiglu10        silu(gate) * up, gate at most 10, up in -10 … 10
        clamped_swiglu  gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up in -7 … 7
        geglu           gelu(gate) * up, with the tanh form of gelu
        relu            max(up, 0); there is no gate
        relu2           max(up, 0) squared; there is no gate
    """

    def __init__(
        self,
        format: str,
        hidden: int,
        intermediate: int,
        activation: str = "swiglu",
        biased: bool = False,
        down: str = "",
    ) -> None:
        """Set up the kernel. Raises ValueError, also for bf16 beside tiles."""

    @property
    def expert_bytes(self) -> int: ...
    def run(
        self,
        experts: Sequence[int],
        places: Sequence[Sequence[int]],
        x: int,
        tokens: int,
        top_k: int,
        out: int,
        f32: bool,
    ) -> None:
        """Run experts[e] on places[e]: place p is row p // top_k of x [tokens, D].

        Writes row p of out [tokens * top_k, D] and no other. Raises IndexError for an invalid
        place. Without the GIL.
        """

@final
class SlotKernel:
    """Layers of experts in the slots of a pool, computed from ids for few rows."""

    def __init__(
        self,
        kernel: ExpertKernel,
        table: int,
        layers: int,
        experts: int,
        slots: int,
        slot_bytes: int,
    ) -> None:
        """Set up the kernel. table: address of [layers, experts] int32: a slot, or negative.

        slots: address of the first slot. The table and the slots must not move. Raises ValueError.
        """

    def count(self, layer: int, ids: int, rows: int, top_k: int) -> int:
        """Return the number of ids [rows, top_k] int64 that are experts, -1 is none of them.

        Returns -1 if an expert is absent or an id is invalid. Raises IndexError for the layer.
        """

    def run(
        self,
        layer: int,
        x: int,
        rows: int,
        ids: int,
        weights: int,
        top_k: int,
        out: int,
        f32: bool,
    ) -> None:
        """Run: out [rows, D] is the sum over k of weights[:, k] · expert ids[:, k] of x [rows, D].

        It has the bits of ExpertKernel and combine_rows. Works without the GIL. Raises IndexError
        if an expert is absent.
        """

@final
class MlpKernel:
    """A dense network: down · (silu(gate · x) · (up · x)) for bfloat16 rows."""

    def __init__(self, gate: LinearKernel, up: LinearKernel, down: LinearKernel) -> None:
        """Set up the kernel. Raises ValueError for shapes that do not fit together."""

    def run(self, x: int, rows: int, out: int) -> None:
        """Run: x [rows, D] -> out [rows, D]. Works without the GIL. Raises MemoryError."""

def silu_product(gate: int, up: int, count: int, out: int) -> None:
    """Compute out = silu(gate) · up of `count` bfloat16 values, with the bits of MlpKernel.

    out may be gate or up. Works without the GIL.
    """

def sigmoid_product(gate: int, each: int, x: int, count: int, out: int) -> None:
    """Compute out [count, each] = sigmoid(gate [count]) · x, in bfloat16; the sigmoid is rounded.

    A value depends only on its gate and its x. out may be x. Works without the GIL. Raises
    ValueError.
    """

def is_gated(activation: str) -> bool:
    """Return whether experts with this activation have a gate. Raises ValueError if unknown."""

def attention_path() -> str:
    """Return the fastest path of decode attention: avx512bf16, avx512, avx2, neon or portable."""

def attention_block_keys(seen: int) -> int:
    """Return how many of `seen` keys form one task; see decode_attention.h."""

KV_Q8_VALUES: int  # of a block of a row of the KV cache in q8

def kv_q8_row_bytes(width: int) -> int:
    """Return the bytes of a row of `width` values; see kv_q8.h."""

@final
class DecodeAttention:
    """One query row per request over its cache. All addresses are of contiguous host memory."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        key_width: int,
        value_width: int,
        scale: float,
        *,
        bf16: bool,
        window: int = 0,
        sinks: int = 0,
        q8: bool = False,
    ) -> None:
        """Set up for queries, outputs and caches in bfloat16 or float32.

        q8: caches in q8, with queries and outputs in bfloat16.

        A window of 0 includes all tokens. sinks is the address of [heads] float32, or 0: a logit
        per head that takes its share of the softmax and has no value. Its address must not change.

        Raises ValueError for sizes that do not match.
        """

    def __call__(
        self,
        q: int,
        out: int,
        requests: Sequence[tuple[int, int, int, int, int, int, int]],
        path: str | None = None,
    ) -> None:
        """Attend: q [requests, heads, key_width] -> out [requests, heads, value_width], by address.

        A request is (keys, values, key head stride, key row stride, value head stride, value row
        stride, tokens): two addresses, four strides in items, and at least one token. An item of a
        cache in q8 is a byte. `path` names
        a slower path than attention_path(). Works without the GIL. Raises ValueError, MemoryError.
        """

@final
class GqaStep:
    """One token per request, from the projections to the output of attention; all bfloat16."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        width: int,
        scale: float,
        window: int,
        q_norm: tuple[int, int, float, bool] | None,
        k_norm: tuple[int, int, float, bool] | None,
        clip: float,
        sinks: int = 0,
        *,
        value_width: int = 0,
        rotation: Literal["half", "pairs", "none"] = "half",
        norms_last: bool = False,
    ) -> None:
        """Set up the step. A norm is (address of its weight, width, eps, wide).

        wide: the weight is float32 and multiplied before the rounding. A norm's width divides the
        whole projection. sinks: see DecodeAttention. 0 means no window, no clip, and values as
        wide as keys. Columns rotate in halves of the first 2 · pairs, or in neighbours.
        norms_last: norms come after the rotation. Weights must not move. Raises ValueError.
        """

    def __call__(
        self,
        q: int,
        k: int,
        v: int,
        cos: int,
        sin: int,
        pairs: int,
        out: int,
        requests: Sequence[tuple[int, int, int, int, int, int, int]],
        q8: bool = False,
    ) -> None:
        """Run: q [R, heads · W], k [R, kv_heads · W], v [R, kv_heads · V] -> out [R, heads · V].

        cos and sin are [R, pairs] float32; columns after 2 · pairs do not rotate. Writes the
        newest row of each cache; see DecodeAttention for requests, whose tokens include the new
        one. q8: the caches are in q8. Works without the GIL. Raises ValueError, MemoryError.
        """

@final
class MlaStep:
    """One token per request in latent attention, with the absorbed products; all bfloat16."""

    def __init__(
        self,
        heads: int,
        nope: int,
        rope: int,
        value: int,
        kv_lora: int,
        scale: float,
        norm: tuple[int, int, float, bool],
        kv_b: int,
    ) -> None:
        """Set up the step. norm: of the latent; kv_b: address of [heads, nope + value, kv_lora].

        Weights must not move. Raises ValueError.
        """

    def __call__(
        self,
        q: int,
        latent: int,
        cos: int,
        sin: int,
        pairs: int,
        out: int,
        requests: Sequence[tuple[int, int, int, int, int, int, int]],
        q8: bool = False,
    ) -> None:
        """Run: q [R, heads · (nope + rope)], latent [R, kv_lora + rope] -> out [R, heads · value].

        pairs is rope / 2. Otherwise like GqaStep.
        """

@final
class AttentionHalf:
    """The attention of a layer for one token per request; all bfloat16."""

    def __init__(
        self,
        norm: tuple[int, int, float, bool],
        inputs: Sequence[tuple[LinearKernel, int]],
        step: GqaStep | MlaStep,
        output: tuple[LinearKernel, int],
        *,
        widening: tuple[tuple[int, int, float, bool], tuple[LinearKernel, int]] | None = None,
        gated: bool = False,
    ) -> None:
        """Set it up. A norm is as in GqaStep; a pair is (layer, address of its bias or 0).

        inputs: q, k, v of a GqaStep, or q, latent of an MlaStep. widening: the norm and the second
        layer where the first input is a bottleneck. gated: the first input gives query and gate of
        each head, and the sigmoid of the gate multiplies the step's result. Weights must not move.
        Raises ValueError.
        """

@final
class DecoderLayer:
    """A layer for one token per request, part of a LayerRun; all bfloat16."""

    def __init__(
        self,
        attention: AttentionHalf | None,
        width: int,
        residual: float,
        ffn_norm: tuple[int, int, float, bool],
        router: RouterKernel | None,
        mlp: MlpKernel | None,
        gate: tuple[LinearKernel, int] | None = None,
    ) -> None:
        """Set up the layer for rows of `width`.

        attention: None if the layer's rows have attended. residual: a factor on the outputs.
        mlp: the shared experts, or without a router the whole network. gate: of the shared
        experts, one value for a row. Weights must not move. Raises ValueError.
        """

@final
class LayerRun:
    """Layers that follow each other, for one token per request. See layer/decoder_layer.h."""

    def __init__(self, layers: Sequence[DecoderLayer], numbers: Sequence[int], top_k: int) -> None:
        """Set up the run. numbers: of each layer in its SlotKernel. It must not outlive `layers`.

        top_k: of all routers. Raises ValueError.
        """

    def __call__(
        self,
        first: int,
        x: int,
        rows: int,
        cos: int,
        sin: int,
        pairs: int,
        requests: Sequence[Sequence[tuple[int, int, int, int, int, int, int]]],
        q8: bool,
        slots: Sequence[SlotKernel | None],
        y: int,
        z: int,
        ids: int,
        weights: int,
    ) -> int:
        """Run layers of the run from number `first`; return how many it has completed.

        A layer: y = x + residual · attention(x), z = ffn_norm(y), both [R, D], R = rows. ids and
        weights [layers, R, K] are the router's for z. If all these experts are in the layer's
        slots, their weighted sum and the mlp of z are added to y, the next layer's x. It ends at
        a layer where that is not so; y and z are then what its experts need. requests and slots:
        of each layer from `first`, as many as shall run; see GqaStep. A layer without attention
        has no requests. Works without the GIL. Raises ValueError, IndexError, MemoryError.
        """

def rms_norm(norm: tuple[int, int, float, bool], x: int, rows: int, out: int) -> None:
    """Divide each row of x [rows, width] bfloat16 by its root mean square, times the weight.

    norm: see GqaStep. Raises ValueError.
    """

@final
class AdaptiveCore:
    """The decisions of the policy `adaptive`; native/policy/adaptive_core.h argues them.

    A cell is layer · E + expert. ids are [T, K] of int16, int32 or int64; a negative id is no
    expert. Raises ValueError for a shape, IndexError for an expert, layer or cell that does not
    exist.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        keep_at_most: int,
        *,
        hysteresis: float,
        worth: float,
        sure: float,
        decays: Sequence[float],
        step: float,
        prompt: float,
        encoder_layers: int = 0,
    ) -> None: ...
    def begin_encode(self) -> None: ...
    def begin_prefill(self) -> None: ...
    def begin_decode(self, age: int) -> None:
        """Begin a pass of requests with `age` decode tokens so far; `past` is written before."""

    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None: ...
    def hinted(self, layer: int, ids: NDArray[np.integer[Any]]) -> None: ...
    def end_pass(self, accepted: Sequence[bool] = ...) -> None:
        """End the pass; the forecast forgets rows [T] that are not accepted. Empty: all are."""

    def forecast_with(self, top_k: int, net: Mapping[str, Sequence[float]]) -> None:
        """Decide by a trained network from now on; each pass then starts with `begin_rows`.

        net: the parts of native/policy/forecast.h. Raises ValueError for another size. The methods
        below raise RuntimeError before this call.
        """

    def begin_rows(self, rows: Sequence[int], decoding: bool) -> None:
        """Name the request of each row [T] of the pass that begins next."""

    def end_request(self, request: int) -> None: ...
    def inputs(self, layer: int) -> NDArray[np.float32]:
        """Return the network's inputs [E, 18] of one layer."""

    @property
    def keep(self) -> NDArray[np.float32]:
        """The worth of keeping each cell, [L, E]."""

    @property
    def next(self) -> NDArray[np.float32]:
        """The probability that the next token uses each cell, [L, E]."""

    def admitted(self, cell: int) -> None: ...
    def victim(self, evictable: Callable[[int], bool]) -> int | None: ...
    def resize(self, keep_at_most: int) -> None:
        """Keep at most this many cells; the least probable ones beyond are staged."""

    def forget(self, cell: int) -> None:
        """Remove a cell without choosing a victim; an absent cell stays absent."""

    def keeps(self, cell: int) -> bool: ...
    def wishes(self, most: int) -> list[tuple[int, bool, float]]:
        """Return the cells worth reading now, best first.

        Each has: is it a gate's hint, and its probability of use.
        """

    def share(self, estimate: int) -> list[float]:
        """Return one estimate [L·E]; the decays in order, then past."""

    @property
    def insertions(self) -> int: ...
    @property
    def past(self) -> NDArray[np.float32]:
        """The estimate from past requests: [L, E], to be written before a decode pass."""

    @property
    def score(self) -> NDArray[np.float32]:
        """The probability of use that decides: [L, E], read-only for callers."""

    @property
    def weights(self) -> list[float]:
        """The weights of the estimates in the mixture in use."""

@final
class EamcCore:
    """The decisions of the policy `eamc`; native/policy/eamc_core.h has the formulas.

    Arguments and errors are those of AdaptiveCore.
    """

    def __init__(
        self, layers: int, experts: int, slots: int, *, epsilon: float, encoder_layers: int = 0
    ) -> None: ...
    def begin_pass(self, encoding: bool) -> None: ...
    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None: ...
    def predict(self, prediction: NDArray[np.float32]) -> None:
        """Copy prediction [L, E], whose rows sum to 1."""

    def admitted(self, cell: int) -> None: ...
    def resize(self, slots: int) -> None: ...
    def forget(self, cell: int) -> None: ...
    def victim(self, evictable: Callable[[int], bool]) -> int | None: ...
    def wishes(self, most: int) -> list[int]:
        """Return the cells of later layers worth reading now, best first."""

def sum_as_shares(entries: NDArray[np.float32], places: Sequence[int]) -> NDArray[np.float32]:
    """Sum entries [N, L, E] at `places` to [L, E], each row divided by its sum.

    A row that sums to 0 is uniform. Raises ValueError, IndexError.
    """

@final
class EamMatch:
    """The cosine of one running request to N past ones, layer by layer.

    See native/policy/eam_match.h.
    """

    def __init__(self, layers: int, experts: int) -> None: ...
    def rebuild(self, counts: NDArray[np.float32], squares: NDArray[np.float32]) -> None:
        """Set counts [L, E, N] and squares [L, N], with rows of the same stride; both stay alive.

        To be called again when an entry changes. Raises ValueError.
        """

    def begin_pass(self) -> None: ...
    def observe(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        """Add ids [T, K] of int16, int32 or int64, negative: no expert.

        Raises ValueError, IndexError.
        """

    def similarity(self) -> NDArray[np.float32]:
        """Return the similarity [N]."""

    @property
    def layer(self) -> int:
        """The last observed layer; -1: no layer yet."""

def best_matches(
    similarity: NDArray[np.float32], stamps: NDArray[np.int64], most: int
) -> list[int]:
    """Return the places of the `most` largest, best first.

    Values equal to 1e-6 are ordered by stamp, the largest first.
    """
