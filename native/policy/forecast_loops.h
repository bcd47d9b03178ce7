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

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MOEINF_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define MOEINF_COUNTS_BITS  // target_clones has no name for processors that count bits in vectors
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
    x = std::min(std::max(x, -60.0F), 60.0F) + 64;  // above 0, so that a cast truncates downwards
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

// overlap [count] <- kFade · overlap + bits of [count, words] in common with `chosen`
inline void overlaps(const std::uint64_t* bits, const std::uint64_t* chosen, std::size_t words,
                     std::size_t count, float* overlap) {
    if (words == 1) {
        const std::uint64_t mask = *chosen;
        for (std::size_t n = 0; n < count; ++n)
            overlap[n] = overlap[n] * kFade + static_cast<float>(static_cast<int>(std::popcount(bits[n] & mask)));
        return;
    }
    for (std::size_t n = 0; n < count; ++n) {
        int common = 0;
        for (std::size_t w = 0; w < words; ++w) common += std::popcount(bits[n * words + w] & chosen[w]);
        overlap[n] = overlap[n] * kFade + static_cast<float>(common);
    }
}

#ifdef MOEINF_COUNTS_BITS
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vpopcntdq"), flatten)) void
overlaps_wide(const std::uint64_t* bits, const std::uint64_t* chosen, std::size_t words,
              std::size_t count, float* overlap) {
    overlaps(bits, chosen, words, count, overlap);
}
#endif

MOEINF_WIDE void overlaps_any(const std::uint64_t* bits, const std::uint64_t* chosen,
                              std::size_t words, std::size_t count, float* overlap) {
    overlaps(bits, chosen, words, count, overlap);
}

void add_overlap(const std::uint64_t* bits, const std::uint64_t* chosen, std::size_t words,
                 std::size_t count, float* overlap) {
#ifdef MOEINF_COUNTS_BITS
    static const bool wide =
        __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    if (wide) return overlaps_wide(bits, chosen, words, count, overlap);
#endif
    overlaps_any(bits, chosen, words, count, overlap);
}

}  // namespace
}  // namespace moeinf
