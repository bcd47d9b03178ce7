// Conversions between bfloat16, as 16 bits, and float32.
#pragma once

#include <bit>
#include <cstdint>

namespace moeinf {

inline float widen(std::uint16_t bf16) noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bf16) << 16);
}

// Rounds to nearest, ties to even. A NaN stays NaN, also if only its low 16 bits are set.
inline std::uint16_t narrow(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    const std::uint32_t quiet = bits | 0x400000;
    return static_cast<std::uint16_t>(((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded) >> 16);
}

}  // namespace moeinf
