// Reads single codes and scales of tiles (tiles.h), for the portable path and for dequantising.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/kernels.h"

namespace moeinf {

template <class T>
T read_at(const std::byte* at) noexcept {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Returns the code of row r, column k of group g of a tile, doubled in q3 and q2.
template <Format format>
int code_at(const std::byte* tile, std::size_t r, std::size_t g, std::size_t k) noexcept {
    // Reads byte b of word w of row r.
    const auto byte = [&](std::size_t w, std::size_t b) {
        return std::to_integer<int>(tile[64 * w + 4 * r + b]);
    };
    const std::size_t v = k / 4, b = k % 4;
    if constexpr (format == Format::kQ8) {
        return byte(8 * g + v, b);
    } else if constexpr (format == Format::kQ4 || format == Format::kMxfp4) {
        const int code = byte(4 * g + v % 4, b) >> (k < 16 ? 0 : 4) & 15;
        return format == Format::kMxfp4 ? kMxfp4Codes[code] : code;
    } else if constexpr (is_odd(format)) {
        constexpr std::size_t kWords = code_bytes(format) / 64;
        const int low = byte(kWords * g + v % 2, b) >> (v / 2 * 2) & 3;
        const int high = format == Format::kQ3 ? byte(kWords * g + 2, b) >> v & 1 : 0;
        return 2 * (low | high << 2);
    } else if constexpr (format == Format::kQ4k) {
        return byte(4 + g / 2 * 8 + v, b) >> 4 * (g % 2) & 15;
    } else if constexpr (format == Format::kQ5k) {
        return (byte(12 + g / 2 * 8 + v, b) >> 4 * (g % 2) & 15) | (byte(4 + v, b) >> g & 1) << 4;
    } else if constexpr (format == Format::kQ6k) {
        const std::size_t h = g / 4, i = g % 4;
        return (byte(16 * h + 8 * (i & 1) + v, b) >> 4 * (i / 2) & 15) |
               (byte(32 + 8 * h + v, b) >> 2 * i & 3) << 4;
    } else {
        const std::size_t half = 2 * g + k / 16;
        return kMxfp4Codes[byte(1 + 2 * half + v % 2, b) >> (k % 16 < 8 ? 0 : 4) & 15];
    }
}

// Returns the value of an E4M3 scale of nvfp4.
inline float e4m3_to_float(int byte) noexcept {
    return half_to_float(static_cast<std::uint16_t>(byte << 7)) * 256.0f;
}

// The numbers of a group of interleaved blocks: D · s and dmin · m, or the scales of its halves.
struct ScalePair {
    float first;
    float second;
};

template <Format format>
ScalePair scales_at(const std::byte* tile, std::size_t r, std::size_t g) noexcept {
    const auto byte = [&](std::size_t w, std::size_t b) {
        return std::to_integer<int>(tile[64 * w + 4 * r + b]);
    };
    if constexpr (has_minima(format)) {
        const std::size_t j = g % 4;
        const int a = byte(1, j), b = byte(2, j), c = byte(3, j);
        const int s = g < 4 ? a & 63 : (c & 15) | (a >> 6) << 4;
        const int m = g < 4 ? b & 63 : (c >> 4) | (b >> 6) << 4;
        return {half_to_float(read_at<std::uint16_t>(tile + 4 * r)) * static_cast<float>(s),
                half_to_float(read_at<std::uint16_t>(tile + 4 * r + 2)) * static_cast<float>(m)};
    } else if constexpr (format == Format::kQ6k) {
        const float d = half_to_float(read_at<std::uint16_t>(tile + 64 * 52 + 2 * r));
        const auto scale = [&](std::size_t b) {
            return static_cast<float>(static_cast<std::int8_t>(byte(48 + g / 2, b)));
        };
        return {d * scale(2 * (g % 2)), d * scale(2 * (g % 2) + 1)};
    } else {
        return {e4m3_to_float(byte(0, 2 * g)), e4m3_to_float(byte(0, 2 * g + 1))};
    }
}

// Returns the scale of row r of group g of a q8, q4, q3, q2 or mxfp4 tile.
template <Format format>
float scale_at(const std::byte* tile, std::size_t r, std::size_t g) noexcept {
    const std::byte* const at =
        tile + kTileGroups * code_bytes(format) + scale_bytes(format) * (kBlockRows * g + r);
    if constexpr (format == Format::kMxfp4)
        return std::bit_cast<float>(std::max(std::to_integer<int>(*at) << 23, kLeastE8M0));
    else
        return half_to_float(read_at<std::uint16_t>(at));
}

}  // namespace moeinf
