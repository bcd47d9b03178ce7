// Weights to tiles and back (tiles.h), with searched scales.
// Does not know files or tensors' names.
//
// The scale of a group of 32 weights is searched, not taken from its largest weight: of several
// candidates c, the one whose codes q explain most of the group, that is with the largest
//
//   (Σ x q)² / Σ q²        q = clamp(round(x · c / m))
//
// where m is the weight of largest magnitude, with its sign: q4 maps it near −8, which codes have
// and 8 is not. The scale is then Σ x q / Σ q², the least-squares one, rounded to float16, and
// the codes are rounded once more for it. 16 rows are searched at once, one to a lane; all sums run
// over k in ascending order without fused operations, so every machine writes the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/activations.h"
#include "kernels/tiles.h"

namespace moeinf {

// Rows [count, columns] of `dtype`, row-major, to ceil(count / 16) row blocks. A group with a NaN
// or an infinity gets the scale NaN.
void quantise_rows(const std::byte* rows, Dtype dtype, std::size_t count, std::size_t columns,
                   Format format, std::byte* out) noexcept;

// Row blocks back to rows of f32.
void dequantise_rows(const std::byte* blocks, Format format, std::size_t count,
                     std::size_t columns, float* out) noexcept;

// The rows of a matrix [rows, columns] that `ids` name, as f32 or rounded once to bf16: what an
// embedding is read with. Every id is below `rows`; the caller has checked.
void gather_rows(const std::byte* blocks, Format format, std::size_t columns,
                 std::span<const std::int64_t> ids, std::byte* out, Dtype dtype) noexcept;

std::uint16_t float_to_half(float value) noexcept;  // to nearest even; beyond the range: infinity

}  // namespace moeinf
