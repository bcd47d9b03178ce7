// Functions that the kernels with AVX2, FMA and F16C share.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/kernels.h"

#define MOEINF_AVX2 __attribute__((target("avx2,fma,f16c")))
#define MOEINF_INLINE __attribute__((always_inline)) inline

namespace moeinf {
namespace {

constexpr std::size_t kHalfRows = kBlockRows / 2;

MOEINF_AVX2 MOEINF_INLINE __m256i word(const std::int8_t* codes, std::size_t v) {
    std::int32_t four;
    std::memcpy(&four, codes + 4 * v, 4);
    return _mm256_set1_epi32(four);
}

MOEINF_AVX2 MOEINF_INLINE __m256i load(const std::byte* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

MOEINF_AVX2 MOEINF_INLINE __m256 scales_at(const std::byte* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

}  // namespace
}  // namespace moeinf
