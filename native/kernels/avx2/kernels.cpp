// The kernels with AVX2, FMA and F16C: a vector is one word of 8 rows, half of a block.
// has_avx2() tells if the processor has them.
//
// `vpmaddubsw` adds two products in 16 bits and saturates. With q4, q3 and q2 no sum saturates: eight
// sums are at most 8 · 2 · 15 · 127 = 30480, so a whole group stays in 16 bits. With mxfp4 half a group
// stays in 16 bits, because four sums are at most 4 · 2 · 24 · 127 = 24384. q8 multiplies |w| by
// a · sign(w): two products are at most 2 · 128 · 127 = 32512.
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include "kernels/avx2/vectors.h"
#include "platform/cpu.h"

namespace moeinf {
namespace {

static_assert(8 * 2 * 15 * 127 < 32768 && 4 * 2 * 24 * 127 < 32768 && 2 * 128 * 127 < 32768,
              "no saturation");

// Reads 8 scales of mxfp4: bytes e, each 2^(e − 127).
MOEINF_AVX2 MOEINF_INLINE __m256 powers_at(const std::byte* at) {
    const __m128i e = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(e), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(kLeastE8M0)));
}

MOEINF_AVX2 MOEINF_INLINE __m256 step(__m256 sum, __m256i dot, __m256 scales, float scale) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(scales, _mm256_set1_ps(scale)),
                           sum);
}

// Moves bits of every byte left by `by`, right where it is negative, and keeps those of `mask`.
MOEINF_AVX2 MOEINF_INLINE __m256i moved(__m256i bytes, int by, int mask) {
    const __m256i kept = _mm256_set1_epi8(static_cast<char>(mask));
    return _mm256_and_si256(
        by < 0 ? _mm256_srli_epi16(bytes, -by) : _mm256_slli_epi16(bytes, by), kept);
}

// Unpacks the codes of 8 rows of a group: words v = 0 … 7.
template <Format format>
MOEINF_AVX2 MOEINF_INLINE void unpack(const std::byte* group, __m256i* codes) {
    if constexpr (is_odd(format)) {
#pragma GCC unroll 8
        for (int v = 0; v < 8; ++v) {
            codes[v] = moved(load(group + 64 * (v % 2)), 1 - v / 2 * 2, 6);
            if constexpr (format == Format::kQ3)
                codes[v] = _mm256_or_si256(codes[v], moved(load(group + 128), 3 - v, 8));
        }
        return;
    }
    const __m256i nibbles = _mm256_set1_epi8(15);
    const __m256i numbers = _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMxfp4Codes)));
#pragma GCC unroll 4
    for (std::size_t v = 0; v < 4; ++v) {
        const __m256i both = load(group + 64 * v);
        codes[v] = _mm256_and_si256(both, nibbles);
        codes[4 + v] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibbles);
        if constexpr (format == Format::kMxfp4) {
            codes[v] = _mm256_shuffle_epi8(numbers, codes[v]);
            codes[4 + v] = _mm256_shuffle_epi8(numbers, codes[4 + v]);
        }
    }
}

