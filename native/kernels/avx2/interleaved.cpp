// The kernels of interleaved blocks (tiles.h) with AVX2, FMA and F16C: q4k, q5k, q6k and nvfp4.
//
// `vpmaddubsw` adds two products in 16 bits and saturates. Half a group of q4k, nvfp4 and q5k stays
// in 16 bits: four sums are at most 4 · 2 · 31 · 127 = 31496. So do two sums of q6k, which are at
// most 2 · 2 · 63 · 127 = 32004. A whole group of q4k, eight sums, is at most 8 · 2 · 15 · 127 = 30480.
#if defined(__x86_64__)
#include "kernels/avx2/vectors.h"

namespace moeinf {
namespace {

static_assert(4 * 2 * 31 * 127 < 32768 && 2 * 2 * 63 * 127 < 32768 && 8 * 2 * 15 * 127 < 32768,
              "no saturation");

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
                scale = halves(
                    _mm256_slli_epi32(_mm256_and_si256(words, _mm256_set1_epi32(255)), 7));
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
    const __m256i low = _mm256_set1_epi32(kZero & 0xFFFF);
    const __m256i high = _mm256_set1_epi32(kZero * 0x10000);
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

// Computes kHalves · 8 rows of a block, from row 8 · first. Where both halves of a row block are
// computed at once, its bytes are read in order, once, and the processor's own prefetcher follows:
// prefetches cost more than they bring. Sums of many rows have no room for both halves.
template <Format format, int kRows, std::size_t kHalves>
MOEINF_AVX2 void interleaved_rows(const std::byte* block, std::size_t tiles,
                                  const QuantGroup* const* from, float (*out)[kBlockRows],
                                  std::size_t first) {
    constexpr std::size_t kGroups = tile_columns(format) / kGroup;
    const QuantGroup* x[kRows];
    __m256 sums[kHalves][kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        for (std::size_t h = 0; h < kHalves; ++h) sums[h][t] = _mm256_setzero_ps();
    }
    const std::byte* tile = block + factor_bytes(format);
    for (; tiles > 0; --tiles, tile += tile_bytes(format)) {
        alignas(32) float scales[kHalves][kGroups][2][kHalfRows];
        for (std::size_t h = 0; h < kHalves; ++h) {
            const std::byte* const rows = tile + 32 * (first + h);
            if constexpr (has_minima(format))
                scales_and_minima(rows, scales[h]);
            else if constexpr (format == Format::kQ6k)
                half_scales<format>(rows, scales_at(tile + 64 * 52 + 16 * (first + h)), scales[h]);
            else
                half_scales<format>(rows, _mm256_set1_ps(256.0f), scales[h]);
        }
#pragma GCC unroll 8
        for (std::size_t g = 0; g < kGroups; ++g) {
#pragma GCC unroll 2
            for (std::size_t h = 0; h < kHalves; ++h) {
                __m256i codes[8];
#pragma GCC unroll 8
                for (std::size_t v = 0; v < 8; ++v)
                    codes[v] = group_codes<format>(tile + 32 * (first + h), g, v);
                add_group<format, kRows>(codes, scales[h][g], x, g, sums[h]);
            }
        }
        for (int t = 0; t < kRows; ++t) x[t] += kGroups;
    }
    for (std::size_t h = 0; h < kHalves; ++h)
        for (int t = 0; t < kRows; ++t) {
            const std::size_t at = kHalfRows * (first + h);
            if constexpr (factor_bytes(format) > 0)
                sums[h][t] = _mm256_mul_ps(sums[h][t],
                                           _mm256_castsi256_ps(load(block + sizeof(float) * at)));
            _mm256_storeu_ps(out[t] + at, sums[h][t]);
        }
}

// Computes one block of q4k for one row of activations. Every word is read once, for both of its
// groups, and every activation once, for both halves of the rows. A whole group stays in 16 bits.
MOEINF_AVX2 void q4k_row(const std::byte* tile, std::size_t tiles, const QuantGroup* x,
                         float* out) {
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (; tiles > 0; --tiles, tile += kQ4kTileBytes, x += 8) {
        alignas(32) float scales[2][8][2][kHalfRows];
        for (std::size_t h = 0; h < 2; ++h) scales_and_minima(tile + 32 * h, scales[h]);
#pragma GCC unroll 4
        for (std::size_t j = 0; j < 4; ++j) {
            __m256i pairs[2][2] = {};  // group of the pair, half of the rows
#pragma GCC unroll 8
            for (std::size_t v = 0; v < 8; ++v) {
                const __m256i even = word(x[2 * j].codes, v), odd = word(x[2 * j + 1].codes, v);
#pragma GCC unroll 2
                for (std::size_t h = 0; h < 2; ++h) {
                    const __m256i both = load(tile + 64 * (4 + 8 * j + v) + 32 * h);
                    const __m256i low = _mm256_and_si256(both, nibble);
                    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
                    pairs[0][h] = _mm256_add_epi16(pairs[0][h], _mm256_maddubs_epi16(low, even));
                    pairs[1][h] = _mm256_add_epi16(pairs[1][h], _mm256_maddubs_epi16(high, odd));
                }
            }
#pragma GCC unroll 2
            for (std::size_t odd = 0; odd < 2; ++odd) {
                const QuantGroup& a = x[2 * j + odd];
                const __m256 start = _mm256_cvtepi32_ps(_mm256_set1_epi32(a.start));
#pragma GCC unroll 2
                for (std::size_t h = 0; h < 2; ++h) {
                    const float (*const both)[kHalfRows] = scales[h][2 * j + odd];
                    const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[odd][h], ones));
                    const __m256 product =
                        _mm256_fmadd_ps(dot, _mm256_load_ps(both[0]),
                                        _mm256_mul_ps(start, _mm256_load_ps(both[1])));
                    sums[h] = _mm256_fmadd_ps(product, _mm256_set1_ps(a.scale), sums[h]);
                }
            }
        }
    }
    for (std::size_t h = 0; h < 2; ++h) _mm256_storeu_ps(out + kHalfRows * h, sums[h]);
}

