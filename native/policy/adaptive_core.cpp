// Make the decisions of the policy `adaptive`; adaptive_core.h argues them.
#include "policy/adaptive_core.h"

#include <algorithm>
#include <utility>

namespace moeinf {
namespace {

int class_of(float score) {
    const auto* border = std::upper_bound(kSurprise.begin(), kSurprise.end(), double{score});
    return static_cast<int>(border - kSurprise.begin());
}

}  // namespace

AdaptiveCore::AdaptiveCore(AdaptiveSizes sizes, AdaptiveKnobs knobs, UsageKnobs usage)
    : layers_(sizes.layers),
      experts_(sizes.experts),
      keep_at_most_(sizes.keep_at_most),
      encoder_cells_(sizes.encoder_layers * sizes.experts),
      knobs_(knobs),
      usage_(sizes.layers, sizes.experts, std::move(usage)),
      place_(layers_ * experts_, Place::kAbsent),
      least_(layers_, kNone),
      hints_(layers_),
      hint_class_(layers_ * experts_, -1),
      foreseen_(layers_),
      is_foreseen_(layers_ * experts_),
      counts_(experts_) {}

void AdaptiveCore::forecast_with(std::size_t top_k, ForecastNet net) {
    forecast_ = std::make_unique<Forecast>(layers_, experts_, top_k, std::move(net), usage_);
}

void AdaptiveCore::begin_encode() { begin(false, 0); }

void AdaptiveCore::begin_prefill() { begin(false, encoder_cells_); }

void AdaptiveCore::begin_decode(unsigned age) {
    begin(true, encoder_cells_);
    usage_.begin_token(age);
    if (!forecast_) forget_least();
}

void AdaptiveCore::routed(std::size_t layer, IdRows chosen) {
    layer_ = static_cast<std::ptrdiff_t>(layer);
    const int first = static_cast<int>(layer * experts_);
    std::vector<int>& cells = scratch_;
    cells.clear();
    std::fill(counts_.begin(), counts_.end(), 0);
    for (const int id : chosen.ids)  // one row keeps its order
        if (id >= 0 && counts_[static_cast<std::size_t>(id)]++ == 0) cells.push_back(first + id);
    if (chosen.rows > 1) std::sort(cells.begin(), cells.end());
    if (decoding_)
        usage_.used(layer, cells);
    else if (chosen.rows > 0)
        usage_.prompted(layer, counts_, chosen.rows);
    least_[layer] = kUnknown;
    if (forecast_ && forecast_->routed(layer, chosen.ids)) forget_least();
    judge(layer, cells);
    for (const int cell : cells)
        if (place(cell) == Place::kStaged) settle(cell);
}

void AdaptiveCore::hinted(std::size_t layer, IdRows hints) {
    forget_hints(layer);
    const int first = static_cast<int>(layer * experts_);
    const std::size_t width = hints.rows ? hints.ids.size() / hints.rows : 0;
    for (std::size_t rank = 0; rank < width; ++rank)
        for (std::size_t row = 0; row < hints.rows; ++row) {
            const int id = hints.ids[row * width + rank];
            if (id < 0 || is_hinted(first + id)) continue;
            hints_[layer].push_back(first + id);
            hint_class_[static_cast<std::size_t>(first + id)] =
                static_cast<signed char>(class_of(chance(first + id)));
        }
}

void AdaptiveCore::end_pass(std::span<const char> accepted) {
    if (forecast_) {
        forecast_->end(accepted);
        forget_least();
    }
    for (std::size_t layer = 0; layer < layers_; ++layer) forget_hints(layer);
}

void AdaptiveCore::admitted(int cell) {
    place(cell) = Place::kStaged;
    staged_.push_back(cell);
    if (!is_hinted(cell)) settle(cell);  // a hinted cell settles when its layer has run
}

std::optional<int> AdaptiveCore::victim(const Evictable& evictable) {
    auto found = staged_victim([&](int c) { return !is_hinted(c) && evictable(c); });
    if (!found) found = kept_victim([&](int c) { return !is_hinted(c) && evictable(c); });
    if (!found) found = kept_victim(evictable);
    if (found && place(*found) == Place::kKept) unkeep(*found);
    if (!found) {
        const auto oldest = std::find_if(staged_.begin(), staged_.end(), evictable);
        if (oldest == staged_.end()) return std::nullopt;
        found = *oldest;
    }
    if (place(*found) == Place::kStaged) std::erase(staged_, *found);
    place(*found) = Place::kAbsent;
    return found;
}

void AdaptiveCore::forget(int cell) {
    if (place(cell) == Place::kKept) unkeep(cell);
    if (place(cell) == Place::kStaged) std::erase(staged_, cell);
    place(cell) = Place::kAbsent;
}

bool AdaptiveCore::keeps(int cell) {
    return kept_ < keep_at_most_ || deserves(cell, least_kept());
}

std::vector<CellWish> AdaptiveCore::wishes(std::size_t most) {
    const auto absent = [&](int cell) {
        return place_[static_cast<std::size_t>(cell)] == Place::kAbsent;
    };
    const auto likelier = [&](const CellWish& a, const CellWish& b) {
        return chance(a.cell) > chance(b.cell);
    };
    std::vector<CellWish> found;
    const auto next = static_cast<std::size_t>(layer_ + 1);
    for (std::size_t layer = next; layer < layers_; ++layer) {
        const auto first = static_cast<std::ptrdiff_t>(found.size());
        for (const int cell : hints_[layer]) {
            const double right = hint_precision(chance(cell));
            if (absent(cell) && right >= knobs_.worth) found.push_back({cell, true, right});
        }
        std::stable_sort(found.begin() + first, found.end(), likelier);
    }
    if (found.size() >= most) {
        found.resize(most);
        return found;
    }
    // After the last layer, the next token uses all layers.
    const auto gated = static_cast<std::ptrdiff_t>(found.size());
    const std::size_t first = next == layers_ ? 0 : next * experts_;
    const auto chance = chances();
    for (std::size_t i = first; i < chance.size(); ++i) {
        const int cell = static_cast<int>(i);
        if (chance[i] < knobs_.sure || !absent(cell) || is_hinted(cell)) continue;
        found.push_back({cell, false, double{chance[i]}});
        if (!std::exchange(is_foreseen_[i], char{1})) foreseen_[i / experts_].push_back(cell);
    }
    if (lookahead_.precision() < double{knobs_.sure})
        found.erase(found.begin() + gated, found.end());
    std::stable_sort(found.begin() + gated, found.end(), likelier);
    if (found.size() > most) found.resize(most);
    return found;
}

double AdaptiveCore::hint_precision(float score) const {
    const Class& kind = classes_[static_cast<std::size_t>(class_of(score))];
    return kind.precision();
}

void AdaptiveCore::begin(bool decoding, std::size_t over) {
    decoding_ = decoding;
    layer_ = -1;
    if (usage_.silence(over)) forget_least();
    if (forecast_) forecast_->silence(over);
}

bool AdaptiveCore::deserves(int cell, int loser) const {
    return loser >= 0 && score(cell) > score(loser) * static_cast<float>(1 + knobs_.hysteresis);
}

int AdaptiveCore::least_kept() {
    int found = kNone;
    for (std::size_t layer = 0; layer < layers_; ++layer) {
        int& least = least_[layer];
        if (least == kUnknown) {
            least = kNone;
            const int first = static_cast<int>(layer * experts_);
            for (int cell = first; cell < first + static_cast<int>(experts_); ++cell)
                if (place(cell) == Place::kKept && (least < 0 || score(cell) < score(least)))
                    least = cell;
        }
        if (least >= 0 && (found < 0 || score(least) < score(found))) found = least;
    }
    return found;
}

std::optional<int> AdaptiveCore::staged_victim(const Evictable& evictable) {
    std::optional<int> found;
    for (const int cell : staged_)
        if ((!found || score(cell) < score(*found)) && evictable(cell)) found = cell;
    return found;
}

std::optional<int> AdaptiveCore::kept_victim(const Evictable& evictable) {
    const int least = least_kept();
    if (least < 0) return std::nullopt;
    if (evictable(least)) return least;
    std::vector<int>& heap = scratch_;  // the least probable on top, then the lowest number
    heap.clear();
    for (std::size_t cell = 0; cell < place_.size(); ++cell)
        if (place_[cell] == Place::kKept) heap.push_back(static_cast<int>(cell));
    const auto later = [&](int a, int b) {
        return score(a) != score(b) ? score(a) > score(b) : a > b;
    };
    std::make_heap(heap.begin(), heap.end(), later);
    while (!heap.empty()) {
        const int cell = heap.front();
        if (cell != least && evictable(cell)) return cell;
        std::pop_heap(heap.begin(), heap.end(), later);
        heap.pop_back();
    }
    return std::nullopt;
}

void AdaptiveCore::resize(std::size_t keep_at_most) {
    keep_at_most_ = keep_at_most;
    while (kept_ > keep_at_most_) stage_least_kept();
}

void AdaptiveCore::stage_least_kept() {
    const int loser = least_kept();
    unkeep(loser);
    place(loser) = Place::kStaged;
    staged_.push_back(loser);
}

void AdaptiveCore::settle(int cell) {
    if (kept_ >= keep_at_most_) {
        if (!deserves(cell, least_kept())) return;
        stage_least_kept();
    }
    std::erase(staged_, cell);
    keep(cell);
    ++insertions_;
}

void AdaptiveCore::keep(int cell) {
    place(cell) = Place::kKept;
    ++kept_;
    int& least = least_[layer_of(cell)];
    if (least == kNone) least = cell;
    if (least >= 0 && (score(cell) < score(least) || (score(cell) == score(least) && cell < least)))
        least = cell;
}

void AdaptiveCore::unkeep(int cell) {
    --kept_;
    int& least = least_[layer_of(cell)];
    if (least == cell) least = kUnknown;
}

void AdaptiveCore::judge(std::size_t layer, std::span<const int> cells) {
    const auto came = [&](int cell) {
        return std::find(cells.begin(), cells.end(), cell) != cells.end();
    };
    for (const int cell : hints_[layer]) {
        Class& kind = classes_[static_cast<std::size_t>(hint_class_[static_cast<std::size_t>(cell)])];
        kind.judge(came(cell));
    }
    forget_hints(layer);
    for (const int cell : foreseen_[layer]) {
        lookahead_.judge(came(cell));
        is_foreseen_[static_cast<std::size_t>(cell)] = 0;
    }
    foreseen_[layer].clear();
}

void AdaptiveCore::forget_hints(std::size_t layer) {
    for (const int cell : hints_[layer]) hint_class_[static_cast<std::size_t>(cell)] = -1;
    hints_[layer].clear();
}

}  // namespace moeinf
