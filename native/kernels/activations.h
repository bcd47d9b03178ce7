// Rows of activations, quantised or split for the kernels, and the activation functions.
//
// One row of K activations in the form that kernels read:
//
//   for tiles    per group of 32:  { int32 start,  float scale,  int8 q[32] }
//                start   q8 … q2, mxfp4  −zero · Σ q
//                        q4k, q5k        −Σ q
//                        q6k, nvfp4      int16 Σ q of the first 16, int16 Σ q of the last 16
//   for bf16     per 32:           { float even[16] = k 0 2 … 30,  float odd[16] = k 1 3 … 31 }
//
// A row is padded with zeros to whole tiles (bf16: to a multiple of 64). A group with an infinity
// or a NaN gets scale NaN and codes 0. So every output of that row is NaN, and no other row is
// affected. A group whose largest magnitude is below kLeastMagnitude is taken as zeros.
//
// All operations here are element by element, in float32 and not fused, so every machine computes
// the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/bf16.h"
#include "kernels/tiles.h"

namespace moeinf {

struct QuantGroup {
    std::int32_t start;
    float scale;
    std::int8_t codes[kGroup];
};
static_assert(sizeof(QuantGroup) == 40);

struct SplitGroup {
    float even[kGroup / 2];
    float odd[kGroup / 2];
};
static_assert(sizeof(SplitGroup) == 128);

// A group of up to 16 rows together, for AMX. Rows that are not there are zeros.
inline constexpr std::size_t kSetRows = 16;
struct alignas(64) RowSet {
    std::int8_t codes[kSetRows][kGroup];
    float scales[kSetRows];
    float levels[kSetRows];  // q4k, q5k: start
};
static_assert(sizeof(RowSet) == 640);

inline constexpr float kLeastMagnitude = 1e-30f;

enum class Dtype { kBf16, kF32 };  // of a tensor of activations

// The function that an expert computes between its matrices.
enum class Activation {
    kSwiGlu,         // silu(gate) · up
    kSwiGlu10,       // silu(g) · u, g = min(gate, 10), u = up in ± 10
    kClampedSwiGlu,  // (u + 1) · g · sigmoid(kAlpha · g), g = min(gate, kLimit), u = up in ± kLimit
    kGeGlu,          // gelu(gate) · up, gelu in its tanh form: g · sigmoid(g · (kGelu + kGeluCube · g²))
    kRelu,           // max(up, 0), without a gate
    kRelu2,          // max(up, 0)², without a gate
};

inline constexpr float kSwiGluLimit = 10.0f;   // DeepSeek-V4, GLM-5.3
inline constexpr float kClampedAlpha = 1.702f;  // gpt-oss
inline constexpr float kClampedLimit = 7.0f;
inline constexpr float kGelu = 1.59576912f;  // 2 · √(2/π): 1 + tanh(z) = 2 · sigmoid(2z)
inline constexpr float kGeluCube = 0.0713548163f;  // 0.044715 of it

constexpr bool is_gated(Activation activation) {
    return activation != Activation::kRelu && activation != Activation::kRelu2;
}

// A row of a tensor of activations.
struct RowView {
    const std::byte* data;
    Dtype dtype;
};

// Returns the groups of a padded row of `columns` activations.
constexpr std::size_t groups_of(Format format, std::size_t columns) {
    return tiles_of(format, columns) * (tile_columns(format) / kGroup);
}

void quantise_row(RowView row, std::size_t columns, Format format, QuantGroup* out) noexcept;
void split_row(RowView row, std::size_t columns, SplitGroup* out) noexcept;

// Convert 32 values to one group of a row. split_group first rounds them to bf16.
void quantise_group(const float* values, Format format, QuantGroup* out) noexcept;
void split_group(const float* values, SplitGroup* out) noexcept;

// Reads `count` consecutive values.
void load_row(const std::byte* from, std::size_t count, Dtype dtype, float* values) noexcept;

// Writes `count` outputs of a row, starting at column `first`.
void store_row(const float* values, std::size_t count, std::byte* row, Dtype dtype,
               std::size_t first) noexcept;

// Writes values[i] = activation(gate[i], up[i]) for 32 values; without a gate `gate` is not read.
// exp() is a polynomial of degree 6, within 2 ulp. For SwiGLU a gate below -88 gives −0 and a gate
// above 88 gives the gate itself, as with an exact exp. A NaN stays NaN.
void activate(Activation activation, const float* gate, const float* up, float* values) noexcept;

// Writes values[i] = 1 / (1 + exp(-x[i])) for 32 values, with the same exp().
void sigmoid(const float* x, float* values) noexcept;

}  // namespace moeinf
