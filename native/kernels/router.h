// Selects the experts of a token, for few tokens: logits, softmax, the best K.
//
//   logits   x · Wᵀ with bf16 weights, summed in the order of kernels.h              float32
//   scores   exp(logit − largest) ÷ Σ exp, in float64, rounded to float32
//   groups   if groups > 1: scores outside the `kept` groups with the best scores become 0
//            (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)
//   ids      the top_k largest scores, the largest first; among equals the lower number first
//   weights  their scores, divided by their sum if `renormalise`, times scale
//
// The result of a row does not depend on the other rows, the threads or the path. The product of
// torch, which is used for many rows, sums in another order. Two experts whose scores differ only
// in the last bits may have another order there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/expert_ffn.h"

namespace moeinf {

inline constexpr std::size_t kMaxRouterGroups = 256;

struct Router {
    Matrix weight;  // bf16 [E, D]
    std::size_t top_k;
    bool renormalise;
    float scale;
    std::size_t groups;  // equal ones, at most kMaxRouterGroups; 1: no groups
    std::size_t kept;    // 1 … groups
};

// Computes ids [count, top_k] and weights [count, top_k] from x [count, D] bf16. A row with a NaN
// gets NaN weights, and ids that are valid and distinct. Throws std::bad_alloc.
void route(ThreadPool& pool, const Kernels& kernels, const Router& router, const std::byte* x,
           std::size_t count, std::int64_t* ids, float* weights);

}  // namespace moeinf
