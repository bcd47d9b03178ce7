// The fastest that memory can be read: what kernels are compared with.
// Does not know what the bytes are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "thread_pool.h"

namespace moeinf {

// Reads every whole cache line of [data, data + bytes) once with all threads of the pool, with or
// without software prefetch, and returns the exclusive-or of all its 64-bit words.
std::uint64_t read_loop(ThreadPool& pool, const std::byte* data, std::size_t bytes, bool prefetch);

}  // namespace moeinf
