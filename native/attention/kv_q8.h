// A row of the KV cache in q8: one head of one token, in blocks of 32 values with a scale each.
//
//   | scale | 32 x int8 | scale | 32 x int8 | ...        value = int8 * scale
//      2         32          2         32                scale = max |x| / 127, as bfloat16
//
// The last block has the values that are left. A row has an even number of bytes, so that every
// scale is aligned. A value depends only on its block: values of other rows and tokens do not
// change it. models/layers/kv_q8.py writes the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeinf {

struct Q8 {  // a byte of a row
    std::uint8_t byte;
};
static_assert(sizeof(Q8) == 1);

inline constexpr std::size_t kQ8Values = 32;
inline constexpr std::size_t kQ8BlockBytes = sizeof(std::uint16_t) + kQ8Values;
static_assert(kQ8BlockBytes % sizeof(std::uint16_t) == 0);

constexpr std::size_t q8_row_bytes(std::size_t width) noexcept {
    const std::size_t rest = width % kQ8Values;
    return width / kQ8Values * kQ8BlockBytes + (rest ? sizeof(std::uint16_t) + (rest + 1) / 2 * 2 : 0);
}

// Writes a row from x [width] in bfloat16. A block with NaN or infinity gives no finite value.
void quantise_row(const std::uint16_t* x, std::size_t width, Q8* out) noexcept;

}  // namespace moeinf
