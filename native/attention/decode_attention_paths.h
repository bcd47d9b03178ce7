// The interface of a path of decode attention: packing a query, and running one task.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/bf16.h"
#include "attention/decode_attention.h"
#include "attention/kv_q8.h"

namespace moeinf::attention {

// One (key head, block of keys) for `heads` <= kMaxLanesHeads query heads that share the key head.
struct Task {
    const void* packed;  // written by the path's pack() for these heads
    const void* keys;    // the first key of the block
    const void* values;
    std::size_t key_stride, value_stride;  // items from one token to the next
    std::size_t count;                     // keys in the block, at least 1
    std::size_t heads;
    std::size_t key_width, value_width;
    float scale;  // times log2(e)
    bool bf16;
    float* partials;             // [heads][partial_stride]
    std::size_t partial_stride;  // floats
};

// The functions of one path. A packed group of heads has packed_bytes bytes, rounded up and aligned
// to 64 by the caller.
struct Path {
    std::size_t (*packed_bytes)(std::size_t heads, std::size_t key_width);
    void (*pack)(const void* q, std::size_t heads, std::size_t key_width, bool bf16, void* packed);
    void (*run)(const Task& task) noexcept;
};

// Operations on bfloat16 rows, computed in float32.
struct RowMath {
    // out [width] = sum over rows of x[row] * weights[row]; weights [rows][width]
    void (*sum)(const std::uint16_t* weights, std::size_t rows, std::size_t width,
                const std::uint16_t* x, std::uint16_t* out) noexcept;
    // out [rows] = weights[row] · x
    void (*dot)(const std::uint16_t* weights, std::size_t rows, std::size_t width,
                const std::uint16_t* x, std::uint16_t* out) noexcept;
    // out = x / sqrt(mean(x²) + eps), rounded, times weight; may be in place
    void (*norm)(const std::uint16_t* weight, std::size_t width, float eps, const std::uint16_t* x,
                 std::uint16_t* out) noexcept;
    // The same with one rounding, after the product with weight.
    void (*wide_norm)(const float* weight, std::size_t width, float eps, const std::uint16_t* x,
                      std::uint16_t* out) noexcept;
    // Rotates the pairs (i, i + width/2) by the angles cos, sin [width/2]; may be in place.
    void (*rotate_half)(const std::uint16_t* x, const float* cos, const float* sin,
                        std::size_t width, std::uint16_t* out) noexcept;
};

const RowMath& row_math() noexcept;  // for best_attention_path()

inline constexpr float kNoKey = -1e30f;  // the score of a missing key; its power of two is 0

extern const Path kPortablePath, kNeonPath, kAvx2Path, kAvx512Path, kAvx512Bf16Path;
extern const Path kPortableQ8Path, kNeonQ8Path, kAvx2Q8Path;  // for caches in q8

}  // namespace moeinf::attention
