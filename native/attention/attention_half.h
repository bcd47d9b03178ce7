// A decoder layer up to its experts, for one token per request: the calls of its pieces as one.
//
//   x -> norm -> inputs -> attention step -> output -> times residual, plus x  = y
//   y -> norm = z;  z -> router -> ids, weights
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
#include "kernels/router.h"

namespace moeinf {

// A linear layer on bf16 rows. The product is rounded, then the bias [rows] bf16 is added if it is
// not null, and the sum is rounded.
struct Projection {
    Matrix weight;
    const std::uint16_t* bias;
};

struct AttentionHalf {
    RowNorm norm;
    std::vector<Projection> inputs;  // of a GqaStep: q, k, v; of an MlaStep: q, latent
    std::variant<GqaStep, MlaStep> step;
    Projection output;
    float residual;  // a factor on the output
    RowNorm ffn_norm;
    std::optional<Router> router;
};

struct HalfResult {
    std::uint16_t* y;   // [R][D]
    std::uint16_t* z;   // [R][D]
    std::int64_t* ids;  // [R][K]; unused without a router, as weights
    float* weights;     // [R][K]
};

// Computes one half with x [R][D]; row r belongs to requests[r], see attention_step.h. Throws
// std::bad_alloc.
void attention_half(ThreadPool& pool, const Kernels& kernels, const AttentionHalf& half,
                    std::span<const CachedRows> requests, const std::uint16_t* x, Angles angles,
                    const HalfResult& result);

}  // namespace moeinf
