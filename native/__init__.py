"""The compiled floor: slots, a copy queue that fills them, checksums, and kernels.

Does not know models, experts, policies or torch; imports nothing of ours.
"""

from moeinf.native._native import (
    DEMAND,
    MAX_COMPUTE_THREADS,
    PAGE_BYTES,
    SHARD_DATA_OFFSET,
    Cancelled,
    CopyQueue,
    CorruptShard,
    Counters,
    DecodeAttention,
    GqaStep,
    MlaStep,
    SlotPool,
    attention_block_keys,
    attention_path,
    compute_threads,
    crc32c,
    rms_norm,
    set_compute_threads,
    syncfs,
)

__all__ = [
    "DEMAND",
    "MAX_COMPUTE_THREADS",
    "PAGE_BYTES",
    "SHARD_DATA_OFFSET",
    "Cancelled",
    "CopyQueue",
    "CorruptShard",
    "Counters",
    "DecodeAttention",
    "GqaStep",
    "MlaStep",
    "SlotPool",
    "attention_block_keys",
    "attention_path",
    "compute_threads",
    "crc32c",
    "rms_norm",
    "set_compute_threads",
    "syncfs",
]
