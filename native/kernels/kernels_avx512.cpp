// The kernels with AVX-512 and VNNI: a vector is one word of 16 rows.
// has_avx512() tells if the processor has them.
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#define MOEINF_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,f16c,fma")))
#define MOEINF_INLINE __attribute__((always_inline)) inline

namespace moeinf {
namespace {

// Bytes between the current tile and the data prefetched into the second-level cache. A prefetch
// into the first-level cache, or further ahead, is slower than none (docs/decisions/0014).
constexpr std::size_t kAhead = 1024;

template <std::size_t bytes>
MOEINF_AVX512 MOEINF_INLINE void prefetch(const std::byte* at) {
#pragma GCC unroll 32
    for (std::size_t line = 0; line < bytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(at + kAhead + line), _MM_HINT_T1);
}

MOEINF_AVX512 MOEINF_INLINE __m512i word(const std::int8_t* codes, std::size_t v) {
    std::int32_t four;
    std::memcpy(&four, codes + 4 * v, 4);
    return _mm512_set1_epi32(four);
}

MOEINF_AVX512 MOEINF_INLINE __m512 scales_at(const std::byte* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

MOEINF_AVX512 MOEINF_INLINE __m512i codes_at(const std::byte* at) {
    return _mm512_loadu_si512(at);
}

// Reads 16 scales of mxfp4: bytes e, each 2^(e − 127).
MOEINF_AVX512 MOEINF_INLINE __m512 powers_at(const std::byte* at) {
    const __m128i e = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(e), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(kLeastE8M0)));
}

MOEINF_AVX512 MOEINF_INLINE __m512 step(__m512 sum, __m512i dot, __m512 scales, float scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scales, _mm512_set1_ps(scale)),
                           sum);
}

// Computes one block of q4 or mxfp4, which differ in the meaning of a nibble and in their scales.
template <Format format, int kRows>
MOEINF_AVX512 void nibble_rows(const std::byte* tile, std::size_t tiles,
                               const QuantGroup* const* from, float (*out)[kBlockRows]) {
    constexpr bool kLooked = format == Format::kMxfp4;
    const QuantGroup* x[kRows];
    __m512 sums[kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        sums[t] = _mm512_setzero_ps();
    }
    const __m512i nibbles = _mm512_set1_epi8(15);
    const __m512i numbers = _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMxfp4Codes)));
    for (; tiles > 0; --tiles, tile += tile_bytes(format)) {
        prefetch<tile_bytes(format)>(tile);
        for (std::size_t g = 0; g < kTileGroups; ++g) {
            const __m512 scales =
                kLooked ? powers_at(tile + 512 + 16 * g) : scales_at(tile + 512 + 32 * g);
            __m512i low[4], high[4];
#pragma GCC unroll 4
            for (std::size_t v = 0; v < 4; ++v) {
                const __m512i both = _mm512_loadu_si512(tile + 256 * g + 64 * v);
                low[v] = _mm512_and_si512(both, nibbles);
                high[v] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibbles);
                if constexpr (kLooked) {
                    low[v] = _mm512_shuffle_epi8(numbers, low[v]);
                    high[v] = _mm512_shuffle_epi8(numbers, high[v]);
                }
            }
#pragma GCC unroll 8
            for (int t = 0; t < kRows; ++t) {
                const QuantGroup& a = x[t][g];
                __m512i first = _mm512_set1_epi32(a.start), second = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (std::size_t v = 0; v < 4; ++v) {
                    first = _mm512_dpbusd_epi32(first, low[v], word(a.codes, v));
                    second = _mm512_dpbusd_epi32(second, high[v], word(a.codes, 4 + v));
                }
                sums[t] = step(sums[t], _mm512_add_epi32(first, second), scales, a.scale);
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < kRows; ++t) x[t] += kTileGroups;
    }
    for (int t = 0; t < kRows; ++t) _mm512_storeu_ps(out[t], sums[t]);
}

