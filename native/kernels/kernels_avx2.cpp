// The kernels with AVX2, FMA and F16C: a vector is one word of 8 rows, a block is done in halves.
// has_avx2() tells if the processor has them.
//
// `vpmaddubsw` adds two products in 16 bits and saturates. With q4 no sum saturates: eight sums are
// at most 8 · 2 · 15 · 127 = 30480, so a whole group stays in 16 bits. With mxfp4 half a group
// stays in 16 bits, because four sums are at most 4 · 2 · 24 · 127 = 24384. The same is true of q4k,
// nvfp4 and q5k (4 · 2 · 31 · 127 = 31496), and of two sums of q6k (2 · 2 · 63 · 127 = 32004). q8
// multiplies |w| by a · sign(w): two products are at most 2 · 128 · 127 = 32512.
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#define MOEINF_AVX2 __attribute__((target("avx2,fma,f16c")))
#define MOEINF_INLINE __attribute__((always_inline)) inline

namespace moeinf {
namespace {

constexpr std::size_t kHalfRows = kBlockRows / 2;
constexpr std::size_t kAhead = 1024;  // as in kernels_avx512.cpp
static_assert(8 * 2 * 15 * 127 < 32768 && 4 * 2 * 24 * 127 < 32768 && 2 * 128 * 127 < 32768 &&
                  4 * 2 * 31 * 127 < 32768 && 2 * 2 * 63 * 127 < 32768,
              "no saturation");

template <std::size_t bytes>
MOEINF_AVX2 MOEINF_INLINE void prefetch(const std::byte* at) {
#pragma GCC unroll 32
    for (std::size_t line = 0; line < bytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(at + kAhead + line), _MM_HINT_T1);
}

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

// Computes rows 8 · half … 8 · half + 7 of the block. q4 and mxfp4 differ in the meaning of a
// nibble, in their scales, and in the number of sums that fit in 16 bits.
template <Format format, int kRows>
MOEINF_AVX2 void nibble_half(const std::byte* tile, std::size_t tiles,
                             const QuantGroup* const* from, float (*out)[kBlockRows],
                             std::size_t half) {
    constexpr bool kLooked = format == Format::kMxfp4;
    const QuantGroup* x[kRows];
    __m256 sums[kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        sums[t] = _mm256_setzero_ps();
    }
    const __m256i nibbles = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i numbers = _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMxfp4Codes)));
    for (; tiles > 0; --tiles, tile += tile_bytes(format)) {
        if (half == 0) prefetch<tile_bytes(format)>(tile);
        for (std::size_t g = 0; g < kTileGroups; ++g) {
            const __m256 scales = kLooked ? powers_at(tile + 512 + 16 * g + 8 * half)
                                          : scales_at(tile + 512 + 32 * g + 16 * half);
            __m256i low[4], high[4];
#pragma GCC unroll 4
            for (std::size_t v = 0; v < 4; ++v) {
                const __m256i both = load(tile + 256 * g + 64 * v + 32 * half);
                low[v] = _mm256_and_si256(both, nibbles);
                high[v] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibbles);
                if constexpr (kLooked) {
                    low[v] = _mm256_shuffle_epi8(numbers, low[v]);
                    high[v] = _mm256_shuffle_epi8(numbers, high[v]);
                }
            }
#pragma GCC unroll 4
            for (int t = 0; t < kRows; ++t) {
                const QuantGroup& a = x[t][g];
                __m256i first = _mm256_maddubs_epi16(low[0], word(a.codes, 0));
                __m256i second = _mm256_maddubs_epi16(high[0], word(a.codes, 4));
#pragma GCC unroll 3
                for (std::size_t v = 1; v < 4; ++v) {
                    first = _mm256_add_epi16(first, _mm256_maddubs_epi16(low[v], word(a.codes, v)));
                    second = _mm256_add_epi16(
                        second, _mm256_maddubs_epi16(high[v], word(a.codes, 4 + v)));
                }
                const __m256i sum =
                    kLooked ? _mm256_add_epi32(_mm256_madd_epi16(first, ones),
                                               _mm256_madd_epi16(second, ones))
                            : _mm256_madd_epi16(_mm256_add_epi16(first, second), ones);
                const __m256i dot = _mm256_add_epi32(sum, _mm256_set1_epi32(a.start));
                sums[t] = step(sums[t], dot, scales, a.scale);
            }
        }
        for (int t = 0; t < kRows; ++t) x[t] += kTileGroups;
    }
    for (int t = 0; t < kRows; ++t) _mm256_storeu_ps(out[t] + kHalfRows * half, sums[t]);
}

