// Loops that wait only for the unit that they measure.
#include "measure/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "threads/thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeinf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kTurns = 1 << 20;
constexpr std::size_t kChains = 12;  // sums in flight: enough to hide any latency
constexpr std::size_t kPieceBytes = 256 << 10;

// Returns the products of one turn; `sink` keeps the compiler from removing the loop.
using Multiply = std::size_t (*)(float* sink);

#if defined(__x86_64__)

__attribute__((target("avx512f,avx512bf16"))) std::size_t multiply_pairs(float* sink) {
    __m512 sums[kChains];
    for (auto& sum : sums) sum = _mm512_set1_ps(0);
    __m512i ones = _mm512_set1_epi32(0x3F803F80);
    for (std::size_t turn = 0; turn < kTurns; ++turn) {
        asm volatile("" : "+v"(ones));
#pragma GCC unroll 12
        for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, (__m512bh)ones, (__m512bh)ones);
    }
    for (auto& sum : sums) *sink += _mm512_cvtss_f32(sum);
    return 32 * kChains;
}

__attribute__((target("avx512f"))) std::size_t multiply_wide(float* sink) {
    __m512 sums[kChains], half = _mm512_set1_ps(0.5f);
    for (auto& sum : sums) sum = _mm512_set1_ps(1);
    for (std::size_t turn = 0; turn < kTurns; ++turn) {
        asm volatile("" : "+v"(half));
#pragma GCC unroll 12
        for (auto& sum : sums) sum = _mm512_fmadd_ps(sum, half, half);
    }
    for (auto& sum : sums) *sink += _mm512_cvtss_f32(sum);
    return 16 * kChains;
}

__attribute__((target("avx2,fma"))) std::size_t multiply_avx2(float* sink) {
    __m256 sums[kChains], half = _mm256_set1_ps(0.5f);
    for (auto& sum : sums) sum = _mm256_set1_ps(1);
    for (std::size_t turn = 0; turn < kTurns; ++turn) {
        asm volatile("" : "+x"(half));
#pragma GCC unroll 12
        for (auto& sum : sums) sum = _mm256_fmadd_ps(sum, half, half);
    }
    for (auto& sum : sums) *sink += _mm256_cvtss_f32(sum);
    return 8 * kChains;
}

#endif

std::size_t multiply_portable(float* sink) {
    typedef float Vector __attribute__((vector_size(16)));
    Vector sums[kChains], half = Vector{} + 0.5f;
    for (auto& sum : sums) sum = Vector{} + 1.0f;
    for (std::size_t turn = 0; turn < kTurns; ++turn) {
        asm volatile("" : "+m"(half));
#pragma GCC unroll 12
        for (auto& sum : sums) sum = sum * half + half;
    }
    for (auto& sum : sums) *sink += sum[0];
    return 4 * kChains;
}

Multiply multiplication(AttentionPath path) {
    switch (std::min(path, best_attention_path())) {
#if defined(__x86_64__)
        case AttentionPath::kAvx512Bf16: return multiply_pairs;
        case AttentionPath::kAvx512: return multiply_wide;
        case AttentionPath::kAvx2: return multiply_avx2;
#endif
        default: return multiply_portable;
    }
}

// Reads one word of every cache line: the least work for the processor, since memory moves lines.
std::size_t read_piece(const std::byte* data, std::size_t ahead) {
    std::size_t sums[4] = {};
    for (std::size_t at = 0; at < kPieceBytes; at += 256)
        for (std::size_t line = 0; line < 4; ++line) {
            const std::byte* from = data + at + line * 64;
            if (ahead) __builtin_prefetch(from + ahead);
            sums[line] += *reinterpret_cast<const std::size_t*>(from);
        }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

double measure_products(AttentionPath path) {
    const Multiply multiply = multiplication(path);
    const auto threads = static_cast<std::size_t>(compute_pool().threads());
    std::atomic<std::size_t> products = 0;
    const auto start = Clock::now();
    compute_pool().parallel_for(threads, [&](std::size_t) {
        float sink = 0;
        products += multiply(&sink) * kTurns + (sink == 12345.0f);
    });
    return static_cast<double>(products) /
           std::chrono::duration<double>(Clock::now() - start).count();
}

double measure_reading(const std::byte* data, std::size_t bytes, std::size_t threads,
                       std::size_t ahead) {
    const std::size_t pieces = bytes / kPieceBytes;
    std::atomic<std::size_t> sum = 0;
    const auto start = Clock::now();
    compute_pool().parallel_for(threads, [&](std::size_t t) {
        for (std::size_t p = t * pieces / threads; p < (t + 1) * pieces / threads; ++p)
            sum += read_piece(data + p * kPieceBytes, ahead);
    });
    const std::chrono::duration<double> taken = Clock::now() - start;
    return static_cast<double>(pieces * kPieceBytes) / (taken.count() + (sum == 1 ? 1e-12 : 0));
}

}  // namespace moeinf
