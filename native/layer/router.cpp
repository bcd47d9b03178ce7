// Scores and selects experts, row by row.
#include "layer/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace moeinf {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLeastSum = 1e-20f;  // added to the sum of biased routers' weights

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

// Returns the sum of the best two values, of at least two.
float best_two(std::span<const float> values) noexcept {
    float first = values[0], second = values[1];
    if (second > first) std::swap(first, second);
    for (std::size_t i = 2; i < values.size(); ++i) {
        if (values[i] > first)
            second = std::exchange(first, values[i]);
        else if (values[i] > second)
            second = values[i];
    }
    return first + second;
}

// Sets the choices outside the best groups to `dropped`.
void limit_to_groups(std::span<float> choice, const Router& router, float dropped,
                     std::span<bool> taken) noexcept {
    const std::size_t groups = router.groups, width = choice.size() / groups;
    float worth[kMaxRouterGroups];
    for (std::size_t g = 0; g < groups; ++g) {
        const std::span<const float> group = choice.subspan(g * width, width);
        worth[g] = router.bias == nullptr ? *std::max_element(group.begin(), group.end())
                                          : best_two(group);
    }
    std::fill_n(taken.begin(), groups, false);
    for (std::size_t k = 0; k < router.kept; ++k) take_best({worth, groups}, taken.first(groups));
    for (std::size_t e = 0; e < choice.size(); ++e)
        if (!taken[e / width]) choice[e] = dropped;
}

// Replaces a row of logits by its scores. doubles is scratch.
void score(const Router& router, std::span<float> row, std::span<double> doubles) noexcept {
    switch (router.scoring) {
        case Scoring::kSoftmax:
            softmax(row, doubles);
            break;
        case Scoring::kSigmoid:
            for (float& value : row)
                value = static_cast<float>(1 / (1 + std::exp(-static_cast<double>(value))));
            break;
        case Scoring::kTopSoftmax:
            for (std::size_t e = 0; e < row.size(); ++e) row[e] += router.bias[e];
    }
}

}  // namespace

void route(ThreadPool& pool, const Kernels& kernels, const Router& router, const std::byte* x,
           std::size_t count, std::int64_t* ids, float* weights) {
    const std::size_t experts = router.weight.rows, top_k = router.top_k;
    std::vector<float> all(count * experts);
    linear(pool, kernels, router.weight, x, Dtype::kBf16, count,
           reinterpret_cast<std::byte*>(all.data()), Dtype::kF32);
    const bool biased = router.bias != nullptr && router.scoring != Scoring::kTopSoftmax;
    std::vector<double> doubles(experts);
    std::vector<float> choices(biased ? experts : 0);
    const auto flags = std::make_unique<bool[]>(experts);
    const std::span<bool> taken(flags.get(), experts);
    for (std::size_t t = 0; t < count; ++t, ids += top_k, weights += top_k) {
        const std::span<float> scores(all.data() + t * experts, experts);
        score(router, scores, doubles);
        std::span<float> choice = scores;
        if (biased) {
            choice = choices;
            for (std::size_t e = 0; e < experts; ++e) choice[e] = scores[e] + router.bias[e];
        }
        if (router.groups > 1)
            limit_to_groups(choice, router, biased ? -kInfinity : 0.0f, taken);
        std::fill(taken.begin(), taken.end(), false);
        float sum = biased ? kLeastSum : 0.0f;
        for (std::size_t k = 0; k < top_k; ++k) {
            const std::size_t best = take_best(choice, taken);
            ids[k] = static_cast<std::int64_t>(best);
            sum += weights[k] = scores[best];
        }
        if (router.scoring == Scoring::kTopSoftmax) {
            softmax({weights, top_k}, doubles);
            continue;
        }
        for (std::size_t k = 0; k < top_k; ++k)
            weights[k] = (router.renormalise ? weights[k] / sum : weights[k]) * router.scale;
    }
}

}  // namespace moeinf