// Computes kHalves · 8 rows of the block, from row 8 · begin. Both halves at once read the block in
// order, once; sums of many rows have no room for that. q4, q3, q2 and mxfp4 differ in how codes
// are packed, in scales, and in the number of sums that fit in 16 bits.
template <Format format, int kRows, std::size_t kHalves>
MOEINF_AVX2 void packed_rows(const std::byte* tile, std::size_t tiles,
                             const QuantGroup* const* from, float (*out)[kBlockRows],
                             std::size_t begin) {
    constexpr std::size_t kCodes = code_bytes(format), kScales = scale_bytes(format) * kBlockRows;
    const QuantGroup* x[kRows];
    __m256 sums[kHalves][kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        for (std::size_t h = 0; h < kHalves; ++h) sums[h][t] = _mm256_setzero_ps();
    }
    const __m256i ones = _mm256_set1_epi16(1);
    for (; tiles > 0; --tiles, tile += tile_bytes(format)) {
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kTileGroups * kHalves; ++i) {
            const std::size_t g = i / kHalves, h = i % kHalves, half = begin + h;
            const std::byte* const at =
                tile + kTileGroups * kCodes + kScales * g + kScales / 2 * half;
            const __m256 scales = format == Format::kMxfp4 ? powers_at(at) : scales_at(at);
            __m256i codes[8];
            unpack<format>(tile + kCodes * g + 32 * half, codes);
#pragma GCC unroll 4
            for (int t = 0; t < kRows; ++t) {
                const QuantGroup& a = x[t][g];
                __m256i first = _mm256_maddubs_epi16(codes[0], word(a.codes, 0));
                __m256i second = _mm256_maddubs_epi16(codes[4], word(a.codes, 4));
#pragma GCC unroll 3
                for (std::size_t v = 1; v < 4; ++v) {
                    first =
                        _mm256_add_epi16(first, _mm256_maddubs_epi16(codes[v], word(a.codes, v)));
                    second = _mm256_add_epi16(
                        second, _mm256_maddubs_epi16(codes[4 + v], word(a.codes, 4 + v)));
                }
                const __m256i sum =
                    format == Format::kMxfp4
                        ? _mm256_add_epi32(_mm256_madd_epi16(first, ones),
                                           _mm256_madd_epi16(second, ones))
                        : _mm256_madd_epi16(_mm256_add_epi16(first, second), ones);
                const __m256i dot = _mm256_add_epi32(sum, _mm256_set1_epi32(a.start));
                sums[h][t] = step(sums[h][t], dot, scales, a.scale);
            }
        }
        for (int t = 0; t < kRows; ++t) x[t] += kTileGroups;
    }
    for (std::size_t h = 0; h < kHalves; ++h)
        for (int t = 0; t < kRows; ++t)
            _mm256_storeu_ps(out[t] + kHalfRows * (begin + h), sums[h][t]);
}

// Computes the same for q8. Makes the codes signed, so that the sum starts at 0 instead of
// −128 · Σ a.
template <int kRows, std::size_t kHalves>
MOEINF_AVX2 void q8_rows(const std::byte* tile, std::size_t tiles, const QuantGroup* const* from,
                         float (*out)[kBlockRows], std::size_t begin) {
    const QuantGroup* x[kRows];
    __m256 sums[kHalves][kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        for (std::size_t h = 0; h < kHalves; ++h) sums[h][t] = _mm256_setzero_ps();
    }
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80)), ones = _mm256_set1_epi16(1);
    for (; tiles > 0; --tiles, tile += kQ8TileBytes) {
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kTileGroups * kHalves; ++i) {
            const std::size_t g = i / kHalves, h = i % kHalves, half = begin + h;
            const __m256 scales = scales_at(tile + 1024 + 32 * g + 16 * half);
            __m256i dots[kRows];
            for (int t = 0; t < kRows; ++t) dots[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (std::size_t v = 0; v < 8; ++v) {
                const __m256i w =
                    _mm256_xor_si256(load(tile + 512 * g + 64 * v + 32 * half), flip);
                const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 4
                for (int t = 0; t < kRows; ++t) {
                    const __m256i a = _mm256_sign_epi8(word(x[t][g].codes, v), w);
                    const __m256i pairs = _mm256_maddubs_epi16(magnitude, a);
                    dots[t] = _mm256_add_epi32(dots[t], _mm256_madd_epi16(pairs, ones));
                }
            }
            for (int t = 0; t < kRows; ++t)
                sums[h][t] = step(sums[h][t], dots[t], scales, x[t][g].scale);
        }
        for (int t = 0; t < kRows; ++t) x[t] += kTileGroups;
    }
    for (std::size_t h = 0; h < kHalves; ++h)
        for (int t = 0; t < kRows; ++t)
            _mm256_storeu_ps(out[t] + kHalfRows * (begin + h), sums[h][t]);
}

