// Quantises rows of the KV cache.
#include "attention/kv_q8.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/bf16.h"

namespace moeinf {
namespace {

constexpr float kLeast = 0x1p-100f;      // a block of smaller values becomes zeros
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole, ties to even

void quantise_block(const std::uint16_t* x, std::size_t count, std::uint8_t* out) noexcept {
    std::uint16_t most = 0;  // bits of the largest size; those of NaN are above all others
    for (std::size_t i = 0; i < count; ++i)
        most = std::max(most, static_cast<std::uint16_t>(x[i] & 0x7FFF));
    const float top = widen(most);
    const std::uint16_t scale = top < kLeast ? 0 : narrow(top * (1.0f / 127));
    std::memcpy(out, &scale, sizeof scale);
    out += sizeof scale;
    if (!std::isfinite(top)) return void(std::memset(out, 1, count));
    const float factor = scale ? 1.0f / widen(scale) : 0.0f;
    for (std::size_t i = 0; i < count; ++i) {
        const float whole = (widen(x[i]) * factor + kRounder) - kRounder;
        out[i] = static_cast<std::uint8_t>(
            static_cast<std::int8_t>(std::clamp(whole, -127.0f, 127.0f)));
    }
}

}  // namespace

void quantise_row(const std::uint16_t* x, std::size_t width, Q8* out) noexcept {
    auto* to = reinterpret_cast<std::uint8_t*>(out);
    if (width % 2) to[q8_row_bytes(width) - 1] = 0;
    for (std::size_t at = 0; at < width; at += kQ8Values, to += kQ8BlockBytes)
        quantise_block(x + at, std::min(kQ8Values, width - at), to);
}

}  // namespace moeinf
