// The kernels in plain C++: the path for every processor, and the reference for the other paths.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/tile_values.h"

namespace moeinf {
namespace {

template <Format format>
void quant_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
                float (*out)[kBlockRows]) noexcept {
    for (int t = 0; t < count; ++t) std::memset(out[t], 0, sizeof out[t]);
    for (std::size_t group = 0; group < tiles * kTileGroups; ++group) {
        const std::byte* const tile = block + group / kTileGroups * tile_bytes(format);
        const std::size_t g = group % kTileGroups;
        for (std::size_t r = 0; r < kBlockRows; ++r) {
            const float scale = scale_at<format>(tile, r, g);
            for (int t = 0; t < count; ++t) {
                const QuantGroup& a = x[t][group];
                std::int32_t dot = a.start;
                for (std::size_t k = 0; k < kGroup; ++k)
                    dot += a.codes[k] * code_at<format>(tile, r, g, k);
                out[t][r] = std::fma(static_cast<float>(dot), scale * a.scale, out[t][r]);
            }
        }
    }
}

// Returns t of tiles.h: a group's product in units of the activation's scale.
template <Format format>
float group_product(const int* codes, ScalePair scales, const QuantGroup& a) noexcept {
    std::int32_t first = 0, second = 0;
    if constexpr (has_half_groups(format)) {
        first = -zero_of(format) * static_cast<std::int16_t>(a.start & 0xFFFF);
        second = -zero_of(format) * (a.start >> 16);
    }
    for (std::size_t k = 0; k < kGroup / 2; ++k) {
        first += a.codes[k] * codes[k];
        second += a.codes[kGroup / 2 + k] * codes[kGroup / 2 + k];
    }
    if constexpr (has_minima(format))
        return std::fma(static_cast<float>(first + second), scales.first,
                        static_cast<float>(a.start) * scales.second);
    else
        return std::fma(static_cast<float>(second), scales.second,
                        static_cast<float>(first) * scales.first);
}

template <Format format>
void interleaved_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x,
                      int count, float (*out)[kBlockRows]) noexcept {
    constexpr std::size_t kGroups = tile_columns(format) / kGroup;
    for (int t = 0; t < count; ++t) std::memset(out[t], 0, sizeof out[t]);
    for (std::size_t group = 0; group < tiles * kGroups; ++group) {
        const std::byte* const tile =
            block + factor_bytes(format) + group / kGroups * tile_bytes(format);
        for (std::size_t r = 0; r < kBlockRows; ++r) {
            int codes[kGroup];
            for (std::size_t k = 0; k < kGroup; ++k)
                codes[k] = code_at<format>(tile, r, group % kGroups, k);
            const ScalePair scales = scales_at<format>(tile, r, group % kGroups);
            for (int t = 0; t < count; ++t) {
                const QuantGroup& a = x[t][group];
                out[t][r] = std::fma(group_product<format>(codes, scales, a), a.scale, out[t][r]);
            }
        }
    }
    if constexpr (factor_bytes(format) > 0)
        for (int t = 0; t < count; ++t)
            for (std::size_t r = 0; r < kBlockRows; ++r)
                out[t][r] *= read_at<float>(block + sizeof(float) * r);
}

float bf16_dot(const std::uint16_t* weights, std::size_t columns, const SplitGroup* x) noexcept {
    float even[16] = {}, odd[16] = {};
    for (std::size_t first = 0; first < columns; first += kGroup, ++x) {
        std::uint16_t w[kGroup] = {};
        std::memcpy(w, weights + first, 2 * std::min(kGroup, columns - first));
        for (std::size_t l = 0; l < 16; ++l) {
            even[l] = std::fma(widen(w[2 * l]), x->even[l], even[l]);
            odd[l] = std::fma(widen(w[2 * l + 1]), x->odd[l], odd[l]);
        }
    }
    for (std::size_t l = 0; l < 16; ++l) even[l] += odd[l];
    for (std::size_t half = 8; half > 0; half /= 2)
        for (std::size_t l = 0; l < half; ++l) even[l] += even[l + half];
    return even[0];
}

void bf16_loop(const std::uint16_t* weights, std::size_t columns, std::size_t rows,
               const SplitGroup* const* x, int count, float (*out)[kBlockRows]) noexcept {
    for (std::size_t r = 0; r < rows; ++r)
        for (int t = 0; t < count; ++t)
            out[t][r] = bf16_dot(weights + r * columns, columns, x[t]);
}

}  // namespace

float half_to_float(std::uint16_t bits) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
    const std::uint32_t rest = bits & 0x7FFF;
    if (rest >= 0x7C00)  // infinity, NaN (made quiet, as the instruction does)
        return std::bit_cast<float>(sign | 0x7F800000 | ((rest & 0x3FF) << 13) |
                                    (rest > 0x7C00 ? 0x400000 : 0));
    // A subnormal half is a normal float: rest · 2^-24.
    const float magnitude = rest < 0x400 ? static_cast<float>(rest) * 0x1p-24f
                                         : std::bit_cast<float>((rest << 13) + (112u << 23));
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
}

const Kernels kPortableKernels{"portable",
                               false,
                               quant_loop<Format::kQ4>,
                               quant_loop<Format::kQ8>,
                               quant_loop<Format::kQ3>,
                               quant_loop<Format::kQ2>,
                               quant_loop<Format::kMxfp4>,
                               interleaved_loop<Format::kQ4k>,
                               interleaved_loop<Format::kQ5k>,
                               interleaved_loop<Format::kQ6k>,
                               interleaved_loop<Format::kNvfp4>,
                               bf16_loop};

}  // namespace moeinf
