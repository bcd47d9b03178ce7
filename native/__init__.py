"""The compiled floor: an arena of equal slots, a copy queue that fills them, and checksums.

Does not know models, experts, policies or torch; imports nothing of ours.
"""

from moeinf.native._native import (
    DEMAND,
    PAGE_BYTES,
    SHARD_DATA_OFFSET,
    Cancelled,
    CopyQueue,
    CorruptShard,
    Counters,
    SlotPool,
    crc32c,
    syncfs,
)

__all__ = [
    "DEMAND",
    "PAGE_BYTES",
    "SHARD_DATA_OFFSET",
    "Cancelled",
    "CopyQueue",
    "CorruptShard",
    "Counters",
    "SlotPool",
    "crc32c",
    "syncfs",
]
