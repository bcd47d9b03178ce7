// Calls the products in order, and keeps the rows between them.
#include "layer/gated_mlp.h"

#include <algorithm>
#include <array>

#include "kernels/bf16.h"
#include "threads/scratch.h"

namespace moeinf {
namespace {

constexpr std::size_t kPiece = 4096;  // values of one index of the threads
constexpr std::size_t kAtOnce = 32;   // of `activate` and `sigmoid`

void silu_piece(const std::uint16_t* gate, const std::uint16_t* up, std::size_t count,
                std::uint16_t* out) noexcept {
    std::array<float, kAtOnce> gates, ones, values;
    ones.fill(1.0f);
    for (std::size_t first = 0; first < count; first += kAtOnce) {
        const std::size_t n = std::min(kAtOnce, count - first);
        for (std::size_t i = 0; i < n; ++i) gates[i] = widen(gate[first + i]);
        std::fill(gates.begin() + n, gates.end(), 0.0f);
        activate(Activation::kSwiGlu, gates.data(), ones.data(), values.data());
        for (std::size_t i = 0; i < n; ++i)
            out[first + i] = narrow(widen(narrow(values[i])) * widen(up[first + i]));
    }
}

void sigmoid_piece(const std::uint16_t* gate, std::size_t each, const std::uint16_t* x,
                   std::size_t count, std::uint16_t* out) noexcept {
    std::array<float, kAtOnce> gates, values;
    for (std::size_t first = 0; first < count; first += kAtOnce) {
        const std::size_t n = std::min(kAtOnce, count - first);
        for (std::size_t i = 0; i < n; ++i) gates[i] = widen(gate[first + i]);
        std::fill(gates.begin() + n, gates.end(), 0.0f);
        sigmoid(gates.data(), values.data());
        for (std::size_t i = 0; i < n; ++i) {
            const float factor = widen(narrow(values[i]));
            const std::size_t row = (first + i) * each;
            for (std::size_t k = row; k < row + each; ++k) out[k] = narrow(factor * widen(x[k]));
        }
    }
}

}  // namespace

void add_bias(const Projection& projection, std::size_t count, std::uint16_t* out) {
    if (projection.bias == nullptr) return;
    const std::size_t width = projection.weight.rows;
    for (std::size_t t = 0; t < count; ++t)
        for (std::size_t i = 0; i < width; ++i)
            out[t * width + i] = narrow(widen(out[t * width + i]) + widen(projection.bias[i]));
}

void sigmoid_product(ThreadPool& pool, const std::uint16_t* gate, std::size_t each,
                     const std::uint16_t* x, std::size_t count, std::uint16_t* out) {
    const std::size_t piece = std::max<std::size_t>(1, kPiece / each);
    if (count <= piece) return sigmoid_piece(gate, each, x, count, out);
    pool.parallel_for((count + piece - 1) / piece, [&](std::size_t index) noexcept {
        const std::size_t first = index * piece, at = first * each;
        sigmoid_piece(gate + first, each, x + at, std::min(piece, count - first), out + at);
    });
}

void silu_product(ThreadPool& pool, const std::uint16_t* gate, const std::uint16_t* up,
                  std::size_t count, std::uint16_t* out) {
    if (count <= kPiece) return silu_piece(gate, up, count, out);  // no thread need wake for it
    pool.parallel_for((count + kPiece - 1) / kPiece, [&](std::size_t index) noexcept {
        const std::size_t first = index * kPiece;
        silu_piece(gate + first, up + first, std::min(kPiece, count - first), out + first);
    });
}

void gated_mlp(ThreadPool& pool, const Kernels& kernels, const GatedMlp& mlp,
               const std::uint16_t* x, std::size_t count, std::uint16_t* out) {
    thread_local Scratch held;
    const std::size_t values = count * mlp.gate.rows;
    auto* const gate = reinterpret_cast<std::uint16_t*>(held.take(2 * values * sizeof(*out)));
    std::uint16_t* const up = gate + values;
    const auto bytes = [](auto* items) { return reinterpret_cast<std::byte*>(items); };
    const std::array<Product, 2> products{{{mlp.gate, bytes(gate)}, {mlp.up, bytes(up)}}};
    linears(pool, kernels, products, reinterpret_cast<const std::byte*>(x), Dtype::kBf16, count,
            Dtype::kBf16);
    silu_product(pool, gate, up, values, gate);
    linear(pool, kernels, mlp.down, bytes(gate), Dtype::kBf16, count, bytes(out), Dtype::kBf16);
}

}  // namespace moeinf