// Computes rows 8 · half … 8 · half + 7 of the block. Makes the codes signed, so that the sum
// starts at 0 instead of −128 · Σ a.
template <int kRows>
MOEINF_AVX2 void q8_half(const std::byte* tile, std::size_t tiles, const QuantGroup* const* from,
                         float (*out)[kBlockRows], std::size_t half) {
    const QuantGroup* x[kRows];
    __m256 sums[kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        sums[t] = _mm256_setzero_ps();
    }
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80)), ones = _mm256_set1_epi16(1);
    for (; tiles > 0; --tiles, tile += kQ8TileBytes) {
        if (half == 0) prefetch<kQ8TileBytes>(tile);
        for (std::size_t g = 0; g < kTileGroups; ++g) {
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
            for (int t = 0; t < kRows; ++t) sums[t] = step(sums[t], dots[t], scales, x[t][g].scale);
        }
        for (int t = 0; t < kRows; ++t) x[t] += kTileGroups;
    }
    for (int t = 0; t < kRows; ++t) _mm256_storeu_ps(out[t] + kHalfRows * half, sums[t]);
}

// Returns bits first … first + bits − 1 of every byte, moved to bit 0. Other bits are dropped.
MOEINF_AVX2 MOEINF_INLINE __m256i bits_of(__m256i bytes, int first, int bits) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>((1 << bits) - 1));
    return _mm256_and_si256(_mm256_srlv_epi32(bytes, _mm256_set1_epi32(first)), mask);
}

// Returns the codes of word v of group g; rows begin at the first row of a half of the tile.
template <Format format>
MOEINF_AVX2 MOEINF_INLINE __m256i group_codes(const std::byte* rows, std::size_t g,
                                              std::size_t v) {
    const int odd = static_cast<int>(g % 2), n = static_cast<int>(g);
    if constexpr (format == Format::kQ4k) {
        return bits_of(load(rows + 64 * (4 + g / 2 * 8 + v)), 4 * odd, 4);
    } else if constexpr (format == Format::kQ5k) {
        const __m256i low = bits_of(load(rows + 64 * (12 + g / 2 * 8 + v)), 4 * odd, 4);
        const __m256i high = bits_of(load(rows + 64 * (4 + v)), n, 1);
        return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    } else if constexpr (format == Format::kQ6k) {
        const std::size_t h = g / 4;
        const int i = n % 4;
        const __m256i low =
            bits_of(load(rows + 64 * (16 * h + 8 * (g % 2) + v)), 4 * (i / 2), 4);
        const __m256i high = bits_of(load(rows + 64 * (32 + 8 * h + v)), 2 * i, 2);
        return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    } else {
        const __m256i numbers = _mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMxfp4Codes)));
        const std::size_t w = 1 + 4 * g + v / 4 * 2 + v % 2;
        return _mm256_shuffle_epi8(numbers, bits_of(load(rows + 64 * w), v % 4 < 2 ? 0 : 4, 4));
    }
}

MOEINF_AVX2 MOEINF_INLINE __m256 halves(__m256i words) {  // of the lower half words
    const __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xFFFF));
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}