MOEINF_AVX2 MOEINF_INLINE float add_lanes(__m256 even0, __m256 even1, __m256 odd0, __m256 odd1) {
    const __m256 s8 = _mm256_add_ps(_mm256_add_ps(even0, odd0), _mm256_add_ps(even1, odd1));
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

template <int kWeights, int kRows>
MOEINF_AVX2 void bf16_rows(const std::uint16_t* weights, std::size_t columns,
                           const SplitGroup* const* x, float (*out)[kBlockRows], std::size_t row) {
    const __m256i upper_half = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
    __m256 even[kWeights][kRows][2], odd[kWeights][kRows][2];
    for (int r = 0; r < kWeights; ++r)
        for (int t = 0; t < kRows; ++t)
            for (int h = 0; h < 2; ++h) even[r][t][h] = odd[r][t][h] = _mm256_setzero_ps();
    for (std::size_t first = 0, group = 0; first < columns; first += kGroup, ++group) {
        const bool whole = columns - first >= kGroup;
#pragma GCC unroll 2
        for (int r = 0; r < kWeights; ++r) {
            const std::uint16_t* at = weights + static_cast<std::size_t>(r) * columns + first;
            _mm_prefetch(reinterpret_cast<const char*>(at + kWeights * columns), _MM_HINT_T0);
            std::uint16_t tail[kGroup] = {};
            if (!whole) {
                std::memcpy(tail, at, 2 * (columns - first));
                at = tail;
            }
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
                const __m256i both =
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 16 * h));
                const __m256 w_even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
                const __m256 w_odd = _mm256_castsi256_ps(_mm256_and_si256(both, upper_half));
#pragma GCC unroll 2
                for (int t = 0; t < kRows; ++t) {
                    const SplitGroup& a = x[t][group];
                    even[r][t][h] =
                        _mm256_fmadd_ps(w_even, _mm256_loadu_ps(a.even + 8 * h), even[r][t][h]);
                    odd[r][t][h] =
                        _mm256_fmadd_ps(w_odd, _mm256_loadu_ps(a.odd + 8 * h), odd[r][t][h]);
                }
            }
        }
    }
    for (int r = 0; r < kWeights; ++r)
        for (int t = 0; t < kRows; ++t)
            out[t][row + static_cast<std::size_t>(r)] =
                add_lanes(even[r][t][0], even[r][t][1], odd[r][t][0], odd[r][t][1]);
}

template <int kRows>
void bf16_block(const std::uint16_t* weights, std::size_t columns, std::size_t rows,
                const SplitGroup* const* x, float (*out)[kBlockRows]) {
    constexpr int kWeights = kRows == 2 ? 1 : 2;
    std::size_t row = 0;
    for (; row + kWeights <= rows; row += kWeights)
        bf16_rows<kWeights, kRows>(weights + row * columns, columns, x, out, row);
    for (; row < rows; ++row)
        bf16_rows<1, kRows>(weights + row * columns, columns, x, out, row);
}

void bf16_loop(const std::uint16_t* weights, std::size_t columns, std::size_t rows,
               const SplitGroup* const* x, int count, float (*out)[kBlockRows]) noexcept {
    for (; count >= 2; count -= 2, x += 2, out += 2)
        bf16_block<2>(weights, columns, rows, x, out);
    if (count > 0) bf16_block<1>(weights, columns, rows, x, out);
}

// With 4 rows the second half reads its block from the cache: some 20 KiB at K = 2048.
template <Format format>
void packed_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
                 float (*out)[kBlockRows]) noexcept {
    for (; count >= 4; count -= 4, x += 4, out += 4)
        for (std::size_t half = 0; half < 2; ++half)
            packed_rows<format, 4, 1>(block, tiles, x, out, half);
    for (; count >= 1; count -= 1, x += 1, out += 1)
        packed_rows<format, 1, 2>(block, tiles, x, out, 0);
}

void q8_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
             float (*out)[kBlockRows]) noexcept {
    for (; count >= 4; count -= 4, x += 4, out += 4)
        for (std::size_t half = 0; half < 2; ++half) q8_rows<4, 1>(block, tiles, x, out, half);
    for (; count >= 1; count -= 1, x += 1, out += 1) q8_rows<1, 2>(block, tiles, x, out, 0);
}

}  // namespace

bool has_avx2() noexcept {
    return platform::cpu().avx2 && platform::cpu().fma &&
           platform::cpu().f16c;
}

const Kernels kAvx2Kernels{"avx2",
                           true,
                           packed_loop<Format::kQ4>,
                           q8_loop,
                           packed_loop<Format::kQ3>,
                           packed_loop<Format::kQ2>,
                           packed_loop<Format::kMxfp4>,
                           interleaved_avx2<Format::kQ4k>,
                           interleaved_avx2<Format::kQ5k>,
                           interleaved_avx2<Format::kQ6k>,
                           interleaved_avx2<Format::kNvfp4>,
                           bf16_loop};

}  // namespace moeinf
#endif
