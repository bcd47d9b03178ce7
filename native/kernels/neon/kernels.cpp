// The kernels with NEON and its dot product (SDOT): a vector is one word of 4 rows, a quarter of a
// block. Only a processor with dot_product (platform/cpu.h) runs them.
//
// SDOT adds four products of signed bytes to a lane of 32 bits, exactly. Its lane form multiplies
// all rows with the same word of the activations, so a word of 4 rows needs no shuffle. Codes are
// at most 63 in every format but q8, whose zero is removed first: all are signed bytes.
#include "kernels/kernels.h"

#if defined(__aarch64__)
#include "kernels/neon/unpack.h"

#include <cstring>

namespace moeinf {
namespace {

// Adds 4 words of codes times 16 activations.
MOEINF_NEON MOEINF_INLINE int32x4_t dot(int32x4_t sum, const int8x16_t* codes, int8x16_t x) {
    sum = vdotq_laneq_s32(sum, codes[0], x, 0);
    sum = vdotq_laneq_s32(sum, codes[1], x, 1);
    sum = vdotq_laneq_s32(sum, codes[2], x, 2);
    return vdotq_laneq_s32(sum, codes[3], x, 3);
}

// Adds a group, whose codes are given, to the sum of one row of activations.
template <Format format>
MOEINF_NEON MOEINF_INLINE float32x4_t add_group(float32x4_t sum, const int8x16_t* codes,
                                                const float32x4_t* scales, const QuantGroup& a) {
    const int8x16_t low = vld1q_s8(a.codes), high = vld1q_s8(a.codes + kGroup / 2);
    if constexpr (has_half_groups(format)) {
        constexpr int kZero = -zero_left(format);
        const int32x4_t one =
            dot(vdupq_n_s32(kZero * static_cast<std::int16_t>(a.start & 0xFFFF)), codes, low);
        const int32x4_t two = dot(vdupq_n_s32(kZero * (a.start >> 16)), codes + 4, high);
        const float32x4_t product = vfmaq_f32(vmulq_f32(vcvtq_f32_s32(one), scales[0]),
                                              vcvtq_f32_s32(two), scales[1]);
        return vfmaq_f32(sum, product, vdupq_n_f32(a.scale));
    }
    const int32x4_t start = vdupq_n_s32(zero_left(format) == 0 ? 0 : a.start);
    const float32x4_t all = vcvtq_f32_s32(dot(dot(start, codes, low), codes + 4, high));
    if constexpr (has_minima(format)) {
        const float32x4_t least =
            vmulq_f32(vdupq_n_f32(static_cast<float>(a.start)), scales[1]);
        return vfmaq_f32(sum, vfmaq_f32(least, all, scales[0]), vdupq_n_f32(a.scale));
    }
    return vfmaq_f32(sum, all, vmulq_f32(scales[0], vdupq_n_f32(a.scale)));
}

// Computes kParts · 4 rows of a block, from row 4 · first. All parts at once read the block in
// order, once; sums of many rows have no room for that.
template <Format format, int kRows, std::size_t kParts>
MOEINF_NEON void quant_rows(const std::byte* block, std::size_t tiles,
                            const QuantGroup* const* from, float (*out)[kBlockRows],
                            std::size_t first) {
    constexpr std::size_t kGroups = tile_columns(format) / kGroup;
    const QuantGroup* x[kRows];
    float32x4_t sums[kParts][kRows];
    for (int t = 0; t < kRows; ++t) {
        x[t] = from[t];
        for (std::size_t p = 0; p < kParts; ++p) sums[p][t] = vdupq_n_f32(0);
    }
    const std::byte* tile = block + factor_bytes(format);
    for (; tiles > 0; --tiles, tile += tile_bytes(format)) {
        Scales<format> scales[kParts];
        for (std::size_t p = 0; p < kParts; ++p) scales_of<format>(tile, first + p, scales[p]);
#pragma GCC unroll 8
        for (std::size_t g = 0; g < kGroups; ++g) {
#pragma GCC unroll 4
            for (std::size_t p = 0; p < kParts; ++p) {
                int8x16_t codes[8];
#pragma GCC unroll 8
                for (std::size_t v = 0; v < 8; ++v)
                    codes[v] = codes_of<format>(tile + 16 * (first + p), g, v);
#pragma GCC unroll 8
                for (int t = 0; t < kRows; ++t)
                    sums[p][t] = add_group<format>(sums[p][t], codes, scales[p][g], x[t][g]);
            }
        }
        for (int t = 0; t < kRows; ++t) x[t] += kGroups;
    }
    for (std::size_t p = 0; p < kParts; ++p)
        for (int t = 0; t < kRows; ++t) {
            const std::size_t at = kQuarterRows * (first + p);
            if constexpr (factor_bytes(format) > 0)
                sums[p][t] =
                    vmulq_f32(sums[p][t], vld1q_f32(reinterpret_cast<const float*>(block) + at));
            vst1q_f32(out[t] + at, sums[p][t]);
        }
}

template <Format format, int kRows>
void in_quarters(const std::byte* block, std::size_t tiles, const QuantGroup* const* x,
                 float (*out)[kBlockRows]) {
    for (std::size_t part = 0; part < 4; ++part)
        quant_rows<format, kRows, 1>(block, tiles, x, out, part);
}

template <Format format>
void quant_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
                float (*out)[kBlockRows]) noexcept {
    for (; count >= 8; count -= 8, x += 8, out += 8) in_quarters<format, 8>(block, tiles, x, out);
    for (; count >= 4; count -= 4, x += 4, out += 4) in_quarters<format, 4>(block, tiles, x, out);
    for (; count >= 1; count -= 1, x += 1, out += 1)
        quant_rows<format, 1, 4>(block, tiles, x, out, 0);
}

constexpr std::size_t kVectors = kGroup / 2 / 4;  // of the even or the odd columns of a group

MOEINF_NEON MOEINF_INLINE float add_lanes(const float32x4_t* even, const float32x4_t* odd) {
    float32x4_t s[kVectors];
    for (std::size_t i = 0; i < kVectors; ++i) s[i] = vaddq_f32(even[i], odd[i]);
    const float32x4_t s4 = vaddq_f32(vaddq_f32(s[0], s[2]), vaddq_f32(s[1], s[3]));
    const float32x2_t s2 = vadd_f32(vget_low_f32(s4), vget_high_f32(s4));
    return vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1);
}

