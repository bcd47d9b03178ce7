// Reads a buffer from start to end on several threads, and takes the time.
#include "measure/read_loop.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "platform/cpu.h"
#include "platform/memory.h"
#include "queue/pages.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define MOEINF_X86 1
#endif

namespace moeinf {
namespace {

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kStepBytes = 2 * kLineBytes;
static_assert(kPageBytes % kStepBytes == 0, "parts are whole pages, and steps fill them");
static_assert(kPrefetchBytes % kLineBytes == 0);

template <bool prefetch>
std::uint64_t read_plain(const std::byte* from, std::size_t bytes) {
    const auto* const words = reinterpret_cast<const std::uint64_t*>(from);
    std::uint64_t sum[4] = {};
    for (std::size_t i = 0; i < bytes / sizeof(std::uint64_t); i += 8) {
        if constexpr (prefetch)
            __builtin_prefetch(reinterpret_cast<const char*>(words + i) + kPrefetchBytes);
        for (std::size_t k = 0; k < 8; ++k) sum[k % 4] += words[i + k];
    }
    return sum[0] + sum[1] + sum[2] + sum[3];
}

#ifdef MOEINF_X86
template <bool prefetch>
__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::byte* from, std::size_t bytes) {
    __m256i sum[4] = {};
    for (std::size_t at = 0; at < bytes; at += kStepBytes) {
        const std::byte* const step = from + at;
        if constexpr (prefetch) {
            _mm_prefetch(reinterpret_cast<const char*>(step + kPrefetchBytes), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(step + kPrefetchBytes + kLineBytes),
                         _MM_HINT_T0);
        }
        const auto* const words = reinterpret_cast<const __m256i*>(step);
        for (int k = 0; k < 4; ++k) sum[k] = _mm256_add_epi64(sum[k], _mm256_load_si256(words + k));
    }
    const __m256i all =
        _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
    return static_cast<std::uint64_t>(_mm256_extract_epi64(all, 0)) +
           static_cast<std::uint64_t>(_mm256_extract_epi64(all, 1)) +
           static_cast<std::uint64_t>(_mm256_extract_epi64(all, 2)) +
           static_cast<std::uint64_t>(_mm256_extract_epi64(all, 3));
}
#endif

using Loop = std::uint64_t (*)(const std::byte*, std::size_t);

Loop choose_loop(bool prefetch) {
#ifdef MOEINF_X86
    if (platform::cpu().avx2) return prefetch ? read_avx2<true> : read_avx2<false>;
#endif
    return prefetch ? read_plain<true> : read_plain<false>;
}

class Buffer {
  public:
    Buffer(std::size_t bytes, bool huge) : bytes_(bytes + kHugeBytes) {
        void* const at = platform::map_memory(bytes_);
        if (at == nullptr) throw std::bad_alloc();
        base_ = static_cast<std::byte*>(at);
        platform::advise_huge_pages(at, bytes_, huge);
    }
    ~Buffer() { platform::unmap_memory(base_, bytes_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::byte* aligned() const {
        const auto start = reinterpret_cast<std::uintptr_t>(base_);
        return base_ + (kHugeBytes - start % kHugeBytes) % kHugeBytes;
    }

  private:
    static constexpr std::size_t kHugeBytes = std::size_t{2} << 20;
    std::byte* base_;
    std::size_t bytes_;
};

}  // namespace

double read_bandwidth(const ReadLoop& loop) {
    using Clock = std::chrono::steady_clock;
    if (loop.threads < 1 || loop.threads > kMaxLoopThreads || loop.rounds < 1)
        throw std::invalid_argument("a read loop needs 1 to 1024 threads and at least one round");
    const auto threads = static_cast<std::size_t>(loop.threads);
    const std::size_t part = loop.bytes / threads / kPageBytes * kPageBytes;
    if (part == 0 || loop.bytes > kMaxRoundable / 2)
        throw std::invalid_argument("a read loop needs a page per thread");
    const Buffer buffer(loop.bytes, loop.huge_pages);
    const Loop read = choose_loop(loop.prefetch);
    std::atomic<std::uint64_t> sum{0};  // keeps the compiler from removing the loads
    std::vector<double> seconds(static_cast<std::size_t>(loop.rounds) + 1);
    Clock::time_point started;
    std::size_t round = 0;
    // Runs once per round on the last thread to arrive: the end of one round starts the next.
    const auto turn = [&]() noexcept {
        const auto now = Clock::now();
        if (round > 0)
            seconds[round - 1] = std::chrono::duration<double>(now - started).count();
        ++round;
        started = Clock::now();
    };
    std::barrier line(loop.threads, turn);
    const auto work = [&](std::size_t index) {
        std::byte* const mine = buffer.aligned() + index * part;
        for (std::size_t at = 0; at < part; at += kPageBytes)
            mine[at] = static_cast<std::byte>(at / kPageBytes);
        std::uint64_t local = 0;
        for (int i = 0; i < loop.rounds; ++i) {
            line.arrive_and_wait();
            local += read(mine, part);
        }
        line.arrive_and_wait();
        sum += local;
    };
    std::vector<std::jthread> others;
    std::size_t missing = threads - 1;
    try {
        others.reserve(threads - 1);
        for (std::size_t i = 1; i < threads; ++i, --missing) others.emplace_back(work, i);
    } catch (...) {
        // The started threads wait at the barrier for this thread and for those that did not start.
        for (std::size_t i = 0; i < missing + 1; ++i) line.arrive_and_drop();
        throw;
    }
    work(0);
    others.clear();
    const double best = *std::min_element(seconds.begin(), seconds.begin() + loop.rounds);
    return static_cast<double>(part * threads) / std::max(best, 1e-9);
}

}  // namespace moeinf
