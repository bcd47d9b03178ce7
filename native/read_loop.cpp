// Streams memory through the widest vectors there are.
// Does not know what the bytes are.
#include "read_loop.h"

#include <atomic>

#include "kernels.h"

namespace moeinf {
namespace {

constexpr std::size_t kPiece = std::size_t{256} << 10;  // of one thread at a time
constexpr std::size_t kAhead = 4096;

using Words = std::uint64_t __attribute__((vector_size(64)));

template <bool prefetch>
__attribute__((always_inline)) inline std::uint64_t read(const std::byte* at,
                                                         const std::byte* end) {
    Words sums[4] = {};
    for (; end - at >= 256; at += 256)
        for (std::size_t i = 0; i < 4; ++i) {
            if constexpr (prefetch) __builtin_prefetch(at + kAhead + 64 * i, 0, 3);
            sums[i] ^= *reinterpret_cast<const Words*>(at + 64 * i);
        }
    for (; end - at >= 64; at += 64) sums[0] ^= *reinterpret_cast<const Words*>(at);
    const Words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < 8; ++i) sum ^= all[i];
    return sum;
}

using Read = std::uint64_t (*)(const std::byte*, const std::byte*);

template <bool prefetch>
std::uint64_t read_baseline(const std::byte* at, const std::byte* end) {
    return read<prefetch>(at, end);
}

#if defined(__x86_64__)
template <bool prefetch>
__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::byte* at,
                                                        const std::byte* end) {
    return read<prefetch>(at, end);
}

template <bool prefetch>
__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::byte* at,
                                                             const std::byte* end) {
    return read<prefetch>(at, end);
}
#endif

template <bool prefetch>
Read fastest() {
#if defined(__x86_64__)
    if (has_avx512()) return read_avx512<prefetch>;
    if (has_avx2()) return read_avx2<prefetch>;
#endif
    return read_baseline<prefetch>;
}

}  // namespace

std::uint64_t read_loop(ThreadPool& pool, const std::byte* data, std::size_t bytes,
                        bool prefetch) {
    const Read read = prefetch ? fastest<true>() : fastest<false>();
    // The first whole cache line is where a vector may be loaded from.
    const std::size_t skip = -reinterpret_cast<std::uintptr_t>(data) % 64;
    if (bytes < skip) return 0;
    data += skip;
    bytes = (bytes - skip) / 64 * 64;
    std::atomic<std::uint64_t> sum{0};
    pool.parallel_for((bytes + kPiece - 1) / kPiece, [&](std::size_t piece) {
        const std::byte* const from = data + piece * kPiece;
        const std::byte* const end = data + bytes;
        sum.fetch_xor(read(from, end - from > static_cast<std::ptrdiff_t>(kPiece) ? from + kPiece
                                                                                  : end),
                      std::memory_order_relaxed);
    });
    return sum.load();
}

}  // namespace moeinf