template <int kRows>
MOEINF_NEON void bf16_row(const std::uint16_t* weights, std::size_t columns,
                          const SplitGroup* const* x, float (*out)[kBlockRows], std::size_t row) {
    const uint32x4_t upper_half = vdupq_n_u32(0xFFFF0000);
    float32x4_t even[kRows][kVectors], odd[kRows][kVectors];
    for (int t = 0; t < kRows; ++t)
        for (std::size_t i = 0; i < kVectors; ++i) even[t][i] = odd[t][i] = vdupq_n_f32(0);
    for (std::size_t first = 0, group = 0; first < columns; first += kGroup, ++group) {
        const std::uint16_t* at = weights + first;
        std::uint16_t tail[kGroup] = {};
        if (columns - first < kGroup) {
            std::memcpy(tail, at, 2 * (columns - first));
            at = tail;
        }
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kVectors; ++i) {
            const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(at + 8 * i));
            const float32x4_t w_even = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
            const float32x4_t w_odd = vreinterpretq_f32_u32(vandq_u32(both, upper_half));
#pragma GCC unroll 2
            for (int t = 0; t < kRows; ++t) {
                const SplitGroup& a = x[t][group];
                even[t][i] = vfmaq_f32(even[t][i], w_even, vld1q_f32(a.even + 4 * i));
                odd[t][i] = vfmaq_f32(odd[t][i], w_odd, vld1q_f32(a.odd + 4 * i));
            }
        }
    }
    for (int t = 0; t < kRows; ++t) out[t][row] = add_lanes(even[t], odd[t]);
}

void bf16_loop(const std::uint16_t* weights, std::size_t columns, std::size_t rows,
               const SplitGroup* const* x, int count, float (*out)[kBlockRows]) noexcept {
    for (; count >= 2; count -= 2, x += 2, out += 2)
        for (std::size_t row = 0; row < rows; ++row)
            bf16_row<2>(weights + row * columns, columns, x, out, row);
    for (std::size_t row = 0; count > 0 && row < rows; ++row)
        bf16_row<1>(weights + row * columns, columns, x, out, row);
}

}  // namespace

#define MOEINF_NEON_LOOPS                                                                  \
    quant_loop<Format::kQ4>, quant_loop<Format::kQ8>, quant_loop<Format::kQ3>,             \
        quant_loop<Format::kQ2>, quant_loop<Format::kMxfp4>, quant_loop<Format::kQ4k>,     \
        quant_loop<Format::kQ5k>, quant_loop<Format::kQ6k>, quant_loop<Format::kNvfp4>, bf16_loop

const Kernels kNeonKernels{"neon", true, MOEINF_NEON_LOOPS};
const Kernels kNeonI8mmKernels{"neon-i8mm", true, MOEINF_NEON_LOOPS, i8mm_loop};

#undef MOEINF_NEON_LOOPS

}  // namespace moeinf
#endif