template <int kRows>
MOEINF_AVX512 void q8_rows(const std::byte* tile, std::size_t tiles, const QuantGroup* const* from,
                           float (*out)[kBlockRows]) {
    const QuantGroup* x[kRows];
    __m512 sums[kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        sums[t] = _mm512_setzero_ps();
    }
    for (; tiles > 0; --tiles, tile += kQ8TileBytes) {
        prefetch<kQ8TileBytes>(tile);
        for (std::size_t g = 0; g < kTileGroups; ++g) {
            const __m512 scales = scales_at(tile + 1024 + 32 * g);
            __m512i codes[8];
#pragma GCC unroll 8
            for (std::size_t v = 0; v < 8; ++v) codes[v] = codes_at(tile + 512 * g + 64 * v);
#pragma GCC unroll 8
            for (int t = 0; t < kRows; ++t) {
                const QuantGroup& a = x[t][g];
                __m512i first = _mm512_set1_epi32(a.start), second = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (std::size_t v = 0; v < 4; ++v) {
                    first = _mm512_dpbusd_epi32(first, codes[v], word(a.codes, v));
                    second = _mm512_dpbusd_epi32(second, codes[4 + v], word(a.codes, 4 + v));
                }
                sums[t] = step(sums[t], _mm512_add_epi32(first, second), scales, a.scale);
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < kRows; ++t) x[t] += kTileGroups;
    }
    for (int t = 0; t < kRows; ++t) _mm512_storeu_ps(out[t], sums[t]);
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
MOEINF_AVX512 void scales_and_minima(const std::byte* tile, float (*out)[2][kBlockRows]) {
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
MOEINF_AVX512 void half_scales(const std::byte* tile, float (*out)[2][kBlockRows]) {
    constexpr std::size_t kWords = tile_columns(format) / 64;  // 4 scales each
    const __m512 d = format == Format::kQ6k ? scales_at(tile + 64 * 52) : _mm512_set1_ps(256.0f);
    for (std::size_t w = 0; w < kWords; ++w) {
        __m512i words = row_words(tile, format == Format::kQ6k ? 48 + w : 0);
        for (std::size_t b = 0; b < 4; ++b) {
            __m512 scale;
            if constexpr (format == Format::kQ6k)
                scale = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24));
            else
                scale = halves(_mm512_slli_epi32(_mm512_and_si512(words, _mm512_set1_epi32(255)), 7));
            _mm512_storeu_ps(out[2 * w + b / 2][b % 2], _mm512_mul_ps(d, scale));
            words = _mm512_srli_epi32(words, 8);
        }
    }
}

// Adds group g, whose codes are given, to the sums of all rows of activations.
template <Format format, int kRows>
MOEINF_AVX512 MOEINF_INLINE void add_group(const __m512i* codes, const float (*scales)[kBlockRows],
                                           const QuantGroup* const* x, std::size_t g,
                                           __m512* sums) {
    constexpr int kZero = -zero_of(format);
    const __m512i low = _mm512_set1_epi32(kZero & 0xFFFF), high = _mm512_set1_epi32(kZero * 0x10000);
    const __m512 one = _mm512_loadu_ps(scales[0]), two = _mm512_loadu_ps(scales[1]);
#pragma GCC unroll 8
    for (int t = 0; t < kRows; ++t) {
        const QuantGroup& a = x[t][g];
        const __m512i start = _mm512_set1_epi32(a.start);
        __m512i first = _mm512_setzero_si512(), second = _mm512_setzero_si512();
        if constexpr (has_half_groups(format)) {
            first = _mm512_madd_epi16(start, low);
            second = _mm512_madd_epi16(start, high);
        }
#pragma GCC unroll 4
        for (std::size_t v = 0; v < 4; ++v) {
            first = _mm512_dpbusd_epi32(first, codes[v], word(a.codes, v));
            second = _mm512_dpbusd_epi32(second, codes[4 + v], word(a.codes, 4 + v));
        }
        __m512 product;
        if constexpr (has_minima(format))
            product = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(first, second)), one,
                                      _mm512_mul_ps(_mm512_cvtepi32_ps(start), two));
        else
            product = _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), two,
                                      _mm512_mul_ps(_mm512_cvtepi32_ps(first), one));
        sums[t] = _mm512_fmadd_ps(product, _mm512_set1_ps(a.scale), sums[t]);
    }
}

// Computes one block of q4k, q5k, q6k or nvfp4.
template <Format format, int kRows>
MOEINF_AVX512 void interleaved_rows(const std::byte* block, std::size_t tiles,
                                    const QuantGroup* const* from, float (*out)[kBlockRows]) {
    constexpr std::size_t kGroups = tile_columns(format) / kGroup;
    constexpr std::size_t kPart = tile_bytes(format) / kGroups / 64 * 64;
    const QuantGroup* x[kRows];
    __m512 sums[kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        sums[t] = _mm512_setzero_ps();
    }
    const std::byte* tile = block + factor_bytes(format);
    for (; tiles > 0; --tiles, tile += tile_bytes(format)) {
        alignas(64) float scales[kGroups][2][kBlockRows];
        if constexpr (has_minima(format))
            scales_and_minima(tile, scales);
        else
            half_scales<format>(tile, scales);
#pragma GCC unroll 8
        for (std::size_t g = 0; g < kGroups; ++g) {
            prefetch<kPart + 64>(tile + g * (tile_bytes(format) / kGroups));
            __m512i codes[8];
#pragma GCC unroll 8
            for (std::size_t v = 0; v < 8; ++v) codes[v] = group_codes<format>(tile, g, v);
            add_group<format, kRows>(codes, scales[g], x, g, sums);
        }
#pragma GCC unroll 8
        for (int t = 0; t < kRows; ++t) x[t] += kGroups;
    }
    for (int t = 0; t < kRows; ++t) {
        if constexpr (factor_bytes(format) > 0)
            sums[t] = _mm512_mul_ps(sums[t], _mm512_loadu_ps(block));
        _mm512_storeu_ps(out[t], sums[t]);
    }
}

