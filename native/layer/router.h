// Selects the experts of a token, for few tokens: logits, scores, the best K.
//
//   logits   x · Wᵀ with bf16 weights, summed in the order of kernels.h                float32
//   scores   each in float64, rounded to float32
//              kSoftmax      exp(logit − largest) ÷ Σ exp
//              kSigmoid      1 ÷ (1 + exp(−logit))
//              kTopSoftmax   logit + bias
//   choice   scores; with a bias, except for kTopSoftmax, scores + bias
//   groups   if groups > 1, experts outside the `kept` best groups are not chosen. A group's value
//            is its best score (DeepSeek-V2, arXiv 2405.04434, section 2.2.2), with a bias the sum
//            of its best two choices (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)
//   ids      the top_k largest choices, the largest first; among equals the lower number first
//   weights  their scores, divided by their sum if `renormalise`, times scale; for kTopSoftmax the
//            softmax of the K scores
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

enum class Scoring { kSoftmax, kSigmoid, kTopSoftmax };

struct Router {
    Matrix weight;  // bf16 [E, D]
    std::size_t top_k;
    bool renormalise;
    float scale;
    std::size_t groups;  // equal ones, at most kMaxRouterGroups; 1: no groups
    std::size_t kept;    // 1 … groups
    Scoring scoring = Scoring::kSoftmax;
    const float* bias = nullptr;  // [E]; may be null except for kTopSoftmax
};

// Computes ids [count, top_k] and weights [count, top_k] from x [count, D] bf16. A row with a NaN
// gets NaN weights, and ids that are valid and distinct. Throws std::bad_alloc.
void route(ThreadPool& pool, const Kernels& kernels, const Router& router, const std::byte* x,
           std::size_t count, std::int64_t* ids, float* weights);

}  // namespace moeinf
