// Whole products over the thread pool: a linear layer, all selected experts of a layer, their sum.
//
// One expert is gate [F, D], up [F, D] and down [D, F], one after the other. Gate and up have one
// format, down may have another. Any biases follow: [F], [F], [D] in bf16. Without a gate (is_gated)
// both the gate's matrix and its bias are absent. A call runs many experts, each on its own rows of
// x, in two rounds of pieces of equal size:
//
//   round 1   one piece = 32 columns of one expert's F:  gate and up rows, their biases, the
//             activation, and the result as one group of the row that is multiplied with `down`,
//             in the form that down's format needs
//   round 2   one piece = 64 outputs of one expert's D, written to their places in `out`
//
// Pieces share only data that they read, and every output is one sum in one order (kernels.h). So
// the threads, and the number of rows or experts in a call, do not change any bit.
//
// All pointers are borrowed for the call. Weights in tiles are aligned to 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/activations.h"
#include "kernels/kernels.h"
#include "threads/thread_pool.h"
#include "kernels/tiles.h"

namespace moeinf {

struct Matrix {
    const std::byte* data;
    Format format;
    std::size_t rows;     // outputs
    std::size_t columns;  // inputs
    const std::uint16_t* bias = nullptr;  // [rows] bf16, added to the product in f32
};

struct ExpertShape {
    Format format;  // of gate and up
    Format down;
    Activation activation;
    std::size_t hidden;        // D
    std::size_t intermediate;  // F
    bool biased;

    std::size_t inner() const { return is_gated(activation) ? 2 : 1; }  // matrices before `down`
    std::size_t up_offset() const { return (inner() - 1) * inner_bytes(); }
    std::size_t down_offset() const { return inner() * inner_bytes(); }
    std::size_t bias_offset() const {
        return down_offset() + matrix_bytes(down, hidden, intermediate);
    }
    std::size_t bytes() const {
        return bias_offset() + (biased ? 2 * (inner() * intermediate + hidden) : 0);
    }

  private:
    std::size_t inner_bytes() const { return matrix_bytes(format, intermediate, hidden); }
};

// One expert and the places of its rows: place p is row p / top_k of x, and row p of out.
struct ExpertRows {
    const std::byte* weights;
    std::span<const std::int64_t> places;
};

// Computes the rows of out [T · top_k, D] named by places from x [T, D]; both of `dtype`. Does not
// write other rows of out, nor read other rows of x. The caller checks places. Throws
// std::bad_alloc.
void expert_ffn(ThreadPool& pool, const Kernels& kernels, const ExpertShape& shape,
                std::span<const ExpertRows> experts, const std::byte* x, std::size_t top_k,
                std::byte* out, Dtype dtype);

// Computes out [T, N] = x [T, K] · Wᵀ, plus the bias if any. Throws std::bad_alloc.
void linear(ThreadPool& pool, const Kernels& kernels, const Matrix& weights, const std::byte* x,
            Dtype x_dtype, std::size_t count, std::byte* out, Dtype out_dtype);

// One of several products with the same x.
struct Product {
    Matrix weights;
    std::byte* out;  // [T, N]
};

// Computes the same as `linear` for every product, in one round. All have the same K. Throws
// std::bad_alloc.
void linears(ThreadPool& pool, const Kernels& kernels, std::span<const Product> products,
             const std::byte* x, Dtype x_dtype, std::size_t count, Dtype out_dtype);

// Computes out[t] = Σ_k weights[t, k] · rows[t, k] and rounds it once. Multiplications and
// additions are separate, in f32. rows [T, K, D] and out [T, D] of `dtype`, weights [T, K] f32.
void combine(const std::byte* rows, const float* weights, std::size_t count, std::size_t top_k,
             std::size_t width, std::byte* out, Dtype dtype) noexcept;

// Returns the path that use_kernels chose, or the fastest that this processor supports.
const Kernels& current_kernels() noexcept;

// Chooses a path by its name, or the fastest for "". Returns false if the name is unknown or this
// processor lacks the path.
bool use_kernels(std::string_view name) noexcept;

}  // namespace moeinf