// Writes D · s and dmin · m of groups 0 … 7 of a q4k or q5k tile.
MOEINF_AVX2 void scales_and_minima(const std::byte* rows, float (*out)[2][kHalfRows]) {
    const __m256i both = load(rows), low = _mm256_set1_epi8(63);
    const __m256 d = halves(both), least = halves(_mm256_srli_epi32(both, 16));
    const __m256i a = load(rows + 64), b = load(rows + 128), c = load(rows + 192);
    __m256i s[2] = {
        _mm256_and_si256(a, low),
        _mm256_or_si256(bits_of(c, 0, 4), _mm256_slli_epi16(bits_of(a, 6, 2), 4))};
    __m256i m[2] = {
        _mm256_and_si256(b, low),
        _mm256_or_si256(bits_of(c, 4, 4), _mm256_slli_epi16(bits_of(b, 6, 2), 4))};
    const __m256i byte = _mm256_set1_epi32(255);
    for (std::size_t g = 0; g < 8; ++g) {
        __m256i &scale = s[g / 4], &minimum = m[g / 4];
        const __m256 first = _mm256_cvtepi32_ps(_mm256_and_si256(scale, byte));
        const __m256 second = _mm256_cvtepi32_ps(_mm256_and_si256(minimum, byte));
        _mm256_storeu_ps(out[g][0], _mm256_mul_ps(d, first));
        _mm256_storeu_ps(out[g][1], _mm256_mul_ps(least, second));
        scale = _mm256_srli_epi32(scale, 8);
        minimum = _mm256_srli_epi32(minimum, 8);
    }
}

// Writes the scales of the half groups of a q6k or nvfp4 tile; d is of the same rows.
template <Format format>
MOEINF_AVX2 void half_scales(const std::byte* rows, __m256 d, float (*out)[2][kHalfRows]) {
    constexpr std::size_t kWords = tile_columns(format) / 64;  // 4 scales each
    for (std::size_t w = 0; w < kWords; ++w) {
        __m256i words = load(rows + (format == Format::kQ6k ? 64 * (48 + w) : 0));
        for (std::size_t b = 0; b < 4; ++b) {
            __m256 scale;
            if constexpr (format == Format::kQ6k)
                scale = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 24), 24));
            else
                scale = halves(_mm256_slli_epi32(_mm256_and_si256(words, _mm256_set1_epi32(255)), 7));
            _mm256_storeu_ps(out[2 * w + b / 2][b % 2], _mm256_mul_ps(d, scale));
            words = _mm256_srli_epi32(words, 8);
        }
    }
}

// Returns the sum of a half group: 4 words of codes times 16 activations.
template <Format format>
MOEINF_AVX2 MOEINF_INLINE __m256i half_group(const __m256i* codes, const std::int8_t* x) {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i first = _mm256_add_epi16(_mm256_maddubs_epi16(codes[0], word(x, 0)),
                                           _mm256_maddubs_epi16(codes[1], word(x, 1)));
    const __m256i second = _mm256_add_epi16(_mm256_maddubs_epi16(codes[2], word(x, 2)),
                                            _mm256_maddubs_epi16(codes[3], word(x, 3)));
    if constexpr (format == Format::kQ6k)
        return _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
    else
        return _mm256_madd_epi16(_mm256_add_epi16(first, second), ones);
}

// Adds group g, whose codes are given, to the sums of all rows of activations.
template <Format format, int kRows>
MOEINF_AVX2 MOEINF_INLINE void add_group(const __m256i* codes, const float (*scales)[kHalfRows],
                                         const QuantGroup* const* x, std::size_t g, __m256* sums) {
    constexpr int kZero = -zero_of(format);
    const __m256i low = _mm256_set1_epi32(kZero & 0xFFFF), high = _mm256_set1_epi32(kZero * 0x10000);
    const __m256 one = _mm256_loadu_ps(scales[0]), two = _mm256_loadu_ps(scales[1]);
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t) {
        const QuantGroup& a = x[t][g];
        const __m256i start = _mm256_set1_epi32(a.start);
        __m256i first = half_group<format>(codes, a.codes);
        __m256i second = half_group<format>(codes + 4, a.codes + kGroup / 2);
        __m256 product;
        if constexpr (has_minima(format)) {
            product = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(first, second)), one,
                                      _mm256_mul_ps(_mm256_cvtepi32_ps(start), two));
        } else {
            first = _mm256_add_epi32(first, _mm256_madd_epi16(start, low));
            second = _mm256_add_epi32(second, _mm256_madd_epi16(start, high));
            product = _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), two,
                                      _mm256_mul_ps(_mm256_cvtepi32_ps(first), one));
        }
        sums[t] = _mm256_fmadd_ps(product, _mm256_set1_ps(a.scale), sums[t]);
    }
}

