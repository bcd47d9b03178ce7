// Quantises weights to q4k, q5k and q6k, the blocks of 256 weights of GGUF's K types (tiles.h).
//
// A group of q4k or q5k has a scale s and a minimum m. Each candidate (a range of codes, moved by a
// shift) gives codes, and those give the s and m of least squared error. The best of all is kept.
// The block's d and dmin are the largest of them by 63, in float16. With these, each group tries
// three neighbouring scales, with the minimum of least squared error for each. A half group of q6k
// has a scale as in q4 (quantise.h); d is the largest by −128.
//
// A lane is a row of the block. Sums run over k in ascending order without fused operations, so
// every machine writes the same bytes.
#pragma once

#include <cstddef>

#include "kernels/activations.h"
#include "kernels/tiles.h"

namespace moeinf {

// Writes up to 16 rows [count, columns] as one row block of q4k, q5k or q6k. A block of a row with a
// NaN or an infinity gets d = NaN.
void quantise_blocks(const std::byte* rows, Dtype dtype, std::size_t count, std::size_t columns,
                     Format format, std::byte* out) noexcept;

}  // namespace moeinf
