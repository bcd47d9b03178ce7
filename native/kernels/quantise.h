// Converts weights to tiles and back (tiles.h), with searched scales.
//
// The scale of a group of 32 weights is searched, not taken from its largest weight. The search
// takes the candidate c whose codes q explain most of the group, that is with the largest
//
//   (Σ x q)² / Σ q²        q = clamp(round(x · c / m))
//
// where m is the weight of largest magnitude, with its sign. q4 maps m near −8, because codes have
// −8 but not 8. q3 and q2 round to odd numbers. The scale is then Σ x q / Σ q², the least-squares scale, rounded to float16. The
// codes are computed again for that scale. Each lane searches one of the 16 rows of a block. All
// sums run over k in ascending order without fused operations, so every machine writes the same
// bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/activations.h"
#include "kernels/tiles.h"

namespace moeinf {

// Writes rows [count, columns] of `dtype`, row-major, as ceil(count / 16) row blocks of q8, q4, q3,
// q2, q4k, q5k or q6k (quantise_blocks.h). A group with a NaN or an infinity gets the scale NaN.
void quantise_rows(const std::byte* rows, Dtype dtype, std::size_t count, std::size_t columns,
                   Format format, std::byte* out) noexcept;

// Writes row blocks of tiles as rows [count, columns] of f32.
void dequantise_rows(const std::byte* blocks, Format format, std::size_t count,
                     std::size_t columns, float* out) noexcept;

// Interleaves blocks of a GGUF file: rows [count, tiles of a row, bytes of a block] become row
// blocks of q4k, q5k, q6k or nvfp4. In scales of nvfp4, 0x7F becomes zero and bit 7 is cleared,
// because GGUF reads them so. factors [count] are those of nvfp4's rows, null for 1.
void interleave_rows(const std::byte* rows, const float* factors, std::size_t count,
                     std::size_t columns, Format format, std::byte* out) noexcept;

// Writes the rows `ids` of a matrix [rows, columns] as f32, or rounded once to bf16; embeddings are
// read with it. Every id is below `rows`; the caller checks that.
void gather_rows(const std::byte* blocks, Format format, std::size_t columns,
                 std::span<const std::int64_t> ids, std::byte* out, Dtype dtype) noexcept;

std::uint16_t float_to_half(float value) noexcept;  // ties to even; infinity when out of range

}  // namespace moeinf
