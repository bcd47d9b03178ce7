// Which experts a token goes to, for few tokens: logits, softmax, the best K.
// Does not know what experts compute, nor Python.
//
//   logits   x · Wᵀ with bf16 weights, summed in the order of kernels.h              float32
//   scores   exp(logit − largest) ÷ Σ exp, in float64, rounded to float32
//   groups   where there are any: scores outside the `kept` groups with the best scores become 0
//            (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)
//   ids      the top_k largest scores, the largest first; of equals the lower number first
//   weights  their scores, divided by their sum where `renormalise`, times scale
//
// What a row gets does not depend on the rows beside it, nor on threads or the path. torch's
// product, which serves many rows, adds up in another order: two experts whose scores differ in
// the last bits may change places between the two.
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

// x [count, D] bf16 -> ids [count, top_k] and weights [count, top_k]. Throws std::bad_alloc. A row
// with a NaN gets NaN weights, and ids that are valid and distinct.
void route(ThreadPool& pool, const Kernels& kernels, const Router& router, const std::byte* x,
           std::size_t count, std::int64_t* ids, float* weights);

}  // namespace moeinf
