// The experts of a layer where they lie: ids and a table of slots in, the layer's output out.
//
// For the few rows of a decoded token, lists of addresses and places cost Python more time than the
// products of a small expert. So one call finds the slots, and one computes and sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/expert_ffn.h"

namespace moeinf {

struct SlotExperts {
    ExpertShape shape;
    const std::int32_t* table;  // [L · E] slot of an expert that is there, negative for others
    std::size_t layers;         // L
    std::size_t experts;        // E, of one layer
    const std::byte* slots;
    std::size_t slot_bytes;     // from one slot to the next
};

// One layer's routing: ids and weights [rows][top_k]. An id of -1 is no expert.
struct LayerRouting {
    std::size_t layer;
    std::size_t rows, top_k;
    const std::int64_t* ids;
    const float* weights;
};

// Returns the number of ids that are experts if all of them are there, and -1 if one is absent or
// not an expert of the layer.
std::ptrdiff_t count_present(const SlotExperts& experts, const LayerRouting& routing) noexcept;

// Computes out[t] = Σ_k weights[t, k] · expert(ids[t, k])(x[t]), with the bits of expert_ffn and
// combine. count_present must not have returned -1. x and out [rows][D] of `dtype`. Throws
// std::bad_alloc.
void run_present(ThreadPool& pool, const Kernels& kernels, const SlotExperts& experts,
                 const LayerRouting& routing, const std::byte* x, std::byte* out, Dtype dtype);

}  // namespace moeinf
