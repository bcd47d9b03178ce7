"""The compiled floor: slots, a copy queue that fills them, checksums, and kernels.

Does not know models, experts, policies or torch; imports nothing of ours.
"""

from moeinf.native._native import (
    DEMAND,
    MAX_COMPUTE_THREADS,
    MAX_READERS,
    PAGE_BYTES,
    RESIDENT,
    SHARD_DATA_OFFSET,
    Cancelled,
    CopyQueue,
    CorruptShard,
    Counters,
    SlotPool,
    compute_threads,
    crc32c,
    read_bandwidth,
    set_compute_threads,
    syncfs,
)

__all__ = [
    "DEMAND",
    "MAX_COMPUTE_THREADS",
    "MAX_READERS",
    "PAGE_BYTES",
    "RESIDENT",
    "SHARD_DATA_OFFSET",
    "Cancelled",
    "CopyQueue",
    "CorruptShard",
    "Counters",
    "SlotPool",
    "compute_threads",
    "crc32c",
    "read_bandwidth",
    "set_compute_threads",
    "syncfs",
]
