// What kernels multiply weights with: rows of activations, quantised or split, and the nonlinearity.
// Does not know weights.
//
// One row of K activations, as kernels read it:
//
//   for tiles    per group of 32:  { int32 start = −zero · Σ q,  float scale,  int8 q[32] }
//   for bf16     per 32:           { float even[16] = k 0 2 … 30,  float odd[16] = k 1 3 … 31 }
//
// A row is padded with zeros to a multiple of 64. A group with an infinity or a NaN gets scale NaN
// and codes 0, so that every output of that row is NaN, and no other row notices. A group whose
// largest magnitude is below kLeastMagnitude counts as zeros.
//
// Everything here is element by element, in float32, without fused operations: every machine
// computes the same bits.
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

inline constexpr float kLeastMagnitude = 1e-30f;

enum class Dtype { kBf16, kF32 };  // of a tensor of activations

// What an expert computes between its matrices.
enum class Activation {
    kSwiGlu,         // silu(gate) · up
    kClampedSwiGlu,  // (u + 1) · g · sigmoid(kAlpha · g), g = min(gate, kLimit), u = up in ± kLimit
    kRelu,           // max(up, 0): there is no gate
};

inline constexpr float kClampedAlpha = 1.702f;  // gpt-oss
inline constexpr float kClampedLimit = 7.0f;

constexpr bool is_gated(Activation activation) {
    return activation != Activation::kRelu;
}

// A row of a tensor of activations.
struct RowView {
    const std::byte* data;
    Dtype dtype;
};

// Groups of a padded row of `columns` activations.
constexpr std::size_t groups_of(std::size_t columns) {
    return ceil_div(columns, kTileColumns) * kTileGroups;
}

void quantise_row(RowView row, std::size_t columns, Format format, QuantGroup* out) noexcept;
void split_row(RowView row, std::size_t columns, SplitGroup* out) noexcept;

// 32 values, as one group of a row. For bf16 they are rounded to bf16 first.
void quantise_group(const float* values, Format format, QuantGroup* out) noexcept;
void split_group(const float* values, SplitGroup* out) noexcept;

// Reads `count` neighbouring values.
void load_row(const std::byte* from, std::size_t count, Dtype dtype, float* values) noexcept;

// Writes `count` outputs of a row, from column `first` on.
void store_row(const float* values, std::size_t count, std::byte* row, Dtype dtype,
               std::size_t first) noexcept;

// values[i] = activation(gate[i], up[i]) for 32 values; without a gate, `gate` is not read. exp() is
// a polynomial of degree 6, within 2 ulp; for SwiGLU a gate below -88 gives −0 and above 88 the gate
// itself, as exp would. A NaN stays one.
void activate(Activation activation, const float* gate, const float* up, float* values) noexcept;

}  // namespace moeinf
