// Quantises, splits and activates rows with GCC's vectors, which compile for any target.
#include "kernels/activations.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace moeinf {
namespace {

// Vectors of the baseline's width: for wider ones GCC splits choices (?:) into elements.
using Floats = float __attribute__((vector_size(16)));
using Ints = std::int32_t __attribute__((vector_size(16)));
constexpr std::size_t kWide = 4;

Floats load(const float* from) noexcept {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

void store(float* to, Floats values) noexcept {
    std::memcpy(to, &values, sizeof values);
}

Ints bits_of(Floats values) noexcept {
    return std::bit_cast<Ints>(values);
}

// Adding it rounds to an integer, ties to even, for magnitudes below 2^22: no fraction bits remain.
constexpr float kRounder = 12582912.0f;  // 1.5 · 2^23

Floats round_to_even(Floats values) noexcept {
    return (values + kRounder) - kRounder;
}

// Returns exp(x) for x clamped to [-88, 88], NaN for NaN: 2^n · p(r), x = n · ln 2 + r.
Floats exponential(Floats x) noexcept {
    const Floats low = Floats{} - 88.0f, high = Floats{} + 88.0f;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Floats n = round_to_even(x * 1.44269504f);
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts (Cephes)
    Floats p = Floats{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    const Ints exponent = bits_of(n + kRounder) - bits_of(Floats{} + kRounder);
    return p * std::bit_cast<Floats>((exponent + 127) << 23);
}

// Returns min(x, limit), NaN for NaN.
Floats at_most(Floats x, float limit) noexcept {
    const Floats high = Floats{} + limit;
    return x > high ? high : x;
}

// Returns x in -limit … limit, NaN for NaN.
Floats within(Floats x, float limit) noexcept {
    const Floats low = Floats{} - limit;
    x = at_most(x, limit);
    return x < low ? low : x;
}

// Reads group `group` of a row as 32 floats, with zeros after the end of the row.
void fetch_group(RowView row, std::size_t columns, std::size_t group, float* out) noexcept {
    const std::size_t first = group * kGroup;
    const std::size_t count = first >= columns ? 0 : std::min(kGroup, columns - first);
    load_row(row.data + (row.dtype == Dtype::kF32 ? 4 : 2) * first, count, row.dtype, out);
    for (std::size_t i = count; i < kGroup; ++i) out[i] = 0.0f;
}

std::int32_t sum(Ints values) noexcept {
    return values[0] + values[1] + values[2] + values[3];
}

// Returns QuantGroup::start from the sums of the first and the last 16 codes.
std::int32_t start_of(Format format, std::int32_t first, std::int32_t second) noexcept {
    if (has_half_groups(format)) return (first & 0xFFFF) | second * 0x10000;
    return -(has_minima(format) ? 1 : zero_of(format)) * (first + second);
}

}  // namespace

void quantise_group(const float* values, Format format, QuantGroup* out) noexcept {
    // The bits of magnitudes order like the floats, with NaN above infinity.
    Ints larger{};
    for (std::size_t i = 0; i < kGroup; i += kWide) {
        const Ints magnitude = bits_of(load(values + i)) & 0x7FFFFFFF;
        larger = magnitude > larger ? magnitude : larger;
    }
    std::int32_t most = 0;
    for (std::size_t i = 0; i < kWide; ++i) most = larger[i] > most ? larger[i] : most;
    const float magnitude = std::bit_cast<float>(most);
    if (most >= 0x7F800000 || magnitude < kLeastMagnitude) {
        *out = QuantGroup{};
        if (most >= 0x7F800000) out->scale = std::bit_cast<float>(0x7FC00000);
        return;
    }
    const float inverse = 127.0f / magnitude;
    const Ints zero = bits_of(Floats{} + kRounder);
    Ints halves[2]{};
    for (std::size_t i = 0; i < kGroup; i += kWide) {
        const Ints codes = bits_of(load(values + i) * inverse + kRounder) - zero;
        halves[i / (kGroup / 2)] += codes;
        for (std::size_t k = 0; k < kWide; ++k)
            out->codes[i + k] = static_cast<std::int8_t>(codes[k]);
    }
    const float half = is_e2m1(format) ? 0.5f : 1.0f;  // its codes are doubled (tiles.h)
    out->scale = magnitude / 127.0f * half;
    out->start = start_of(format, sum(halves[0]), sum(halves[1]));
}

void split_group(const float* values, SplitGroup* out) noexcept {
    for (std::size_t i = 0; i < kGroup / 2; ++i) {
        out->even[i] = widen(narrow(values[2 * i]));
        out->odd[i] = widen(narrow(values[2 * i + 1]));
    }
}

void quantise_row(RowView row, std::size_t columns, Format format, QuantGroup* out) noexcept {
    alignas(64) float values[kGroup];
    for (std::size_t group = 0; group < groups_of(format, columns); ++group) {
        fetch_group(row, columns, group, values);
        quantise_group(values, format, out + group);
    }
}

void split_row(RowView row, std::size_t columns, SplitGroup* out) noexcept {
    alignas(64) float values[kGroup];
    for (std::size_t group = 0; group < groups_of(Format::kBf16, columns); ++group) {
        fetch_group(row, columns, group, values);
        split_group(values, out + group);
    }
}

void load_row(const std::byte* from, std::size_t count, Dtype dtype, float* values) noexcept {
    if (dtype == Dtype::kF32) {
        std::memcpy(values, from, 4 * count);
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, from + 2 * i, 2);
        values[i] = widen(bits);
    }
}

void store_row(const float* values, std::size_t count, std::byte* row, Dtype dtype,
               std::size_t first) noexcept {
    if (dtype == Dtype::kF32) {
        std::memcpy(row + 4 * first, values, 4 * count);
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint16_t bits = narrow(values[i]);
        std::memcpy(row + 2 * (first + i), &bits, 2);
    }
}

void activate(Activation activation, const float* gate, const float* up, float* values) noexcept {
    switch (activation) {
        case Activation::kSwiGlu:
            for (std::size_t i = 0; i < kGroup; i += kWide) {
                const Floats g = load(gate + i);
                store(values + i, g / (1.0f + exponential(-g)) * load(up + i));
            }
            return;
        case Activation::kSwiGlu10:
            for (std::size_t i = 0; i < kGroup; i += kWide) {
                const Floats g = at_most(load(gate + i), kSwiGluLimit);
                const Floats u = within(load(up + i), kSwiGluLimit);
                store(values + i, g / (1.0f + exponential(-g)) * u);
            }
            return;
        case Activation::kClampedSwiGlu:
            for (std::size_t i = 0; i < kGroup; i += kWide) {
                const Floats g = at_most(load(gate + i), kClampedLimit);
                const Floats u = within(load(up + i), kClampedLimit);
                store(values + i, g / (1.0f + exponential(g * -kClampedAlpha)) * (u + 1.0f));
            }
            return;
        case Activation::kGeGlu:
            for (std::size_t i = 0; i < kGroup; i += kWide) {
                const Floats g = load(gate + i);
                const Floats z = g * ((g * g) * -kGeluCube + -kGelu);
                store(values + i, g / (1.0f + exponential(z)) * load(up + i));
            }
            return;
        case Activation::kRelu:
            for (std::size_t i = 0; i < kGroup; i += kWide) {
                const Floats u = load(up + i);
                store(values + i, u < 0.0f ? Floats{} : u);
            }
            return;
        case Activation::kRelu2:
            for (std::size_t i = 0; i < kGroup; i += kWide) {
                const Floats u = load(up + i), positive = u < 0.0f ? Floats{} : u;
                store(values + i, positive * positive);
            }
            return;
    }
}

void sigmoid(const float* x, float* values) noexcept {
    for (std::size_t i = 0; i < kGroup; i += kWide)
        store(values + i, 1.0f / (1.0f + exponential(-load(x + i))));
}

}  // namespace moeinf
