// Measures how fast this machine multiplies and reads at the moment, for plans and to compare
// kernels with.
#pragma once

#include <cstddef>

#include "attention/decode_attention.h"

namespace moeinf {

// Returns the products per second of all threads together, for the multiplying instruction of
// `path` with operands in registers: pairs of bfloat16, or float32.
double measure_products(AttentionPath path);

// Returns the bytes per second of one read of [data, data + bytes) with `threads` of the pool's
// threads, prefetching `ahead` bytes ahead (0: no prefetch).
double measure_reading(const std::byte* data, std::size_t bytes, std::size_t threads,
                       std::size_t ahead);

}  // namespace moeinf
