// How fast this machine's memory can be read: the ceiling that kernels and plans are held against.
// Does not know experts or slots.
//
//   buffer  |<- thread 0 ->|<- thread 1 ->| ...      each reads its part from end to end, `rounds`
//           whole pages, touched first by              times; all start a round together
//           the thread that reads them
//
// A loop sums 32-byte words into four registers, nothing else: the loads are all it waits for. With
// prefetch it asks for what lies kPrefetchBytes ahead. Buffer pages are huge or explicitly not. AVX2 is used where the processor has it; elsewhere the same in plain C++.
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
    int rounds;  // at least 1; the fastest counts
};

// Bytes per second of the fastest round. Throws std::invalid_argument, std::bad_alloc,
// std::system_error (a thread that cannot start).
double read_bandwidth(const ReadLoop& loop);

}  // namespace moeinf
