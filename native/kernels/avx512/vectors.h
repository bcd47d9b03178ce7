// Functions that the kernels with AVX-512 and VNNI share.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/kernels.h"
#include "platform/cpu.h"

#define MOEINF_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,f16c,fma")))
#define MOEINF_INLINE __attribute__((always_inline)) inline

namespace moeinf {
namespace {

// Returns the bytes between the current tile and the data prefetched into the second-level cache.
// On AMD a prefetch further ahead is slower than none (docs/decisions/0014), on Intel it is faster
// (docs/decisions/0112).
inline std::size_t far_ahead() noexcept {
    return platform::cpu().intel ? 6144 : 1024;
}

template <std::size_t bytes>
MOEINF_AVX512 MOEINF_INLINE void prefetch(const std::byte* at, std::size_t ahead) {
#pragma GCC unroll 32
    for (std::size_t line = 0; line < bytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(at + ahead + line), _MM_HINT_T1);
}

// Fetches into the first-level cache what lies in the second.
template <std::size_t bytes>
MOEINF_AVX512 MOEINF_INLINE void prefetch_near(const std::byte* at) {
#pragma GCC unroll 32
    for (std::size_t line = 0; line < bytes + 64; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(at + line), _MM_HINT_T0);
}

MOEINF_AVX512 MOEINF_INLINE __m512i word(const std::int8_t* codes, std::size_t v) {
    std::int32_t four;
    std::memcpy(&four, codes + 4 * v, 4);
    return _mm512_set1_epi32(four);
}

MOEINF_AVX512 MOEINF_INLINE __m512 scales_at(const std::byte* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

}  // namespace
}  // namespace moeinf
