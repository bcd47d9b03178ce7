"""The compiled floor: an arena of equal slots, a copy queue that fills them, and checksums.

Does not know models, experts, policies or torch; imports nothing of ours.
"""

from moeinf.native._native import (
    DEMAND,
    MAX_READERS,
    PAGE_BYTES,
    RESIDENT,
    SHARD_DATA_OFFSET,
    Cancelled,
    CopyQueue,
    CorruptShard,
    Counters,
    SlotPool,
    crc32c,
    read_bandwidth,
    syncfs,
)

__all__ = [
    "DEMAND",
    "MAX_READERS",
    "PAGE_BYTES",
    "RESIDENT",
    "SHARD_DATA_OFFSET",
    "Cancelled",
    "CopyQueue",
    "CorruptShard",
    "Counters",
    "SlotPool",
    "crc32c",
    "read_bandwidth",
    "syncfs",
]
