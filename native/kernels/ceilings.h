// What kernels are compared with: how fast this machine multiplies, and reads, at the moment.
// Does not know what is computed. For benchmarks only.
#pragma once

#include <cstddef>

#include "kernels/decode_attention.h"

namespace moeinf {

// Products per second, of all threads together, of the instruction that `path` multiplies with,
// with operands in registers: pairs of bfloat16, or float32.
double measure_products(AttentionPath path);

// Bytes per second of reading [data, data + bytes) once with `threads` of the pool's threads,
// prefetching `ahead` bytes (0: not at all).
double measure_reading(const std::byte* data, std::size_t bytes, std::size_t threads,
                       std::size_t ahead);

}  // namespace moeinf
