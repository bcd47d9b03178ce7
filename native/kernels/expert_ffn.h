// Whole products over the thread pool: a linear layer, all selected experts of a layer, their sum.
// Does not know slots, files, routing or Python.
//
// One expert is gate [F, D], up [F, D], down [D, F], one behind the other in the same format, then,
// where it has them, their biases [F], [F], [D] in bf16; without a gate (is_gated) it has neither
// the gate's matrix nor its bias. A call runs many experts, each on its own rows of x, in two rounds
// of equal pieces:
//
//   round 1   one piece = 32 columns of one expert's F:  gate and up rows, their biases, the
//             activation, and the result as one group of the row that `down` will be multiplied with
//   round 2   one piece = 64 outputs of one expert's D, written to their places in `out`
//
// Pieces share nothing but what they read, and every output is one sum in one order (kernels.h):
// the threads, and how many rows or experts travel together, never change a bit.
//
// All pointers are borrowed for the call. Weights in tiles lie at multiples of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/activations.h"
#include "kernels/kernels.h"
#include "kernels/thread_pool.h"
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
    Format format;
    Activation activation;
    std::size_t hidden;        // D
    std::size_t intermediate;  // F
    bool biased;

    std::size_t inner() const { return is_gated(activation) ? 2 : 1; }  // matrices before `down`
    std::size_t up_offset() const { return (inner() - 1) * inner_bytes(); }
    std::size_t down_offset() const { return inner() * inner_bytes(); }
    std::size_t bias_offset() const {
        return down_offset() + matrix_bytes(format, hidden, intermediate);
    }
    std::size_t bytes() const {
        return bias_offset() + (biased ? 2 * (inner() * intermediate + hidden) : 0);
    }

  private:
    std::size_t inner_bytes() const { return matrix_bytes(format, intermediate, hidden); }
};

// One expert and where its rows belong: place p is row p / top_k of x, and row p of out.
struct ExpertRows {
    const std::byte* weights;
    std::span<const std::int64_t> places;
};

// x [T, D] -> out [T · top_k, D], the rows named by places; both of `dtype`. Does not touch other
// rows of out, and reads no other row of x. Throws std::bad_alloc; the caller has checked places.
void expert_ffn(ThreadPool& pool, const Kernels& kernels, const ExpertShape& shape,
                std::span<const ExpertRows> experts, const std::byte* x, std::size_t top_k,
                std::byte* out, Dtype dtype);

// out [T, N] = x [T, K] · Wᵀ. Throws std::bad_alloc.
void linear(ThreadPool& pool, const Kernels& kernels, const Matrix& weights, const std::byte* x,
            Dtype x_dtype, std::size_t count, std::byte* out, Dtype out_dtype);

// out[t] = Σ_k weights[t, k] · rows[t, k], multiplied and added one after the other in f32, and
// rounded once: rows [T, K, D] and out [T, D] of `dtype`, weights [T, K] f32.
void combine(const std::byte* rows, const float* weights, std::size_t count, std::size_t top_k,
             std::size_t width, std::byte* out, Dtype dtype) noexcept;

// The fastest path that this processor has, unless use_kernels chose another.
const Kernels& current_kernels() noexcept;

// Chooses a path by its name, or the fastest for "". False when this processor lacks it.
bool use_kernels(std::string_view name) noexcept;

}  // namespace moeinf
