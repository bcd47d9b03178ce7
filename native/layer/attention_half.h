// The attention of a decoder layer for one token per request: the calls of its pieces as one.
//
//   x -> norm -> inputs -> attention step -> output -> times residual, plus x  = y
//
// The pieces compute and round as they do alone: the result has their bits. Projections of the same
// row are one round of the threads. Between two rounds the threads need not sleep, which they do
// between calls from Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "attention/attention_step.h"
#include "kernels/expert_ffn.h"
#include "layer/gated_mlp.h"

namespace moeinf {

// The rest of a projection through a bottleneck: up · norm(row).
struct Widening {
    RowNorm norm;
    Projection up;
};

struct AttentionHalf {
    RowNorm norm;
    std::vector<Projection> inputs;  // of a GqaStep: q, k, v; of an MlaStep: q, latent
    std::optional<Widening> widening;  // of inputs[0], which then gives the bottleneck
    std::variant<GqaStep, MlaStep> step;
    Projection output;
    bool gated;  // inputs[0] gives [q, gate] by head; sigmoid(gate) multiplies the step's result
};

// The caches of a token per request and how its heads rotate. Row r belongs to requests[r].
struct Attended {
    std::span<const CachedRows> requests;
    Angles angles;
    bool q8;  // the form of the caches
};

// Computes y [R][D] from x [R][D], which may not overlap; normed [R][D] is scratch. Throws
// std::bad_alloc.
void attention_half(ThreadPool& pool, const Kernels& kernels, const AttentionHalf& half,
                    float residual, const Attended& attended, const std::uint16_t* x,
                    std::uint16_t* normed, std::uint16_t* y);

}  // namespace moeinf