// Writes sums of nibbles times activations: 8 words have the lower bits of groups 0 and 2 of x.
MOEINF_AVX2 MOEINF_INLINE void lower_sums(const std::byte* rows, const QuantGroup* x,
                                          __m256i* one, __m256i* two) {
    const __m256i nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 2
    for (std::size_t k = 0; k < 2; ++k) {
        __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (std::size_t v = 4 * k; v < 4 * k + 4; ++v) {
            const __m256i bits = load(rows + 64 * v);
            a = _mm256_add_epi16(a, _mm256_maddubs_epi16(_mm256_and_si256(bits, nibble),
                                                         word(x[0].codes, v)));
            b = _mm256_add_epi16(
                b, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(bits, 4), nibble),
                                        word(x[2].codes, v)));
        }
        one[k] = a;
        two[k] = b;
    }
}

// Computes one block of q6k for one row of activations, in the order of its words: see
// avx512/interleaved.cpp. Sums of four products of lower or of upper bits stay in 16 bits.
MOEINF_AVX2 void q6k_row(const std::byte* tile, std::size_t tiles, const QuantGroup* x,
                         float* out) {
    constexpr int kZero = -zero_of(Format::kQ6k);
    const __m256i zero[2] = {_mm256_set1_epi32(kZero & 0xFFFF),
                             _mm256_set1_epi32(kZero * 0x10000)};
    const __m256i ones = _mm256_set1_epi16(1), upper = _mm256_set1_epi16(16);
    const __m256i pair = _mm256_set1_epi8(3);
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (; tiles > 0; --tiles, tile += kQ6kTileBytes, x += 8) {
        __m256i lower[2][8][2], top[2][8][2];  // half of the rows, group, half of the group
#pragma GCC unroll 4
        for (std::size_t j = 0; j < 4; ++j)
#pragma GCC unroll 2
            for (std::size_t h = 0; h < 2; ++h) {
                const std::size_t g = j / 2 * 4 + j % 2;
                lower_sums(tile + 512 * j + 32 * h, x + g, lower[h][g], lower[h][g + 2]);
            }
        for (std::size_t j = 0; j < 2; ++j)
            for (std::size_t h = 0; h < 2; ++h)
#pragma GCC unroll 2
                for (std::size_t k = 0; k < 2; ++k) {
                    __m256i found[4] = {};
#pragma GCC unroll 4
                    for (std::size_t v = 4 * k; v < 4 * k + 4; ++v) {
                        const __m256i bits = load(tile + 64 * (32 + 8 * j + v) + 32 * h);
#pragma GCC unroll 4
                        for (int i = 0; i < 4; ++i)
                            found[i] = _mm256_add_epi16(
                                found[i],
                                _mm256_maddubs_epi16(
                                    _mm256_and_si256(_mm256_srli_epi16(bits, 2 * i), pair),
                                    word(x[4 * j + static_cast<std::size_t>(i)].codes, v)));
                    }
                    for (std::size_t i = 0; i < 4; ++i) top[h][4 * j + i][k] = found[i];
                }
        for (std::size_t h = 0; h < 2; ++h) {
            alignas(32) float scales[8][2][kHalfRows];
            half_scales<Format::kQ6k>(tile + 32 * h, scales_at(tile + 64 * 52 + 16 * h), scales);
            for (std::size_t g = 0; g < 8; ++g) {
                __m256 product = _mm256_setzero_ps();
#pragma GCC unroll 2
                for (std::size_t k = 0; k < 2; ++k) {
                    const __m256i start = _mm256_madd_epi16(_mm256_set1_epi32(x[g].start), zero[k]);
                    const __m256i dot = _mm256_add_epi32(
                        _mm256_add_epi32(start, _mm256_madd_epi16(lower[h][g][k], ones)),
                        _mm256_madd_epi16(top[h][g][k], upper));
                    const __m256 scale = _mm256_loadu_ps(scales[g][k]);
                    product = k == 0 ? _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale)
                                     : _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, product);
                }
                sums[h] = _mm256_fmadd_ps(product, _mm256_set1_ps(x[g].scale), sums[h]);
            }
        }
    }
    for (std::size_t h = 0; h < 2; ++h) _mm256_storeu_ps(out + kHalfRows * h, sums[h]);
}

}  // namespace

