// The kernels in plain C++: the path for every processor, and the reference for the other paths.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/kernels.h"

namespace moeinf {
namespace {

std::uint16_t load_u16(const std::byte* at) noexcept {
    std::uint16_t bits;
    std::memcpy(&bits, at, 2);
    return bits;
}

// Returns the code of row r, column k of a group whose codes start at `codes`.
template <Format format>
int code_of(const std::byte* codes, std::size_t r, std::size_t k) noexcept {
    if constexpr (format == Format::kQ8) {
        return std::to_integer<int>(codes[k / 4 * 64 + r * 4 + k % 4]);
    } else {
        const int both = std::to_integer<int>(codes[k % 16 / 4 * 64 + r * 4 + k % 4]);
        const int code = k < 16 ? both & 15 : both >> 4;
        return format == Format::kMxfp4 ? kMxfp4Codes[code] : code;
    }
}

// Returns the scale of row r of a group whose scales start at `scales`.
template <Format format>
float scale_of(const std::byte* scales, std::size_t r) noexcept {
    if constexpr (format == Format::kMxfp4)
        return std::bit_cast<float>(std::max(std::to_integer<int>(scales[r]) << 23, kLeastE8M0));
    else
        return half_to_float(load_u16(scales + 2 * r));
}

template <Format format>
void quant_loop(const std::byte* block, std::size_t tiles, const QuantGroup* const* x, int count,
                float (*out)[kBlockRows]) noexcept {
    constexpr std::size_t kTile = tile_bytes(format);
    constexpr std::size_t kScaleBytes = format == Format::kMxfp4 ? 1 : 2;
    constexpr std::size_t kScales = kTile - kScaleBytes * kTileGroups * kBlockRows;
    constexpr std::size_t kCodes = kScales / kTileGroups;
    for (int t = 0; t < count; ++t) std::memset(out[t], 0, sizeof out[t]);
    for (std::size_t group = 0; group < tiles * kTileGroups; ++group) {
        const std::byte* const tile = block + group / kTileGroups * kTile;
        const std::byte* const codes = tile + group % kTileGroups * kCodes;
        const std::byte* const scales =
            tile + kScales + group % kTileGroups * kScaleBytes * kBlockRows;
        for (std::size_t r = 0; r < kBlockRows; ++r) {
            const float scale = scale_of<format>(scales, r);
            for (int t = 0; t < count; ++t) {
                const QuantGroup& a = x[t][group];
                std::int32_t dot = a.start;
                for (std::size_t k = 0; k < kGroup; ++k)
                    dot += a.codes[k] * code_of<format>(codes, r, k);
                out[t][r] = std::fma(static_cast<float>(dot), scale * a.scale, out[t][r]);
            }
        }
    }
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

const Kernels kPortableKernels{"portable", false, quant_loop<Format::kQ4>, quant_loop<Format::kQ8>,
                               quant_loop<Format::kMxfp4>, bf16_loop};

}  // namespace moeinf
