// Searches scales with GCC's vectors, one row per lane, and writes tiles.
#include "kernels/quantise.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "kernels/expert_ffn.h"
#include "kernels/kernels.h"
#include "kernels/quantise_blocks.h"
#include "kernels/tile_values.h"

namespace moeinf {
namespace {

constexpr std::size_t kLongestBlock = kQ6kTileBytes / kBlockRows;  // bytes, of one row

// A lane is a row of the block. Vectors are as wide as the processor's registers: for wider ones
// GCC splits choices (?:) into elements.
template <std::size_t lanes>
struct Wide {
    using Floats [[gnu::vector_size(lanes * 4)]] = float;
    using Ints [[gnu::vector_size(lanes * 4)]] = std::int32_t;
};

#define MOEINF_INLINE __attribute__((always_inline)) inline

// The candidate codes of the group's largest weight. For q8 the search gains little: three suffice.
// q3 and q2 cut off more of the largest weights: those of normal weights are near 8.5 and 5.
template <Format format>
constexpr auto kCandidates = [] {
    if constexpr (format == Format::kQ2)
        return std::array{3.0f, 2.6f, 3.4f, 3.8f, 4.2f, 4.6f, 5.0f, 5.4f, 5.8f, 6.4f, 7.0f};
    else if constexpr (format == Format::kQ3)
        return std::array{7.0f, 6.2f, 6.6f, 7.4f, 7.8f, 8.2f, 8.6f, 9.0f, 9.5f, 10.0f, 11.0f};
    else if constexpr (format == Format::kQ4)
        return std::array{-8.0f, -6.8f, -7.1f, -7.4f, -7.7f, -8.3f, -8.6f, -8.9f, -9.2f,
                          7.0f, 7.4f};
    else
        return std::array{127.0f, 126.4f, 127.6f};
}();

template <Format format>
constexpr float kHighest = is_odd(format) ? zero_of(format)
                           : format == Format::kQ4 ? 7.0f : 127.0f;
template <Format format>
constexpr float kLowest = format == Format::kQ4 ? -8.0f : -kHighest<format>;
constexpr float kRounder = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, ties to even

template <Format format, class Floats>
MOEINF_INLINE void code(const Floats& x, const Floats& factor, Floats& q) {
    if constexpr (is_odd(format))
        q = ((x * factor * 0.5f - 0.5f + kRounder) - kRounder) * 2.0f + 1.0f;
    else
        q = (x * factor + kRounder) - kRounder;
    q = q < kLowest<format> ? Floats{} + kLowest<format> : q;
    q = q > kHighest<format> ? Floats{} + kHighest<format> : q;
}

// Chooses scales[r] (float16) and codes[k][r] for one group per lane. values and codes are
// [k][row of the block]; the rows are first … first + lanes − 1.
template <Format format, std::size_t lanes>
MOEINF_INLINE void search(const float (*values)[kBlockRows], std::size_t first,
                          std::uint16_t* scales, float (*codes)[kBlockRows]) {
    using Floats = typename Wide<lanes>::Floats;
    using Ints = typename Wide<lanes>::Ints;
    Floats group[kGroup];
    for (std::size_t k = 0; k < kGroup; ++k)
        std::memcpy(&group[k], values[k] + first, sizeof group[k]);
    Floats largest{}, magnitude{}, bad{};
    for (const Floats& x : group) {
        const Floats size = x < 0.0f ? -x : x;
        const Ints larger = size > magnitude;
        largest = larger ? x : largest;
        magnitude = larger ? size : magnitude;
        bad += x - x;  // NaN once x is NaN or infinity
    }
    const Ints nothing = magnitude < kLeastMagnitude;
    const Floats inverse = 1.0f / (nothing ? Floats{} + 1.0f : largest);
    Floats best_score{}, best_scale{};
    for (const float candidate : kCandidates<format>) {
        const Floats factor = inverse * candidate;
        Floats xq{}, qq{};
        for (const Floats& x : group) {
            Floats q;
            code<format>(x, factor, q);
            xq += x * q;
            qq += q * q;
        }
        const Floats some = qq > 0.0f ? qq : Floats{} + 1.0f;
        const Floats scale = xq / some;
        const Floats score = xq * scale;
        const Ints better = score > best_score;
        best_scale = better ? scale : best_scale;
        best_score = better ? score : best_score;
    }
    Floats factor{};
    for (std::size_t r = 0; r < lanes; ++r) {
        const float scale = nothing[r] ? 0.0f : best_scale[r];
        scales[first + r] = float_to_half(bad[r] == 0.0f ? scale : bad[r]);
        const float kept = half_to_float(scales[first + r]);
        factor[r] = kept != 0.0f && kept - kept == 0.0f ? 1.0f / kept : 0.0f;
    }
    for (std::size_t k = 0; k < kGroup; ++k) {
        const Floats clean = bad == 0.0f ? group[k] : Floats{};
        Floats q;
        code<format>(clean, factor, q);
        std::memcpy(codes[k] + first, &q, sizeof q);
    }
}

// Returns byte b of word w of a row's codes of a group (tiles.h); code(k) is the code of column k.
template <Format format, class Code>
MOEINF_INLINE int packed_byte(std::size_t w, std::size_t b, Code code) {
    const std::size_t k = 4 * w + b;
    if constexpr (format == Format::kQ8) {
        return code(k);
    } else if constexpr (format == Format::kQ4) {
        return code(k) | code(16 + k) << 4;
    } else {
        int byte = 0;
        for (std::size_t i = 0; i < 4 && w < 2; ++i)
            byte |= (code(8 * i + k) & 3) << 2 * i;
        for (std::size_t v = 0; v < 8 && w == 2; ++v) byte |= code(4 * v + b) >> 2 << v;
        return byte;
    }
}

template <Format format>
MOEINF_INLINE void write_codes(const float (*codes)[kBlockRows], std::byte* to) {
    constexpr float kZero = zero_of(format), kUnit = is_odd(format) ? 0.5f : 1.0f;
    std::uint8_t bytes[kGroup][kBlockRows];
    for (std::size_t k = 0; k < kGroup; ++k)
        for (std::size_t r = 0; r < kBlockRows; ++r)
            bytes[k][r] = static_cast<std::uint8_t>(static_cast<int>((codes[k][r] + kZero) * kUnit));
    for (std::size_t w = 0; w < code_bytes(format) / 64; ++w)
        for (std::size_t r = 0; r < kBlockRows; ++r)
            for (std::size_t b = 0; b < 4; ++b)
                *to++ = static_cast<std::byte>(packed_byte<format>(
                    w, b, [&](std::size_t k) { return static_cast<int>(bytes[k][r]); }));
}

template <Format format, std::size_t lanes>
MOEINF_INLINE void quantise_block(const std::byte* rows, Dtype dtype, std::size_t count,
                                  std::size_t columns, std::byte* out) {
    const std::size_t item = dtype == Dtype::kF32 ? 4 : 2;
    for (std::size_t group = 0; group < groups_of(format, columns); ++group) {
        float x[kGroup][kBlockRows] = {};
        const std::size_t first = group * kGroup;
        const std::size_t there = first < columns ? std::min(kGroup, columns - first) : 0;
        for (std::size_t r = 0; r < count; ++r) {
            float values[kGroup];
            load_row(rows + (r * columns + first) * item, there, dtype, values);
            for (std::size_t k = 0; k < there; ++k) x[k][r] = values[k];
        }
        std::uint16_t scales[kBlockRows];
        float codes[kGroup][kBlockRows];
        for (std::size_t r = 0; r < kBlockRows; r += lanes)
            search<format, lanes>(x, r, scales, codes);
        std::byte* const tile = out + group / kTileGroups * tile_bytes(format);
        const std::size_t half = group % kTileGroups;
        write_codes<format>(codes, tile + half * code_bytes(format));
        std::memcpy(tile + kTileGroups * code_bytes(format) + half * sizeof scales, scales,
                    sizeof scales);
    }
}

template <std::size_t lanes>
MOEINF_INLINE void quantise_any(const std::byte* rows, Dtype dtype, std::size_t count,
                                std::size_t columns, Format format, std::byte* out) {
    switch (format) {
        case Format::kQ2:
            return quantise_block<Format::kQ2, lanes>(rows, dtype, count, columns, out);
        case Format::kQ3:
            return quantise_block<Format::kQ3, lanes>(rows, dtype, count, columns, out);
        case Format::kQ4:
            return quantise_block<Format::kQ4, lanes>(rows, dtype, count, columns, out);
        default: return quantise_block<Format::kQ8, lanes>(rows, dtype, count, columns, out);
    }
}

void quantise_baseline(const std::byte* rows, Dtype dtype, std::size_t count, std::size_t columns,
                       Format format, std::byte* out) {
    quantise_any<4>(rows, dtype, count, columns, format, out);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void quantise_avx2(const std::byte* rows, Dtype dtype,
                                                   std::size_t count, std::size_t columns,
                                                   Format format, std::byte* out) {
    quantise_any<8>(rows, dtype, count, columns, format, out);
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) void quantise_avx512(
    const std::byte* rows, Dtype dtype, std::size_t count, std::size_t columns, Format format,
    std::byte* out) {
    quantise_any<16>(rows, dtype, count, columns, format, out);
}
#endif

// Writes columns first … first + 31 of a row, up to its end; first is a multiple of 32.
template <Format format>
void dequantise_group(const std::byte* blocks, std::size_t row, std::size_t columns,
                      std::size_t first, float* out) noexcept {
    const std::byte* const block = blocks + row / kBlockRows * block_bytes(format, columns);
    const std::byte* const tile =
        block + factor_bytes(format) + first / tile_columns(format) * tile_bytes(format);
    const std::size_t g = first % tile_columns(format) / kGroup, r = row % kBlockRows;
    const std::size_t there = std::min(kGroup, columns - first);
    const auto code = [&](std::size_t k) {
        return static_cast<float>(code_at<format>(tile, r, g, k) -
                                  (has_minima(format) ? 0 : zero_of(format)));
    };
    if constexpr (has_minima(format)) {
        const ScalePair scales = scales_at<format>(tile, r, g);
        for (std::size_t k = 0; k < there; ++k) out[k] = scales.first * code(k) - scales.second;
    } else {
        float scale[2];  // of the halves
        if constexpr (has_half_groups(format)) {
            const ScalePair scales = scales_at<format>(tile, r, g);
            scale[0] = scales.first, scale[1] = scales.second;
        } else {
            scale[0] = scale[1] = scale_at<format>(tile, r, g);
        }
        const float unit = is_e2m1(format) ? 0.5f : 1.0f;  // codes of E2M1 are doubled
        for (std::size_t k = 0; k < there; ++k) out[k] = scale[k / 16] * (unit * code(k));
        if constexpr (factor_bytes(format) > 0)
            for (std::size_t k = 0; k < there; ++k) out[k] *= read_at<float>(block + 4 * r);
    }
}

using DequantiseGroup = void (*)(const std::byte*, std::size_t, std::size_t, std::size_t,
                                 float*) noexcept;

DequantiseGroup dequantise_of(Format format) noexcept {
    switch (format) {
        case Format::kQ4: return dequantise_group<Format::kQ4>;
        case Format::kQ3: return dequantise_group<Format::kQ3>;
        case Format::kQ2: return dequantise_group<Format::kQ2>;
        case Format::kMxfp4: return dequantise_group<Format::kMxfp4>;
        case Format::kQ4k: return dequantise_group<Format::kQ4k>;
        case Format::kQ5k: return dequantise_group<Format::kQ5k>;
        case Format::kQ6k: return dequantise_group<Format::kQ6k>;
        case Format::kNvfp4: return dequantise_group<Format::kNvfp4>;
        default: return dequantise_group<Format::kQ8>;
    }
}

// Returns an E4M3 scale as GGUF reads it: 0x7F is zero, and bit 7 has no meaning.
std::byte unsigned_scale(std::byte scale) noexcept {
    return scale == std::byte{0x7F} ? std::byte{0} : scale & std::byte{0x7F};
}

// Interleaves one tile: blocks[r] is the block of row r.
void interleave(const std::byte* const* blocks, Format format, std::byte* tile) noexcept {
    const std::size_t size = tile_bytes(format) / kBlockRows, words = size / 4;
    for (std::size_t w = 0; w < words; ++w)
        for (std::size_t r = 0; r < kBlockRows; ++r)
            std::memcpy(tile + 64 * w + 4 * r, blocks[r] + 4 * w, 4);
    for (std::size_t r = 0; r < kBlockRows && size % 4 != 0; ++r)
        std::memcpy(tile + 64 * words + 2 * r, blocks[r] + 4 * words, 2);
    for (std::size_t i = 0; i < 4 * kBlockRows && format == Format::kNvfp4; ++i)
        tile[i] = unsigned_scale(tile[i]);
}

}  // namespace

void quantise_rows(const std::byte* rows, Dtype dtype, std::size_t count, std::size_t columns,
                   Format format, std::byte* out) noexcept {
    auto* quantise = quantise_baseline;
#if defined(__x86_64__)
    if (&current_kernels() == &kAvx2Kernels) quantise = quantise_avx2;
    if (current_kernels().q8 == kAvx512Kernels.q8)  // path amx, too
        quantise = quantise_avx512;
#endif
    if (is_interleaved(format)) quantise = quantise_blocks;
    const std::size_t item = dtype == Dtype::kF32 ? 4 : 2;
    for (std::size_t first = 0; first < count; first += kBlockRows) {
        quantise(rows + first * columns * item, dtype, std::min(kBlockRows, count - first),
                 columns, format, out);
        out += block_bytes(format, columns);
    }
}

void dequantise_rows(const std::byte* blocks, Format format, std::size_t count,
                     std::size_t columns, float* out) noexcept {
    const DequantiseGroup dequantise = dequantise_of(format);
    for (std::size_t row = 0; row < count; ++row, out += columns)
        for (std::size_t first = 0; first < columns; first += kGroup)
            dequantise(blocks, row, columns, first, out + first);
}

void gather_rows(const std::byte* blocks, Format format, std::size_t columns,
                 std::span<const std::int64_t> ids, std::byte* out, Dtype dtype) noexcept {
    const std::size_t row_bytes = columns * (dtype == Dtype::kF32 ? 4 : 2);
    const DequantiseGroup dequantise = dequantise_of(format);
    for (const std::int64_t id : ids) {
        for (std::size_t first = 0; first < columns; first += kGroup) {
            float values[kGroup];
            dequantise(blocks, static_cast<std::size_t>(id), columns, first, values);
            store_row(values, std::min(kGroup, columns - first), out, dtype, first);
        }
        out += row_bytes;
    }
}

void interleave_rows(const std::byte* rows, const float* factors, std::size_t count,
                     std::size_t columns, Format format, std::byte* out) noexcept {
    static constexpr std::byte kNothing[kLongestBlock]{};
    const std::size_t tiles = tiles_of(format, columns), size = tile_bytes(format) / kBlockRows;
    for (std::size_t first = 0; first < count; first += kBlockRows) {
        if (factor_bytes(format) > 0) {
            float of_rows[kBlockRows] = {};
            for (std::size_t r = 0; r < std::min(kBlockRows, count - first); ++r)
                of_rows[r] = factors == nullptr ? 1.0f : factors[first + r];
            std::memcpy(out, of_rows, sizeof of_rows);
            out += sizeof of_rows;
        }
        for (std::size_t tile = 0; tile < tiles; ++tile, out += tile_bytes(format)) {
            const std::byte* blocks[kBlockRows];
            for (std::size_t r = 0; r < kBlockRows; ++r)
                blocks[r] = first + r < count ? rows + ((first + r) * tiles + tile) * size
                                              : kNothing;
            interleave(blocks, format, out);
        }
    }
}

std::uint16_t float_to_half(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    const std::uint32_t rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return sign | 0x7E00;
    if (rest >= 0x477FF000) return sign | 0x7C00;  // 65520 and above
    if (rest < 0x38800000) {                       // below 2^-14: the unit is 2^-24
        const float units = std::bit_cast<float>(rest) * 0x1p24f;
        return sign | static_cast<std::uint16_t>((units + kRounder) - kRounder);
    }
    const std::uint32_t rounded = rest + 0xFFF + (rest >> 13 & 1);
    return sign | static_cast<std::uint16_t>((rounded - (112u << 23)) >> 13);
}

}  // namespace moeinf
