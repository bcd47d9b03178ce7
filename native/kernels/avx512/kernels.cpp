// The kernels with AVX-512 and VNNI: a vector is one word of 16 rows.
// has_avx512() tells if the processor has them.
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include "kernels/avx512/unpack.h"
#include "platform/cpu.h"

namespace moeinf {
namespace {

// Computes one block of q4, q3, q2 or mxfp4, which differ in how codes are packed and in scales.
template <Format format, int kRows>
MOEINF_AVX512 void packed_rows(const std::byte* tile, std::size_t tiles,
                               const QuantGroup* const* from, float (*out)[kBlockRows]) {
    constexpr std::size_t kCodes = code_bytes(format), kScales = scale_bytes(format) * kBlockRows;
    const QuantGroup* x[kRows];
    __m512 sums[kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        sums[t] = _mm512_setzero_ps();
    }
    const std::size_t ahead = far_ahead();
    for (; tiles > 0; --tiles, tile += tile_bytes(format)) {
        prefetch<tile_bytes(format)>(tile, ahead);
        for (std::size_t g = 0; g < kTileGroups; ++g) {
            const std::byte* const at = tile + kTileGroups * kCodes + kScales * g;
            const __m512 scales = format == Format::kMxfp4 ? powers_at(at) : scales_at(at);
            __m512i codes[8];
            unpack<format>(tile + kCodes * g, codes);
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

template <int kRows>
MOEINF_AVX512 void q8_rows(const std::byte* tile, std::size_t tiles, const QuantGroup* const* from,
                           float (*out)[kBlockRows]) {
    const QuantGroup* x[kRows];
    __m512 sums[kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        sums[t] = _mm512_setzero_ps();
    }
    const std::size_t ahead = far_ahead();
    for (; tiles > 0; --tiles, tile += kQ8TileBytes) {
        prefetch<kQ8TileBytes>(tile, ahead);
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
void packed_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
                 float (*out)[kBlockRows]) noexcept {
    for (; count >= 8; count -= 8, x += 8, out += 8) packed_rows<format, 8>(block, tiles, x, out);
    for (; count >= 4; count -= 4, x += 4, out += 4) packed_rows<format, 4>(block, tiles, x, out);
    for (; count >= 2; count -= 2, x += 2, out += 2) packed_rows<format, 2>(block, tiles, x, out);
    if (count > 0) packed_rows<format, 1>(block, tiles, x, out);
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
    return platform::cpu().avx512f && platform::cpu().avx512bw &&
           platform::cpu().avx512vl && platform::cpu().avx512vnni &&
           has_avx2();
}

#define MOEINF_AVX512_LOOPS                                                                        \
    packed_loop<Format::kQ4>, q8_loop, packed_loop<Format::kQ3>, packed_loop<Format::kQ2>,         \
        packed_loop<Format::kMxfp4>, interleaved_avx512<Format::kQ4k>,                             \
        interleaved_avx512<Format::kQ5k>, interleaved_avx512<Format::kQ6k>,                        \
        interleaved_avx512<Format::kNvfp4>, bf16_loop

const Kernels kAvx512Kernels{"avx512", true, MOEINF_AVX512_LOOPS};
const Kernels kAmxKernels{"amx", true, MOEINF_AVX512_LOOPS, amx_loop};

}  // namespace moeinf
#endif
