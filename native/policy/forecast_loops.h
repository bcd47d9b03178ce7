// The loops of forecast.cpp over experts and positions. Only that file includes them.
//
// Loops over experts and positions are compiled for several widths of vectors. All give the same
// bits: no loop sums over its lanes, and products are not fused with sums (CMakeLists.txt).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "platform/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define MOEINF_COUNTS_BITS  // target_clones has no name for processors that count bits in vectors
#endif
#if defined(__x86_64__) && defined(__ELF__)  // gcc chooses between clones with ELF's ifunc only
#define MOEINF_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MOEINF_WIDE
#endif

namespace moeinf {
namespace {

constexpr float kFade = 0.9F, kFar = 30;
constexpr float kSteps = 240, kStepsPerUnit = kSteps / kFar, kTooFar = kSteps + 1;

// log2 and 2^x by polynomials: the same bits on every processor, and vectors for the compiler.
inline float log2_of(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const auto power = static_cast<float>(static_cast<int>(bits >> 23) - 127);
    const float m = std::bit_cast<float>((bits & 0x7FFFFFU) | 0x3F800000U) - 1;
    return power + m * (1.4388F + m * (-0.6787F + m * (0.3218F - m * 0.0819F)));
}

inline float exp2_of(float x) {
    x = x < -60 ? -60 : x;  // not std::min and std::max: their references keep loops scalar
    x = (x > 60 ? 60 : x) + 64;  // above 0, so that a cast truncates downwards
    const auto whole = static_cast<int>(x);
    const float r = x - static_cast<float>(whole);
    const float m = 1 + r * (0.6951F + r * (0.2276F + r * 0.0773F));
    return m * std::bit_cast<float>(static_cast<std::uint32_t>(whole + 63) << 23);
}

inline float share_input(float share) { return log2_of(share + 0.02F); }
inline float count_input(float count) { return log2_of(1 + count); }

MOEINF_WIDE void share_inputs(float* x, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) x[i] = share_input(x[i]);
}

MOEINF_WIDE void scale_row(float* x, float mean, float scale, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) x[i] = (x[i] - mean) * scale;
}

// out [O, count] <- bias [O] + weights [O, J] · in [J, count]
MOEINF_WIDE void affine(const float* in, const float* weights, std::span<const float> bias,
                        std::size_t width, std::size_t count, float* out) {
    constexpr std::size_t kBlock = 32;  // sums that fit in registers
    for (std::size_t o = 0; o < bias.size(); ++o, out += count, weights += width) {
        std::size_t first = 0;
        for (; first + kBlock <= count; first += kBlock) {
            float sums[kBlock];
            for (std::size_t i = 0; i < kBlock; ++i) sums[i] = bias[o];
            for (std::size_t j = 0; j < width; ++j)
                for (std::size_t i = 0; i < kBlock; ++i)
                    sums[i] += weights[j] * in[j * count + first + i];
            for (std::size_t i = 0; i < kBlock; ++i) out[first + i] = sums[i];
        }
        for (; first < count; ++first) {
            float sum = bias[o];
            for (std::size_t j = 0; j < width; ++j) sum += weights[j] * in[j * count + first];
            out[first] = sum;
        }
    }
}

// similar [count] <- overlap + before, or -1 without a token after it if `followed`. Returns the most.
MOEINF_WIDE float add_similar(const float* overlap, const float* before, const std::int64_t* after,
                              bool followed, std::size_t count, float* similar) {
    constexpr std::size_t kLanes = 16;
    float most[kLanes];
    std::fill_n(most, kLanes, -1.0F);
    for (std::size_t i = 0; i < count; ++i) similar[i] = overlap[i] + before[i];
    if (followed)
        for (std::size_t i = 0; i < count; ++i) similar[i] = after[i] < 0 ? -1.0F : similar[i];
    std::size_t first = 0;
    for (; first + kLanes <= count; first += kLanes)
        for (std::size_t i = 0; i < kLanes; ++i)
            most[i] = most[i] < similar[first + i] ? similar[first + i] : most[i];
    for (; first < count; ++first) most[0] = std::max(most[0], similar[first]);
    return *std::max_element(most, most + kLanes);
}

// steps [count] <- how far each similarity is below the best, in steps; kTooFar: too far, or none
MOEINF_WIDE void count_steps(const float* similar, float best, std::size_t count,
                             std::uint16_t* steps) {
    for (std::size_t i = 0; i < count; ++i) {
        const float below = (best - similar[i]) * kStepsPerUnit;
        const float step = similar[i] < 0 || below > kSteps ? kTooFar : below;
        steps[i] = static_cast<std::uint16_t>(static_cast<int>(step));
    }
}

MOEINF_WIDE void rectify(float* x, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) x[i] = std::max(x[i], 0.01F * x[i]);
}

MOEINF_WIDE void logistic(float* x, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) x[i] = 1 / (1 + exp2_of(-1.442695F * x[i]));
}

