// A dense network with a gate for rows of bf16: down · (silu(gate · x) · (up · x)).
//
// Each product, silu and their product are rounded to bf16, as separate operations of a tensor
// library round them. The result of a row does not depend on the other rows or the threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/expert_ffn.h"

namespace moeinf {

// A linear layer on bf16 rows. The product is rounded, then the bias [rows] bf16 is added if it is
// not null, and the sum is rounded.
struct Projection {
    Matrix weight;
    const std::uint16_t* bias;
};

// Adds the bias, if there is one, to `count` rows of a product.
void add_bias(const Projection& projection, std::size_t count, std::uint16_t* out);

struct GatedMlp {
    Matrix gate, up;  // [F, D]
    Matrix down;      // [D, F]
};

// Computes out [count][D] from x [count][D], which may not overlap. Throws std::bad_alloc.
void gated_mlp(ThreadPool& pool, const Kernels& kernels, const GatedMlp& mlp,
               const std::uint16_t* x, std::size_t count, std::uint16_t* out);

// Computes out[i] = silu(gate[i]) · up[i] for `count` values. out may be gate or up.
void silu_product(ThreadPool& pool, const std::uint16_t* gate, const std::uint16_t* up,
                  std::size_t count, std::uint16_t* out);

// Computes out[i] = sigmoid(gate[i / each]) · x[i] for `count` · each values, the sigmoid rounded.
// out may be x.
void sigmoid_product(ThreadPool& pool, const std::uint16_t* gate, std::size_t each,
                     const std::uint16_t* x, std::size_t count, std::uint16_t* out);

}  // namespace moeinf
