// Updates the dot products of one request with all past requests; eam_match.h draws them.
#include "policy/eam_match.h"

#include <algorithm>
#include <cmath>

namespace moeinf {
namespace {

void add(float* sum, const float* row, float times, std::size_t count) {
    for (std::size_t n = 0; n < count; ++n) sum[n] += times * row[n];
}

}  // namespace

EamMatch::EamMatch(std::size_t layers, std::size_t experts)
    : layers_(layers),
      experts_(experts),
      query_(layers * experts),
      query_squares_(layers),
      times_(experts) {}

void EamMatch::rebuild(PastEams past) {
    past_ = past;
    dots_.assign(layers_ * past.size, 0);
    for (std::size_t cell = 0; cell < query_.size(); ++cell)
        if (query_[cell] != 0)
            add(&dots_[cell / experts_ * past.size], past.counts + cell * past.stride, query_[cell],
                past.size);
    const auto observed = layer_;
    begin_pass();
    for (layer_ = observed < 0 ? -1 : 0; layer_ < observed; ++layer_)
        close(static_cast<std::size_t>(layer_));
}

void EamMatch::begin_pass() {
    layer_ = -1;
    square_before_ = 0;
    before_.assign(past_.size, 0);
}

void EamMatch::observe(std::size_t layer, std::span<const int> experts) {
    while (layer_ < static_cast<std::ptrdiff_t>(layer)) {
        if (layer_ >= 0) close(static_cast<std::size_t>(layer_));
        ++layer_;
    }
    for (const int expert : experts)
        if (expert >= 0) ++times_[static_cast<std::size_t>(expert)];
    float* dots = dots_.data() + layer * past_.size;
    for (const int expert : experts) {
        if (expert < 0) continue;
        auto& times = times_[static_cast<std::size_t>(expert)];
        if (times == 0) continue;  // a duplicate, counted at its first occurrence
        const std::size_t cell = layer * experts_ + static_cast<std::size_t>(expert);
        const auto more = static_cast<float>(times);
        add(dots, past_.counts + cell * past_.stride, more, past_.size);
        query_squares_[layer] += double{more} * (2 * double{query_[cell]} + double{more});
        query_[cell] += more;
        times = 0;
    }
}

void EamMatch::similarity(std::span<float> out) const {
    std::fill(out.begin(), out.end(), 0.0F);
    if (layer_ < 0) return;
    const auto layer = static_cast<std::size_t>(layer_);
    const float* dots = dots_.data() + layer * past_.size;
    const float* squares = past_.squares + layer * past_.stride;
    const auto square = static_cast<float>(square_before_ + query_squares_[layer]);
    for (std::size_t n = 0; n < out.size(); ++n) {
        const float product = std::sqrt(squares[n] * square);
        if (product > 0) out[n] = (before_[n] + dots[n]) / product;
    }
}

void EamMatch::close(std::size_t layer) {
    for (std::size_t n = 0; n < past_.size; ++n) before_[n] += dots_[layer * past_.size + n];
    square_before_ += query_squares_[layer];
}

std::vector<std::size_t> best_matches(std::span<const float> similarity,
                                      std::span<const std::int64_t> stamps, std::size_t most) {
    struct Entry {
        std::int64_t rounded, stamp;
        std::size_t place;
    };
    std::vector<Entry> best;  // sorted, at most `most`
    const auto before = [](const Entry& a, const Entry& b) {
        return a.rounded != b.rounded ? a.rounded > b.rounded : a.stamp > b.stamp;
    };
    for (std::size_t n = 0; n < similarity.size() && most > 0; ++n) {
        const Entry entry{std::llrint(double{similarity[n]} / kTie), stamps[n], n};
        if (best.size() == most && !before(entry, best.back())) continue;
        if (best.size() == most) best.pop_back();
        best.insert(std::upper_bound(best.begin(), best.end(), entry, before), entry);
    }
    std::vector<std::size_t> places;
    for (const Entry& entry : best) places.push_back(entry.place);
    return places;
}

}  // namespace moeinf
