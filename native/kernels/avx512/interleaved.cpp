// The kernels of interleaved blocks (tiles.h) with AVX-512 and VNNI: q4k, q5k, q6k and nvfp4.
#if defined(__x86_64__)
#include "kernels/avx512/unpack.h"

namespace moeinf {
namespace {

// Adds group g, whose codes are given, to the sums of all rows of activations.
template <Format format, int kRows>
MOEINF_AVX512 MOEINF_INLINE void add_group(const __m512i* codes, const float (*scales)[kBlockRows],
                                           const QuantGroup* const* x, std::size_t g,
                                           __m512* sums) {
    constexpr int kZero = -zero_of(format);
    const __m512i low = _mm512_set1_epi32(kZero & 0xFFFF);
    const __m512i high = _mm512_set1_epi32(kZero * 0x10000);
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
    // A group of q6k has words in all of its tile, so two tiles are fetched ahead.
    constexpr std::size_t kFar = format == Format::kQ6k ? 2 * tile_bytes(format) : 1024;
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
            if constexpr (kRows > 1) {  // one row keeps up with the processor's own prefetcher
                const std::byte* const part = tile + g * (tile_bytes(format) / kGroups);
                prefetch<kPart + 64>(part, kFar);
                if constexpr (format == Format::kQ6k)
                    prefetch_near<kPart>(part + tile_bytes(format));
            }
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

// Computes one block of q6k for one row of activations, without prefetches.
//
// A group has words in all of its tile. Here every word is read once and in order, which the
// processor's prefetcher follows. So the lower and upper bits of a code are multiplied apart, and
// the sums of all half groups stay in registers.
MOEINF_AVX512 void q6k_row(const std::byte* tile, std::size_t tiles, const QuantGroup* x,
                           float* out) {
    constexpr int kZero = -zero_of(Format::kQ6k);
    const __m512i low = _mm512_set1_epi32(kZero & 0xFFFF);
    const __m512i high = _mm512_set1_epi32(kZero * 0x10000);
    const __m512i nibble = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(48);
    __m512 sum = _mm512_setzero_ps();
    for (; tiles > 0; --tiles, tile += kQ6kTileBytes, x += 8) {
        __m512i dots[8][2];
#pragma GCC unroll 8
        for (std::size_t g = 0; g < 8; ++g) {
            const __m512i start = _mm512_set1_epi32(x[g].start);
            dots[g][0] = _mm512_madd_epi16(start, low);
            dots[g][1] = _mm512_madd_epi16(start, high);
        }
#pragma GCC unroll 32
        for (std::size_t w = 0; w < 32; ++w) {
            const std::size_t v = w % 8, g = w / 16 * 4 + w / 8 % 2;
            const __m512i bits = row_words(tile, w);
            __m512i &one = dots[g][v / 4], &two = dots[g + 2][v / 4];
            one = _mm512_dpbusd_epi32(one, _mm512_and_si512(bits, nibble), word(x[g].codes, v));
            two = _mm512_dpbusd_epi32(two, _mm512_and_si512(_mm512_srli_epi32(bits, 4), nibble),
                                      word(x[g + 2].codes, v));
        }
#pragma GCC unroll 16
        for (std::size_t w = 0; w < 16; ++w) {
            const __m512i bits = row_words(tile, 32 + w);
            const __m512i codes[4] = {_mm512_slli_epi32(bits, 4), _mm512_slli_epi32(bits, 2), bits,
                                      _mm512_srli_epi32(bits, 2)};
#pragma GCC unroll 4
            for (std::size_t i = 0; i < 4; ++i) {
                const std::size_t g = w / 8 * 4 + i, v = w % 8;
                dots[g][v / 4] = _mm512_dpbusd_epi32(
                    dots[g][v / 4], _mm512_and_si512(codes[i], upper), word(x[g].codes, v));
            }
        }
        alignas(64) float scales[8][2][kBlockRows];
        half_scales<Format::kQ6k>(tile, scales);
#pragma GCC unroll 8
        for (std::size_t g = 0; g < 8; ++g) {
            const __m512 one = _mm512_loadu_ps(scales[g][0]), two = _mm512_loadu_ps(scales[g][1]);
            const __m512 product =
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[g][1]), two,
                                _mm512_mul_ps(_mm512_cvtepi32_ps(dots[g][0]), one));
            sum = _mm512_fmadd_ps(product, _mm512_set1_ps(x[g].scale), sum);
        }
    }
    _mm512_storeu_ps(out, sum);
}

}  // namespace

template <Format format>
void interleaved_avx512(const std::byte* block, std::size_t tiles, const QuantGroup* const* x,
                        int count, float (*out)[kBlockRows]) noexcept {
    for (; count >= 8; count -= 8, x += 8, out += 8)
        interleaved_rows<format, 8>(block, tiles, x, out);
    for (; count >= 4; count -= 4, x += 4, out += 4)
        interleaved_rows<format, 4>(block, tiles, x, out);
    for (; count >= 2; count -= 2, x += 2, out += 2)
        interleaved_rows<format, 2>(block, tiles, x, out);
    if (count == 0) return;
    if constexpr (format == Format::kQ6k)
        q6k_row(block, tiles, *x, *out);
    else
        interleaved_rows<format, 1>(block, tiles, x, out);
}

template void interleaved_avx512<Format::kQ4k>(
    const std::byte*, std::size_t, const QuantGroup* const*, int, float (*)[kBlockRows]) noexcept;
template void interleaved_avx512<Format::kQ5k>(
    const std::byte*, std::size_t, const QuantGroup* const*, int, float (*)[kBlockRows]) noexcept;
template void interleaved_avx512<Format::kQ6k>(
    const std::byte*, std::size_t, const QuantGroup* const*, int, float (*)[kBlockRows]) noexcept;
template void interleaved_avx512<Format::kNvfp4>(
    const std::byte*, std::size_t, const QuantGroup* const*, int, float (*)[kBlockRows]) noexcept;

}  // namespace moeinf
#endif
