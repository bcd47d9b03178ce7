// Codes and scales of a tile of any format, as vectors of 16 rows, with AVX-512.
#pragma once

#include "kernels/avx512/vectors.h"

namespace moeinf {
namespace {

MOEINF_AVX512 MOEINF_INLINE __m512i codes_at(const std::byte* at) {
    return _mm512_loadu_si512(at);
}

// Reads 16 scales of mxfp4: bytes e, each 2^(e − 127).
MOEINF_AVX512 MOEINF_INLINE __m512 powers_at(const std::byte* at) {
    const __m128i e = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(e), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(kLeastE8M0)));
}

// Moves bits of every byte left by `by`, right where it is negative, and keeps those of `mask`.
MOEINF_AVX512 MOEINF_INLINE __m512i moved(__m512i bytes, int by, int mask) {
    const __m512i kept = _mm512_set1_epi8(static_cast<char>(mask));
    const auto count = static_cast<unsigned>(by < 0 ? -by : by);
    return _mm512_and_si512(
        by < 0 ? _mm512_srli_epi16(bytes, count) : _mm512_slli_epi16(bytes, count), kept);
}

// Unpacks the codes of a group: words v = 0 … 7.
template <Format format>
MOEINF_AVX512 MOEINF_INLINE void unpack(const std::byte* group, __m512i* codes) {
    if constexpr (is_odd(format)) {
#pragma GCC unroll 8
        for (int v = 0; v < 8; ++v) {
            codes[v] = moved(codes_at(group + 64 * (v % 2)), 1 - v / 2 * 2, 6);
            if constexpr (format == Format::kQ3)
                codes[v] = _mm512_or_si512(codes[v], moved(codes_at(group + 128), 3 - v, 8));
        }
        return;
    }
    const __m512i nibbles = _mm512_set1_epi8(15);
    const __m512i numbers = _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMxfp4Codes)));
#pragma GCC unroll 4
    for (std::size_t v = 0; v < 4; ++v) {
        const __m512i both = codes_at(group + 64 * v);
        codes[v] = _mm512_and_si512(both, nibbles);
        codes[4 + v] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibbles);
        if constexpr (format == Format::kMxfp4) {
            codes[v] = _mm512_shuffle_epi8(numbers, codes[v]);
            codes[4 + v] = _mm512_shuffle_epi8(numbers, codes[4 + v]);
        }
    }
}

MOEINF_AVX512 MOEINF_INLINE __m512 step(__m512 sum, __m512i dot, __m512 scales, float scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scales, _mm512_set1_ps(scale)),
                           sum);
}

// Loads word w of a tile of interleaved blocks: a lane per row.
MOEINF_AVX512 MOEINF_INLINE __m512i row_words(const std::byte* tile, std::size_t w) {
    return _mm512_loadu_si512(tile + 64 * w);
}

// Returns bits first … first + bits − 1 of every byte, moved to bit 0. Other bits are dropped.
MOEINF_AVX512 MOEINF_INLINE __m512i bits_of(__m512i bytes, int first, int bits) {
    const __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << bits) - 1));
    return _mm512_and_si512(_mm512_srlv_epi32(bytes, _mm512_set1_epi32(first)), mask);
}

// Moves the bits of every byte up. None of them leaves its byte.
MOEINF_AVX512 MOEINF_INLINE __m512i up(__m512i bytes, int by) {
    return _mm512_slli_epi16(bytes, static_cast<unsigned>(by));
}

// Returns the codes of word v of group g.
template <Format format>
MOEINF_AVX512 MOEINF_INLINE __m512i group_codes(const std::byte* tile, std::size_t g,
                                                std::size_t v) {
    const int odd = static_cast<int>(g % 2), n = static_cast<int>(g);
    if constexpr (format == Format::kQ4k) {
        return bits_of(row_words(tile, 4 + g / 2 * 8 + v), 4 * odd, 4);
    } else if constexpr (format == Format::kQ5k) {
        return _mm512_or_si512(bits_of(row_words(tile, 12 + g / 2 * 8 + v), 4 * odd, 4),
                               up(bits_of(row_words(tile, 4 + v), n, 1), 4));
    } else if constexpr (format == Format::kQ6k) {
        const std::size_t h = g / 4;
        const int i = n % 4;
        return _mm512_or_si512(
            bits_of(row_words(tile, 16 * h + 8 * (g % 2) + v), 4 * (i / 2), 4),
            up(bits_of(row_words(tile, 32 + 8 * h + v), 2 * i, 2), 4));
    } else {
        const __m512i numbers = _mm512_broadcast_i32x4(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMxfp4Codes)));
        const std::size_t word = 1 + 4 * g + v / 4 * 2 + v % 2;
        return _mm512_shuffle_epi8(
            numbers, bits_of(row_words(tile, word), v % 4 < 2 ? 0 : 4, 4));
    }
}

MOEINF_AVX512 MOEINF_INLINE __m512 halves(__m512i words) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));  // of the lower half words
}

// Writes D · s and dmin · m of groups 0 … 7 of a q4k or q5k tile.
MOEINF_AVX512 inline void scales_and_minima(const std::byte* tile, float (*out)[2][kBlockRows]) {
    const __m512i both = row_words(tile, 0), low = _mm512_set1_epi8(63);
    const __m512 d = halves(both), least = halves(_mm512_srli_epi32(both, 16));
    const __m512i a = row_words(tile, 1), b = row_words(tile, 2), c = row_words(tile, 3);
    __m512i s[2] = {_mm512_and_si512(a, low),
                    _mm512_or_si512(bits_of(c, 0, 4), up(bits_of(a, 6, 2), 4))};
    __m512i m[2] = {_mm512_and_si512(b, low),
                    _mm512_or_si512(bits_of(c, 4, 4), up(bits_of(b, 6, 2), 4))};
    const __m512i byte = _mm512_set1_epi32(255);
    for (std::size_t g = 0; g < 8; ++g) {
        __m512i &scale = s[g / 4], &minimum = m[g / 4];
        const __m512 first = _mm512_cvtepi32_ps(_mm512_and_si512(scale, byte));
        const __m512 second = _mm512_cvtepi32_ps(_mm512_and_si512(minimum, byte));
        _mm512_storeu_ps(out[g][0], _mm512_mul_ps(d, first));
        _mm512_storeu_ps(out[g][1], _mm512_mul_ps(least, second));
        scale = _mm512_srli_epi32(scale, 8);
        minimum = _mm512_srli_epi32(minimum, 8);
    }
}

// Writes the scales of the half groups of a q6k or nvfp4 tile.
template <Format format>
MOEINF_AVX512 inline void half_scales(const std::byte* tile, float (*out)[2][kBlockRows]) {
    constexpr std::size_t kWords = tile_columns(format) / 64;  // 4 scales each
    const __m512 d = format == Format::kQ6k ? scales_at(tile + 64 * 52) : _mm512_set1_ps(256.0f);
    for (std::size_t w = 0; w < kWords; ++w) {
        __m512i words = row_words(tile, format == Format::kQ6k ? 48 + w : 0);
        for (std::size_t b = 0; b < 4; ++b) {
            __m512 scale;
            if constexpr (format == Format::kQ6k)
                scale = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24));
            else
                scale = halves(
                    _mm512_slli_epi32(_mm512_and_si512(words, _mm512_set1_epi32(255)), 7));
            _mm512_storeu_ps(out[2 * w + b / 2][b % 2], _mm512_mul_ps(d, scale));
            words = _mm512_srli_epi32(words, 8);
        }
    }
}

}  // namespace
}  // namespace moeinf
