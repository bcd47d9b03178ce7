// The page and shard constants that the arena, the reader and Python share.
//
// A shard on disk (one routed expert; written by offload/format/shards.py):
//
//   byte 0                      4096 = kShardDataOffset              4096 + expert bytes
//   |<- header length, JSON, ->|<------------ tensor data --------->|
//   |   padded with spaces     |  read into a slot by one pread     |  (end of file)
//
// The data begins on a page. So its file offset, the slot's address and the length rounded up to a
// page are all multiples of kPageBytes. O_DIRECT requires this, and no bounce buffer is needed.
#pragma once

#include <bit>
#include <cstddef>
#include <limits>

namespace moeinf {

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kShardDataOffset = 4096;

static_assert(std::has_single_bit(kPageBytes), "round_up_to_page masks");
static_assert(kShardDataOffset % kPageBytes == 0, "a shard's data must be readable by O_DIRECT");

// Largest byte count that round_up_to_page accepts.
inline constexpr std::size_t kMaxRoundable =
    std::numeric_limits<std::size_t>::max() - (kPageBytes - 1);

constexpr std::size_t round_up_to_page(std::size_t bytes) {
    return (bytes + kPageBytes - 1) & ~(kPageBytes - 1);
}
static_assert(round_up_to_page(0) == 0 && round_up_to_page(1) == kPageBytes);
static_assert(round_up_to_page(kPageBytes) == kPageBytes);

}  // namespace moeinf