MOEINF_AVX512 MOEINF_INLINE float add_lanes(__m512 even, __m512 odd) {
    const __m512 s = _mm512_add_ps(even, odd);
    const __m512 upper = _mm512_shuffle_f32x4(s, s, _MM_SHUFFLE(3, 2, 3, 2));
    const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_castps512_ps256(upper));
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

// Multiplies kWeights consecutive rows of weights with kRows rows of activations.
template <int kWeights, int kRows>
MOEINF_AVX512 void bf16_rows(const std::uint16_t* weights, std::size_t columns,
                             const SplitGroup* const* x, float (*out)[kBlockRows],
                             std::size_t row) {
    const __m512i upper_half = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    __m512 even[kWeights][kRows], odd[kWeights][kRows];
    for (int r = 0; r < kWeights; ++r)
        for (int t = 0; t < kRows; ++t) even[r][t] = odd[r][t] = _mm512_setzero_ps();
    for (std::size_t first = 0, group = 0; first < columns; first += kGroup, ++group) {
        const std::size_t left = columns - first;
        const __mmask32 there =
            left >= kGroup ? 0xFFFFFFFFu : (std::uint32_t{1} << left) - 1;
#pragma GCC unroll 4
        for (int r = 0; r < kWeights; ++r) {
            const std::uint16_t* const at =
                weights + static_cast<std::size_t>(r) * columns + first;
            _mm_prefetch(reinterpret_cast<const char*>(at + kWeights * columns), _MM_HINT_T0);
            const __m512i both = _mm512_maskz_loadu_epi16(there, at);
            const __m512 w_even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            const __m512 w_odd = _mm512_castsi512_ps(_mm512_and_si512(both, upper_half));
#pragma GCC unroll 4
            for (int t = 0; t < kRows; ++t) {
                even[r][t] =
                    _mm512_fmadd_ps(w_even, _mm512_loadu_ps(x[t][group].even), even[r][t]);
                odd[r][t] = _mm512_fmadd_ps(w_odd, _mm512_loadu_ps(x[t][group].odd), odd[r][t]);
            }
        }
    }
    for (int r = 0; r < kWeights; ++r)
        for (int t = 0; t < kRows; ++t)
            out[t][row + static_cast<std::size_t>(r)] = add_lanes(even[r][t], odd[r][t]);
}

template <int kRows>
void bf16_block(const std::uint16_t* weights, std::size_t columns, std::size_t rows,
                const SplitGroup* const* x, float (*out)[kBlockRows]) {
    constexpr int kWeights = kRows == 4 ? 2 : 4;
    std::size_t row = 0;
    for (; row + kWeights <= rows; row += kWeights)
        bf16_rows<kWeights, kRows>(weights + row * columns, columns, x, out, row);
    for (; row < rows; ++row)
        bf16_rows<1, kRows>(weights + row * columns, columns, x, out, row);
}

void bf16_loop(const std::uint16_t* weights, std::size_t columns, std::size_t rows,
               const SplitGroup* const* x, int count, float (*out)[kBlockRows]) noexcept {
    for (; count >= 4; count -= 4, x += 4, out += 4)
        bf16_block<4>(weights, columns, rows, x, out);
    for (; count >= 2; count -= 2, x += 2, out += 2)
        bf16_block<2>(weights, columns, rows, x, out);
    if (count > 0) bf16_block<1>(weights, columns, rows, x, out);
}

template <Format format>
void nibble_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
                 float (*out)[kBlockRows]) noexcept {
    for (; count >= 8; count -= 8, x += 8, out += 8) nibble_rows<format, 8>(block, tiles, x, out);
    for (; count >= 4; count -= 4, x += 4, out += 4) nibble_rows<format, 4>(block, tiles, x, out);
    for (; count >= 2; count -= 2, x += 2, out += 2) nibble_rows<format, 2>(block, tiles, x, out);
    if (count > 0) nibble_rows<format, 1>(block, tiles, x, out);
}

template <Format format>
void interleaved_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x,
                      int count, float (*out)[kBlockRows]) noexcept {
    for (; count >= 8; count -= 8, x += 8, out += 8)
        interleaved_rows<format, 8>(block, tiles, x, out);
    for (; count >= 4; count -= 4, x += 4, out += 4)
        interleaved_rows<format, 4>(block, tiles, x, out);
    for (; count >= 2; count -= 2, x += 2, out += 2)
        interleaved_rows<format, 2>(block, tiles, x, out);
    if (count > 0) interleaved_rows<format, 1>(block, tiles, x, out);
}

void q8_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
             float (*out)[kBlockRows]) noexcept {
    for (; count >= 8; count -= 8, x += 8, out += 8) q8_rows<8>(block, tiles, x, out);
    for (; count >= 4; count -= 4, x += 4, out += 4) q8_rows<4>(block, tiles, x, out);
    for (; count >= 2; count -= 2, x += 2, out += 2) q8_rows<2>(block, tiles, x, out);
    if (count > 0) q8_rows<1>(block, tiles, x, out);
}

}  // namespace

bool has_avx512() noexcept {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
           has_avx2();
}

const Kernels kAvx512Kernels{"avx512",
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
