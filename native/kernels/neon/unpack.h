// Codes and scales of a tile of any format, as vectors of 4 rows, with NEON.
//
// `rows` points to the first row of a quarter of the tile, so word w of its rows is at 64 w.
#pragma once

#include <arm_neon.h>

#include "kernels/kernels.h"

#if defined(__clang__)
#define MOEINF_NEON __attribute__((target("dotprod")))
#define MOEINF_NEON_I8MM __attribute__((target("dotprod,i8mm")))
#else
#define MOEINF_NEON __attribute__((target("arch=armv8.2-a+dotprod")))
#define MOEINF_NEON_I8MM __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#endif
#define MOEINF_INLINE __attribute__((always_inline)) inline

namespace moeinf {
namespace {

constexpr std::size_t kQuarterRows = kBlockRows / 4;  // lanes of a vector

// Returns the zero that codes_of() leaves in the codes; it removes the others.
constexpr int zero_left(Format format) {
    if (format == Format::kQ8 || is_e2m1(format) || has_minima(format)) return 0;
    return zero_of(format);
}

MOEINF_NEON MOEINF_INLINE uint8x16_t row_words(const std::byte* rows, std::size_t w) {
    return vld1q_u8(reinterpret_cast<const std::uint8_t*>(rows + 64 * w));
}

// Returns bits first … first + bits − 1 of every byte, moved to bit 0. Other bits are dropped.
MOEINF_NEON MOEINF_INLINE uint8x16_t bits_of(uint8x16_t bytes, std::size_t first,
                                             std::size_t bits) {
    const uint8x16_t moved = vshlq_u8(bytes, vdupq_n_s8(static_cast<std::int8_t>(-int(first))));
    if (first + bits == 8) return moved;
    return vandq_u8(moved, vdupq_n_u8(static_cast<std::uint8_t>((1u << bits) - 1)));
}

// Returns the codes of word v of group g, less those zeros that zero_left() does not name.
template <Format format>
MOEINF_NEON MOEINF_INLINE int8x16_t codes_of(const std::byte* rows, std::size_t g,
                                             std::size_t v) {
    constexpr std::size_t kWords = code_bytes(format) / 64;  // of a group that is not interleaved
    uint8x16_t codes;
    if constexpr (format == Format::kQ8) {
        codes = veorq_u8(row_words(rows, kWords * g + v), vdupq_n_u8(0x80));
    } else if constexpr (is_odd(format)) {
        codes = vshlq_n_u8(bits_of(row_words(rows, kWords * g + v % 2), v / 2 * 2, 2), 1);
        if constexpr (format == Format::kQ3)
            codes = vorrq_u8(codes,
                             vshlq_n_u8(bits_of(row_words(rows, kWords * g + 2), v, 1), 3));
    } else if constexpr (format == Format::kQ4k) {
        codes = bits_of(row_words(rows, 4 + g / 2 * 8 + v), g % 2 * 4, 4);
    } else if constexpr (format == Format::kQ5k) {
        codes = vorrq_u8(bits_of(row_words(rows, 12 + g / 2 * 8 + v), g % 2 * 4, 4),
                         vshlq_n_u8(bits_of(row_words(rows, 4 + v), g, 1), 4));
    } else if constexpr (format == Format::kQ6k) {
        const std::size_t h = g / 4, i = g % 4;
        codes = vorrq_u8(bits_of(row_words(rows, 16 * h + 8 * (g % 2) + v), i / 2 * 4, 4),
                         vshlq_n_u8(bits_of(row_words(rows, 32 + 8 * h + v), 2 * i, 2), 4));
    } else if constexpr (format == Format::kNvfp4) {
        codes = bits_of(row_words(rows, 1 + 4 * g + v / 4 * 2 + v % 2), v % 4 / 2 * 4, 4);
    } else {
        codes = bits_of(row_words(rows, kWords * g + v % 4), v / 4 * 4, 4);
    }
    if constexpr (is_e2m1(format)) {
        const uint8x16_t numbers =
            vsubq_u8(vld1q_u8(kMxfp4Codes), vdupq_n_u8(static_cast<std::uint8_t>(kMxfp4Zero)));
        codes = vqtbl1q_u8(numbers, codes);
    }
    return vreinterpretq_s8_u8(codes);
}

MOEINF_NEON MOEINF_INLINE float32x4_t halves(uint16x4_t bits) {
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

MOEINF_NEON MOEINF_INLINE float32x4_t halves_at(const std::byte* at) {
    return halves(vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(at))));
}

// Reads 4 scales of mxfp4: bytes e, each 2^(e − 127).
MOEINF_NEON MOEINF_INLINE float32x4_t powers_at(const std::byte* at) {
    std::int32_t bits[kQuarterRows];
    for (std::size_t r = 0; r < kQuarterRows; ++r) bits[r] = std::to_integer<int>(at[r]) << 23;
    return vreinterpretq_f32_s32(vmaxq_s32(vld1q_s32(bits), vdupq_n_s32(kLeastE8M0)));
}

// The numbers of a quarter's groups: scales, or the pairs of interleaved blocks (tile_values.h).
template <Format format>
using Scales = float32x4_t[tile_columns(format) / kGroup][2];

// Writes D · s and dmin · m of groups 0 … 7 of a q4k or q5k tile.
MOEINF_NEON MOEINF_INLINE void scales_and_minima(const std::byte* rows, float32x4_t (*out)[2]) {
    const uint32x4_t both = vreinterpretq_u32_u8(row_words(rows, 0));
    const float32x4_t d = halves(vmovn_u32(both)), least = halves(vshrn_n_u32(both, 16));
    const uint8x16_t a = row_words(rows, 1), b = row_words(rows, 2), c = row_words(rows, 3);
    const uint8x16_t scales[2] = {
        bits_of(a, 0, 6), vorrq_u8(bits_of(c, 0, 4), vshlq_n_u8(bits_of(a, 6, 2), 4))};
    const uint8x16_t minima[2] = {
        bits_of(b, 0, 6), vorrq_u8(bits_of(c, 4, 4), vshlq_n_u8(bits_of(b, 6, 2), 4))};
    const uint32x4_t byte = vdupq_n_u32(255);
#pragma GCC unroll 8
    for (std::size_t g = 0; g < 8; ++g) {
        const int32x4_t down = vdupq_n_s32(-8 * static_cast<int>(g % 4));
        const uint32x4_t s = vshlq_u32(vreinterpretq_u32_u8(scales[g / 4]), down);
        const uint32x4_t m = vshlq_u32(vreinterpretq_u32_u8(minima[g / 4]), down);
        out[g][0] = vmulq_f32(d, vcvtq_f32_u32(vandq_u32(s, byte)));
        out[g][1] = vmulq_f32(least, vcvtq_f32_u32(vandq_u32(m, byte)));
    }
}

// Writes the scales of the half groups of a q6k or nvfp4 tile; d is of the same rows.
template <Format format>
MOEINF_NEON MOEINF_INLINE void half_scales(const std::byte* rows, float32x4_t d,
                                           float32x4_t (*out)[2]) {
    constexpr std::size_t kWords = tile_columns(format) / 64;  // 4 scales each
#pragma GCC unroll 4
    for (std::size_t w = 0; w < kWords; ++w) {
        const int32x4_t words =
            vreinterpretq_s32_u8(row_words(rows, format == Format::kQ6k ? 48 + w : 0));
#pragma GCC unroll 4
        for (std::size_t b = 0; b < 4; ++b) {
            const int32x4_t top = vshlq_s32(words, vdupq_n_s32(24 - 8 * static_cast<int>(b)));
            float32x4_t scale;
            if constexpr (format == Format::kQ6k)
                scale = vcvtq_f32_s32(vshrq_n_s32(top, 24));
            else
                scale = halves(vshl_n_u16(
                    vmovn_u32(vshrq_n_u32(vreinterpretq_u32_s32(top), 24)), 7));
            out[2 * w + b / 2][b % 2] = vmulq_f32(d, scale);
        }
    }
}

// Writes the scales of quarter `part` of a tile. Formats with one scale a group leave the second.
template <Format format>
MOEINF_NEON MOEINF_INLINE void scales_of(const std::byte* tile, std::size_t part,
                                         float32x4_t (*out)[2]) {
    const std::byte* const rows = tile + 16 * part;
    if constexpr (has_minima(format)) {
        scales_and_minima(rows, out);
    } else if constexpr (format == Format::kQ6k) {
        half_scales<format>(rows, halves_at(tile + 64 * 52 + 8 * part), out);
    } else if constexpr (format == Format::kNvfp4) {
        half_scales<format>(rows, vdupq_n_f32(256.0f), out);
    } else {
        constexpr std::size_t kBytes = scale_bytes(format);
        const std::byte* at =
            tile + kTileGroups * code_bytes(format) + kBytes * kQuarterRows * part;
        for (std::size_t g = 0; g < kTileGroups; ++g, at += kBytes * kBlockRows)
            out[g][0] = format == Format::kMxfp4 ? powers_at(at) : halves_at(at);
    }
}

}  // namespace
}  // namespace moeinf
