// Updates the estimates and their mixture; usage.h has the formulas.
#include "policy/usage.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace moeinf {

Usage::Usage(std::size_t layers, std::size_t experts, UsageKnobs knobs)
    : layers_(layers),
      experts_(experts),
      knobs_(std::move(knobs)),
      shares_((decays() + 1) * layers * experts),
      score_(layers * experts) {
    for (auto& weights : weights_)
        weights.assign(decays() + 1, 1.0F / static_cast<float>(decays() + 1));
}

bool Usage::silence(std::size_t cells) {
    const std::size_t changed = std::max(cells, silent_);
    if (cells == std::exchange(silent_, cells)) return false;
    mix(0, changed);
    return true;
}

void Usage::begin_token(unsigned age) {
    age_ = std::min<std::size_t>(std::bit_width(age), kAges - 1);
    ++tokens_[age_];
    mix(0, score_.size());
}

void Usage::used(std::size_t layer, std::span<const int> cells) {
    if (cells.empty()) return;
    std::vector<float>& weights = weights_[age_];
    std::vector<float> posterior(weights.size(), 0.0F), found(weights.size());
    int known = 0;
    for (const int cell : cells) {
        float total = 0;
        for (std::size_t j = 0; j < weights.size(); ++j)
            total += found[j] = weights[j] * share(j)[static_cast<std::size_t>(cell)];
        if (total <= 0) continue;  // no estimate expected it, so it favours no estimate
        ++known;
        for (std::size_t j = 0; j < weights.size(); ++j) posterior[j] += found[j] / total;
    }
    if (known > 0) {
        const double least = 1.0 / static_cast<double>(1 + tokens_[age_]);
        const auto step =
            static_cast<float>(std::max(knobs_.step, least) / static_cast<double>(layers_));
        for (std::size_t j = 0; j < weights.size(); ++j) {
            const float mean = posterior[j] / static_cast<float>(known);
            weights[j] = std::max(weights[j] + step * (mean - weights[j]), kLeastWeight);
        }
    }
    const std::size_t first = layer * experts_;
    for (std::size_t j = 0; j < decays(); ++j) {
        const float decay = knobs_.decays[j];
        for (float& value : share(j).subspan(first, experts_)) value *= decay;
        for (const int cell : cells) share(j)[static_cast<std::size_t>(cell)] += 1 - decay;
    }
    mix(first, experts_);
}

void Usage::prompted(std::size_t layer, std::span<const int> counts, std::size_t tokens) {
    const std::size_t first = layer * experts_;
    for (std::size_t j = 0; j < decays(); ++j) {
        const double span = static_cast<double>(tokens) * knobs_.prompt;
        const auto kept = static_cast<float>(std::pow(double{knobs_.decays[j]}, span));
        const auto row = share(j).subspan(first, experts_);
        for (std::size_t e = 0; e < experts_; ++e) {
            const float used = static_cast<float>(counts[e]) / static_cast<float>(tokens);
            row[e] = row[e] * kept + (1 - kept) * used;
        }
    }
    mix(first, experts_);
}

void Usage::mix(std::size_t first, std::size_t count) {
    float* score = score_.data() + first;
    const std::vector<float>& weights = weights_[age_];
    for (std::size_t j = 0; j < weights.size(); ++j) {
        const float weight = weights[j];
        const float* share = shares_.data() + j * score_.size() + first;
        if (j == 0)
            for (std::size_t i = 0; i < count; ++i) score[i] = weight * share[i];
        else
            for (std::size_t i = 0; i < count; ++i) score[i] += weight * share[i];
    }
    if (first < silent_) std::fill_n(score, std::min(count, silent_ - first), kOver);
}

}  // namespace moeinf
