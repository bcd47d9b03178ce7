// Decides for the policy `eamc`; eamc_core.h has the formulas.
#include "policy/eamc_core.h"

#include <algorithm>
#include <cmath>

namespace moeinf {

EamcCore::EamcCore(std::size_t layers, std::size_t experts, std::size_t slots,
                   std::size_t encoder_layers, float epsilon)
    : layers_(layers),
      experts_(experts),
      slots_(slots),
      encoder_cells_(encoder_layers * experts),
      epsilon_(epsilon),
      prediction_(layers * experts, static_cast<float>(1.0 / static_cast<double>(experts))),
      eviction_(layers * experts),
      resident_(layers * experts),
      last_use_(layers * experts) {
    set_keys();
}

void EamcCore::begin_pass(bool encoding) {
    layer_ = -1;
    encoding_ = encoding;
    if (encoder_cells_ > 0) set_keys();
}

void EamcCore::routed(std::size_t layer, IdRows chosen) {
    layer_ = static_cast<std::ptrdiff_t>(layer);
    ++time_;
    for (const int id : chosen.ids)
        if (id >= 0) last_use_[layer * experts_ + static_cast<std::size_t>(id)] = time_;
}

void EamcCore::predict(std::span<const float> prediction) {
    std::copy(prediction.begin(), prediction.end(), prediction_.begin());
    set_keys();
}

void EamcCore::admitted(int cell) {
    auto& there = resident_[static_cast<std::size_t>(cell)];
    if (!there) ++residents_;
    there = 1;
}

void EamcCore::forget(int cell) {
    auto& there = resident_[static_cast<std::size_t>(cell)];
    if (there) --residents_;
    there = 0;
}

std::optional<int> EamcCore::victim(const Evictable& evictable) {
    const auto key = [&](int cell) { return eviction_[static_cast<std::size_t>(cell)]; };
    candidates_.clear();
    for (std::size_t cell = 0; cell < resident_.size(); ++cell)
        if (resident_[cell]) candidates_.push_back(static_cast<int>(cell));
    while (!candidates_.empty()) {
        float least = key(candidates_.front());
        for (const int cell : candidates_) least = std::min(least, key(cell));
        const float border = least + std::abs(least) * kEqual;
        ties_.clear();
        std::erase_if(candidates_, [&](int cell) {
            if (key(cell) > border) return false;
            ties_.push_back(cell);
            return true;
        });
        std::stable_sort(ties_.begin(), ties_.end(), [&](int a, int b) {
            return last_use_[static_cast<std::size_t>(a)] < last_use_[static_cast<std::size_t>(b)];
        });
        for (const int cell : ties_)
            if (evictable(cell)) {
                forget(cell);
                return cell;
            }
    }
    return std::nullopt;
}

std::vector<int> EamcCore::wishes(std::size_t most) const {
    const auto first = static_cast<std::size_t>(layer_ + 1);
    if (first >= layers_ || most == 0) return {};
    float least = -INFINITY;  // a full tier does not evict a likelier expert to read ahead
    if (residents_ >= slots_) {
        least = INFINITY;
        for (std::size_t cell = 0; cell < resident_.size(); ++cell)
            if (resident_[cell]) least = std::min(least, eviction_[cell]);
    }
    struct Found {
        float priority;
        int cell;
    };
    std::vector<Found> best;  // sorted, at most `most`
    const auto before = [](const Found& a, const Found& b) { return a.priority > b.priority; };
    for (std::size_t layer = first; layer < layers_; ++layer) {
        const double ahead = static_cast<double>(static_cast<std::ptrdiff_t>(layer) - layer_);
        const auto weight = static_cast<float>(1 - ahead / static_cast<double>(layers_));
        for (std::size_t cell = layer * experts_; cell < (layer + 1) * experts_; ++cell) {
            const Found found{prediction_[cell] * weight, static_cast<int>(cell)};
            if (!(found.priority > 0) || resident_[cell] || eviction_[cell] <= least) continue;
            if (best.size() == most) {
                if (!before(found, best.back())) continue;
                best.pop_back();
            }
            best.insert(std::upper_bound(best.begin(), best.end(), found, before), found);
        }
    }
    std::vector<int> cells;
    cells.reserve(best.size());
    for (const Found& found : best) cells.push_back(found.cell);
    return cells;
}

void EamcCore::set_keys() {
    for (std::size_t layer = 0; layer < layers_; ++layer) {
        const float late = 1 - static_cast<float>(layer) / static_cast<float>(layers_);
        for (std::size_t cell = layer * experts_; cell < (layer + 1) * experts_; ++cell)
            eviction_[cell] = (prediction_[cell] + epsilon_) * late;
    }
    if (!encoding_) std::fill_n(eviction_.begin(), encoder_cells_, -1.0F);
}

void predicted(std::span<const float> entries, std::span<const std::size_t> places,
               std::size_t experts, std::span<float> out) {
    std::fill(out.begin(), out.end(), 0.0F);
    for (const std::size_t place : places) {
        const float* entry = entries.data() + place * out.size();
        for (std::size_t cell = 0; cell < out.size(); ++cell) out[cell] += entry[cell];
    }
    const auto uniform = static_cast<float>(1.0 / static_cast<double>(experts));
    for (std::size_t first = 0; first < out.size(); first += experts) {
        const auto row = out.subspan(first, experts);
        float sum = 0;  // of whole numbers: exact
        for (const float count : row) sum += count;
        for (float& share : row) share = sum > 0 ? share / sum : uniform;
    }
}

}  // namespace moeinf