// Computes rows 8 · half … 8 · half + 7 of a block of q4k, q5k, q6k or nvfp4.
template <Format format, int kRows>
MOEINF_AVX2 void interleaved_half(const std::byte* block, std::size_t tiles,
                                  const QuantGroup* const* from, float (*out)[kBlockRows],
                                  std::size_t half) {
    constexpr std::size_t kGroups = tile_columns(format) / kGroup;
    constexpr std::size_t kPart = tile_bytes(format) / kGroups / 64 * 64;
    const QuantGroup* x[kRows];
    __m256 sums[kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        sums[t] = _mm256_setzero_ps();
    }
    const std::byte* tile = block + factor_bytes(format);
    for (; tiles > 0; --tiles, tile += tile_bytes(format)) {
        const std::byte* const rows = tile + 32 * half;
        alignas(32) float scales[kGroups][2][kHalfRows];
        if constexpr (has_minima(format))
            scales_and_minima(rows, scales);
        else if constexpr (format == Format::kQ6k)
            half_scales<format>(rows, scales_at(tile + 64 * 52 + 16 * half), scales);
        else
            half_scales<format>(rows, _mm256_set1_ps(256.0f), scales);
#pragma GCC unroll 8
        for (std::size_t g = 0; g < kGroups; ++g) {
            if (half == 0) prefetch<kPart + 64>(tile + g * (tile_bytes(format) / kGroups));
            __m256i codes[8];
#pragma GCC unroll 8
            for (std::size_t v = 0; v < 8; ++v) codes[v] = group_codes<format>(rows, g, v);
            add_group<format, kRows>(codes, scales[g], x, g, sums);
        }
        for (int t = 0; t < kRows; ++t) x[t] += kGroups;
    }
    for (int t = 0; t < kRows; ++t) {
        if constexpr (factor_bytes(format) > 0)
            sums[t] = _mm256_mul_ps(
                sums[t], _mm256_castsi256_ps(load(block + sizeof(float) * kHalfRows * half)));
        _mm256_storeu_ps(out[t] + kHalfRows * half, sums[t]);
    }
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

// The second half reads its block from the cache: a block has some 20 KiB at K = 2048.
template <Format format>
void nibble_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
                 float (*out)[kBlockRows]) noexcept {
    for (; count >= 4; count -= 4, x += 4, out += 4)
        for (std::size_t half = 0; half < 2; ++half)
            nibble_half<format, 4>(block, tiles, x, out, half);
    for (; count >= 1; count -= 1, x += 1, out += 1)
        for (std::size_t half = 0; half < 2; ++half)
            nibble_half<format, 1>(block, tiles, x, out, half);
}

template <Format format>
void interleaved_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x,
                      int count, float (*out)[kBlockRows]) noexcept {
    for (; count >= 4; count -= 4, x += 4, out += 4)
        for (std::size_t half = 0; half < 2; ++half)
            interleaved_half<format, 4>(block, tiles, x, out, half);
    for (; count >= 1; count -= 1, x += 1, out += 1)
        for (std::size_t half = 0; half < 2; ++half)
            interleaved_half<format, 1>(block, tiles, x, out, half);
}

void q8_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
             float (*out)[kBlockRows]) noexcept {
    for (; count >= 4; count -= 4, x += 4, out += 4)
        for (std::size_t half = 0; half < 2; ++half) q8_half<4>(block, tiles, x, out, half);
    for (; count >= 1; count -= 1, x += 1, out += 1)
        for (std::size_t half = 0; half < 2; ++half) q8_half<1>(block, tiles, x, out, half);
}

}  // namespace

bool has_avx2() noexcept {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

const Kernels kAvx2Kernels{"avx2",
                           true,
                           nibble_loop<Format::kQ4>,
                           q8_loop,
                           nibble_loop<Format::kMxfp4>,
                           interleaved_loop<Format::kQ4k>,
                           interleaved_loop<Format::kQ5k>,
                           interleaved_loop<Format::kQ6k>,
                           interleaved_loop<Format::kNvfp4>,
                           bf16_loop};

}  // namespace moeinf
#endif