template <Format format>
void interleaved_avx2(const std::byte* block, std::size_t tiles, const QuantGroup* const* x,
                      int count, float (*out)[kBlockRows]) noexcept {
    for (; count >= 4; count -= 4, x += 4, out += 4)
        for (std::size_t half = 0; half < 2; ++half)
            interleaved_rows<format, 4, 1>(block, tiles, x, out, half);
    for (; count >= 1; count -= 1, x += 1, out += 1) {
        if constexpr (format == Format::kQ6k)
            q6k_row(block, tiles, *x, *out);
        else if constexpr (format == Format::kQ4k)
            q4k_row(block, tiles, *x, *out);
        else
            interleaved_rows<format, 1, 2>(block, tiles, x, out, 0);
    }
}

template void interleaved_avx2<Format::kQ4k>(
    const std::byte*, std::size_t, const QuantGroup* const*, int, float (*)[kBlockRows]) noexcept;
template void interleaved_avx2<Format::kQ5k>(
    const std::byte*, std::size_t, const QuantGroup* const*, int, float (*)[kBlockRows]) noexcept;
template void interleaved_avx2<Format::kQ6k>(
    const std::byte*, std::size_t, const QuantGroup* const*, int, float (*)[kBlockRows]) noexcept;
template void interleaved_avx2<Format::kNvfp4>(
    const std::byte*, std::size_t, const QuantGroup* const*, int, float (*)[kBlockRows]) noexcept;

}  // namespace moeinf
#endif
