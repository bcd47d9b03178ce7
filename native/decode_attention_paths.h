// What every path of decode attention offers: packing a query, and one task.
// Does not know requests, threads or how tasks are combined.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decode_attention.h"

namespace moeinf::attention {

// One (key head, block of keys) for `heads` <= kMaxLanesHeads query heads that share the key head.
struct Task {
    const void* packed;  // what the path's pack() wrote for these heads
    const void* keys;    // the first key of the block
    const void* values;
    std::size_t key_stride, value_stride;  // elements from one token to the next
    std::size_t count;                     // keys in the block, at least 1
    std::size_t heads;
    std::size_t key_width, value_width;
    float scale;  // times log2(e)
    bool bf16;
    float* partials;             // [heads] of them
    std::size_t partial_stride;  // floats
};

// Bytes of a packed group of heads: a multiple of 64, aligned so.
struct Path {
    std::size_t (*packed_bytes)(std::size_t heads, std::size_t key_width);
    void (*pack)(const void* q, std::size_t heads, std::size_t key_width, bool bf16, void* packed);
    void (*run)(const Task& task) noexcept;
};

inline constexpr float kNoKey = -1e30f;  // a score below every real one; its power of two is 0

extern const Path kPortablePath, kAvx2Path, kAvx512Path, kAvx512Bf16Path;

inline float widen(std::uint16_t bf16) noexcept {
    const std::uint32_t bits = std::uint32_t{bf16} << 16;
    return __builtin_bit_cast(float, bits);
}

// Rounds to nearest, ties to even; a NaN stays one.
inline std::uint16_t narrow(float value) noexcept {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
    return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace moeinf::attention
