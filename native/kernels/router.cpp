// Scores and selects experts, row by row.
#include "kernels/router.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <vector>

namespace moeinf {
namespace {

// Replaces a row of logits by its softmax. exps is scratch.
void softmax(std::span<float> row, std::span<double> exps) noexcept {
    const double largest = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (std::size_t e = 0; e < row.size(); ++e) sum += exps[e] = std::exp(row[e] - largest);
    for (std::size_t e = 0; e < row.size(); ++e) row[e] = static_cast<float>(exps[e] / sum);
}

// Marks the largest value that is not `taken`, and returns its index; the first of equals. NaN is
// never larger.
std::size_t take_best(std::span<const float> values, std::span<bool> taken) noexcept {
    std::size_t best = 0;
    while (taken[best]) ++best;
    for (std::size_t i = best + 1; i < values.size(); ++i)
        if (!taken[i] && values[i] > values[best]) best = i;
    taken[best] = true;
    return best;
}

void limit_to_groups(std::span<float> scores, std::size_t groups, std::size_t kept,
                     std::span<bool> taken) noexcept {
    const std::size_t width = scores.size() / groups;
    float best[kMaxRouterGroups];
    for (std::size_t g = 0; g < groups; ++g)
        best[g] = *std::max_element(scores.begin() + g * width, scores.begin() + (g + 1) * width);
    std::fill_n(taken.begin(), groups, false);
    for (std::size_t k = 0; k < kept; ++k) take_best({best, groups}, taken.first(groups));
    for (std::size_t e = 0; e < scores.size(); ++e)
        if (!taken[e / width]) scores[e] = 0;
}

}  // namespace

void route(ThreadPool& pool, const Kernels& kernels, const Router& router, const std::byte* x,
           std::size_t count, std::int64_t* ids, float* weights) {
    const std::size_t experts = router.weight.rows, top_k = router.top_k;
    std::vector<float> all(count * experts);
    linear(pool, kernels, router.weight, x, Dtype::kBf16, count,
           reinterpret_cast<std::byte*>(all.data()), Dtype::kF32);
    std::vector<double> exps(experts);
    const auto flags = std::make_unique<bool[]>(experts);
    const std::span<bool> taken(flags.get(), experts);
    for (std::size_t t = 0; t < count; ++t, ids += top_k, weights += top_k) {
        const std::span<float> scores(all.data() + t * experts, experts);
        softmax(scores, exps);
        if (router.groups > 1) limit_to_groups(scores, router.groups, router.kept, taken);
        std::fill(taken.begin(), taken.end(), false);
        float sum = 0;
        for (std::size_t k = 0; k < top_k; ++k) {
            const std::size_t best = take_best(scores, taken);
            ids[k] = static_cast<std::int64_t>(best);
            sum += weights[k] = scores[best];
        }
        for (std::size_t k = 0; k < top_k; ++k)
            weights[k] = (router.renormalise ? weights[k] / sum : weights[k]) * router.scale;
    }
}

}  // namespace moeinf