// keep [count] <- p [spans, count] · discount, of each span what the one before has not; + mixture · score
MOEINF_WIDE void keep_row(const float* p, std::span<const float> discount, const float* score,
                          float mixture, std::size_t count, float* keep) {
    for (std::size_t e = 0; e < count; ++e) keep[e] = p[e] * discount[0];
    for (std::size_t s = 1; s < discount.size(); ++s) {
        const float *now = p + s * count, *before = now - count, wait = discount[s];
        for (std::size_t e = 0; e < count; ++e) {
            const float more = now[e] - before[e];
            keep[e] += (more > 0 ? more : 0) * wait;
        }
    }
    for (std::size_t e = 0; e < count; ++e) keep[e] += mixture * score[e];
}

// overlap [count] <- kFade · overlap + bits of [words, stride] in common with `chosen`
inline void overlaps(const std::uint64_t* bits, const std::uint64_t* chosen, std::size_t words,
                     std::size_t stride, std::size_t first, std::size_t count, float* overlap) {
    constexpr std::size_t kBlock = 64;
    for (; first < count; first += kBlock) {
        const std::size_t width = std::min(kBlock, count - first);
        std::uint64_t common[kBlock]{};
        for (std::size_t w = 0; w < words; ++w) {
            const std::uint64_t *from = bits + w * stride + first, mask = chosen[w];
            for (std::size_t n = 0; n < width; ++n)
                common[n] += static_cast<std::uint64_t>(std::popcount(from[n] & mask));
        }
        for (std::size_t n = 0; n < width; ++n)
            overlap[first + n] =
                overlap[first + n] * kFade + static_cast<float>(static_cast<int>(common[n]));
    }
}

#ifdef MOEINF_COUNTS_BITS
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vpopcntdq"), flatten)) void
overlaps_wide(const std::uint64_t* bits, const std::uint64_t* chosen, std::size_t words,
              std::size_t stride, std::size_t count, float* overlap) {
    overlaps(bits, chosen, words, stride, 0, count, overlap);
}

// The same: 4 · 64 bits of `from` and `mask` are counted by halves of bytes.
__attribute__((target("avx2"))) inline __m256i bits_in_common(const std::uint64_t* from,
                                                              __m256i mask) {
    const __m256i counts = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const __m256i half = _mm256_set1_epi8(15);
    const __m256i same = _mm256_and_si256(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), mask);
    const __m256i low = _mm256_shuffle_epi8(counts, _mm256_and_si256(same, half));
    const __m256i high =
        _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi16(same, 4), half));
    return _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256());
}

__attribute__((target("avx2"))) void overlaps_by_bytes(const std::uint64_t* bits,
                                                       const std::uint64_t* chosen,
                                                       std::size_t words, std::size_t stride,
                                                       std::size_t count, float* overlap) {
    const __m256i in_order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    std::size_t n = 0;
    for (; n + 8 <= count; n += 8) {
        __m256i first = _mm256_setzero_si256(), last = first;
        for (std::size_t w = 0; w < words; ++w) {
            const __m256i mask = _mm256_set1_epi64x(static_cast<long long>(chosen[w]));
            first = _mm256_add_epi64(first, bits_in_common(bits + w * stride + n, mask));
            last = _mm256_add_epi64(last, bits_in_common(bits + w * stride + n + 4, mask));
        }
        const __m256 both = _mm256_shuffle_ps(_mm256_castsi256_ps(first),
                                              _mm256_castsi256_ps(last), 0x88);  // the lower halves
        const __m256i common = _mm256_permutevar8x32_epi32(_mm256_castps_si256(both), in_order);
        const __m256 faded = _mm256_mul_ps(_mm256_loadu_ps(overlap + n), _mm256_set1_ps(kFade));
        _mm256_storeu_ps(overlap + n, _mm256_add_ps(faded, _mm256_cvtepi32_ps(common)));
    }
    overlaps(bits, chosen, words, stride, n, count, overlap);
}
#endif

void add_overlap(const std::uint64_t* bits, const std::uint64_t* chosen, std::size_t words,
                 std::size_t stride, std::size_t count, float* overlap) {
#ifdef MOEINF_COUNTS_BITS
    static const bool wide =
        platform::cpu().avx512vpopcntdq && platform::cpu().avx512vl &&
        platform::cpu().avx512bw && platform::cpu().avx512dq;
    static const bool bytes = platform::cpu().avx2;
    if (wide) return overlaps_wide(bits, chosen, words, stride, count, overlap);
    if (bytes) return overlaps_by_bytes(bits, chosen, words, stride, count, overlap);
#endif
    overlaps(bits, chosen, words, stride, 0, count, overlap);
}

// counts [kTooFar + 1] of each number of steps. Four tables: equal numbers follow each other.
inline void count_each(std::span<const std::uint16_t> steps, std::span<std::uint32_t> counts) {
    std::uint32_t found[4][static_cast<std::size_t>(kTooFar) + 1]{};
    std::size_t at = 0;
    for (; at + 4 <= steps.size(); at += 4)
        for (std::size_t i = 0; i < 4; ++i) ++found[i][steps[at + i]];
    for (; at < steps.size(); ++at) ++found[0][steps[at]];
    for (std::size_t s = 0; s < counts.size(); ++s)
        counts[s] = found[0][s] + found[1][s] + found[2][s] + found[3][s];
}

}  // namespace
}  // namespace moeinf
