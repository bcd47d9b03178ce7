// The products of many rows of activations, with NEON's matrix instruction (SMMLA, "i8mm").
//
// SMMLA computes C[i][j] += Σ_k A[i][k] · B[j][k] of signed bytes, i, j = 0 … 1, k = 0 … 7:
//
//   A    8 codes of two rows of activations (RowSet)
//   B    code − zero of two rows of weights: two words of each, side by side
//   C    four dot products, exact in int32
//
// So C has what the path neon computes with SDOT. The steps after it are the same, in the same
// order, and so are the bits.
#include "kernels/kernels.h"

#if defined(__aarch64__)
#include "kernels/neon/unpack.h"
#include "kernels/rows.h"

namespace moeinf {
namespace {

constexpr std::size_t kEights = kGroup / 8;  // of codes in a group

// The codes of a group of 4 rows of weights, as SMMLA reads them: rows 0 and 1, rows 2 and 3.
struct Pairs {
    int8x16_t lower[kEights], upper[kEights];
};

MOEINF_NEON_I8MM MOEINF_INLINE int8x16_t first_halves(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

MOEINF_NEON_I8MM MOEINF_INLINE int8x16_t second_halves(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

template <Format format>
MOEINF_NEON_I8MM MOEINF_INLINE void pair_up(const std::byte* rows, std::size_t g, Pairs& out) {
    constexpr int kZero = zero_left(format);
    const int8x16_t zero = vdupq_n_s8(static_cast<std::int8_t>(kZero));
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kEights; ++i) {
        int8x16_t one = codes_of<format>(rows, g, 2 * i);
        int8x16_t two = codes_of<format>(rows, g, 2 * i + 1);
        if constexpr (kZero != 0) one = vsubq_s8(one, zero), two = vsubq_s8(two, zero);
        const int32x4_t a = vreinterpretq_s32_s8(one), b = vreinterpretq_s32_s8(two);
        out.lower[i] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
        out.upper[i] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
    }
}

// Computes dot products of 4 rows of weights and two rows of activations, over `eights` of a group.
MOEINF_NEON_I8MM MOEINF_INLINE void multiply(const Pairs& weights, const int8x16_t* x,
                                             std::size_t from, std::size_t eights,
                                             float32x4_t* out) {
    int32x4_t lower = vdupq_n_s32(0), upper = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (std::size_t i = from; i < from + eights; ++i) {
        lower = vmmlaq_s32(lower, x[i], weights.lower[i]);
        upper = vmmlaq_s32(upper, x[i], weights.upper[i]);
    }
    const int8x16_t a = vreinterpretq_s8_s32(lower), b = vreinterpretq_s8_s32(upper);
    out[0] = vcvtq_f32_s32(vreinterpretq_s32_s8(first_halves(a, b)));
    out[1] = vcvtq_f32_s32(vreinterpretq_s32_s8(second_halves(a, b)));
}

// Adds a group to the sums of rows t and t + 1.
template <Format format>
MOEINF_NEON_I8MM MOEINF_INLINE void add_group(const Pairs& weights, const float32x4_t* scales,
                                              const RowSet& x, std::size_t t, float32x4_t* sums) {
    constexpr std::size_t kOne = has_half_groups(format) ? kEights / 2 : kEights;
    int8x16_t codes[kEights];
#pragma GCC unroll 2
    for (std::size_t i = 0; i < kEights; i += 2) {
        const int8x16_t a = vld1q_s8(x.codes[t] + 8 * i), b = vld1q_s8(x.codes[t + 1] + 8 * i);
        codes[i] = first_halves(a, b);
        codes[i + 1] = second_halves(a, b);
    }
    float32x4_t one[2], two[2];
    multiply(weights, codes, 0, kOne, one);
    if constexpr (has_half_groups(format)) multiply(weights, codes, kOne, kOne, two);
#pragma GCC unroll 2
    for (std::size_t i = 0; i < 2; ++i) {
        const float32x4_t scale = vdupq_n_f32(x.scales[t + i]);
        if constexpr (has_minima(format)) {
            const float32x4_t least = vmulq_f32(vdupq_n_f32(x.levels[t + i]), scales[1]);
            sums[i] = vfmaq_f32(sums[i], vfmaq_f32(least, one[i], scales[0]), scale);
        } else if constexpr (has_half_groups(format)) {
            const float32x4_t product = vfmaq_f32(vmulq_f32(one[i], scales[0]), two[i], scales[1]);
            sums[i] = vfmaq_f32(sums[i], product, scale);
        } else {
            sums[i] = vfmaq_f32(sums[i], one[i], vmulq_f32(scales[0], scale));
        }
    }
}

// Computes 4 rows of a block for the first kRows rows of a set.
template <Format format, std::size_t kRows>
MOEINF_NEON_I8MM void set_rows(const std::byte* block, std::size_t tiles, const RowSet* x,
                               float (*out)[kBlockRows], std::size_t part) {
    constexpr std::size_t kGroups = tile_columns(format) / kGroup;
    float32x4_t sums[kRows];
    for (std::size_t t = 0; t < kRows; ++t) sums[t] = vdupq_n_f32(0);
    const std::byte* tile = block + factor_bytes(format);
    for (; tiles > 0; --tiles, tile += tile_bytes(format), x += kGroups) {
        Scales<format> scales;
        scales_of<format>(tile, part, scales);
        for (std::size_t g = 0; g < kGroups; ++g) {
            Pairs weights;
            pair_up<format>(tile + 16 * part, g, weights);
#pragma GCC unroll 8
            for (std::size_t t = 0; t < kRows; t += 2)
                add_group<format>(weights, scales[g], x[g], t, sums + t);
        }
    }
    for (std::size_t t = 0; t < kRows; ++t) {
        const std::size_t at = kQuarterRows * part;
        if constexpr (factor_bytes(format) > 0)
            sums[t] = vmulq_f32(sums[t], vld1q_f32(reinterpret_cast<const float*>(block) + at));
        vst1q_f32(out[t] + at, sums[t]);
    }
}

template <Format format>
void set_loop(const std::byte* block, std::size_t tiles, const RowSet* x, std::size_t count,
              float (*out)[kBlockRows]) noexcept {
    for (std::size_t part = 0; part < 4; ++part)
        if (count > 12)
            set_rows<format, 16>(block, tiles, x, out, part);
        else if (count > 8)
            set_rows<format, 12>(block, tiles, x, out, part);
        else
            set_rows<format, 8>(block, tiles, x, out, part);
}

}  // namespace

SetLoop i8mm_loop(Format format) noexcept {
    return set_loop_of(format, []<Format one>() -> SetLoop { return set_loop<one>; });
}

}  // namespace moeinf
#endif
