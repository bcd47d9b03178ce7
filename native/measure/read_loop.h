// The read bandwidth of this machine's memory: the upper bound for kernels and plans.
//
//   buffer  |<- thread 0 ->|<- thread 1 ->| ...      each reads its part from end to end, `rounds`
//           whole pages, touched first by              times; all start a round together
//           the thread that reads them
//
// A loop only sums 32-byte words into four registers, so it waits only for loads. With prefetch it
// fetches the data kPrefetchBytes ahead. madvise() asks for huge pages, or refuses them. The loop
// uses AVX2 if the processor has it, and plain C++ otherwise.
#pragma once

#include <cstddef>

namespace moeinf {

inline constexpr std::size_t kPrefetchBytes = 1024;
inline constexpr int kMaxLoopThreads = 1024;

struct ReadLoop {
    std::size_t bytes;  // of the buffer: far more than the caches
    int threads;        // 1 to kMaxLoopThreads
    bool prefetch;
    bool huge_pages;
    int rounds;  // at least 1; the fastest is the result
};

// Returns the bytes per second of the fastest round. Throws std::invalid_argument, std::bad_alloc,
// std::system_error (a thread that cannot start).
double read_bandwidth(const ReadLoop& loop);

}  // namespace moeinf
