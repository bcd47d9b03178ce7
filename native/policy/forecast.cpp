// Computes the forecast; forecast.h argues it.
#include "policy/forecast.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "policy/forecast_loops.h"

namespace moeinf {
namespace {

constexpr std::size_t kNearest = 48, kPrompt = 1024;
constexpr std::size_t kFarNearest = 16, kFarTokens = 8;
constexpr float kBefore = 0.5F, kSharp = 0.15F, kDiscount = 0.2F;
constexpr float kMixture = 0.5F;
constexpr std::size_t kRefreshes = 4;  // times per token that all rows are computed again
constexpr std::array<float, kForecastSpans> kWait{0, 1, 2.5F, 5, 11, 23};  // tokens until a use

}  // namespace

Forecast::Forecast(std::size_t layers, std::size_t experts, std::size_t top_k, ForecastNet net,
                   Usage& usage)
    : layers_(layers),
      experts_(experts),
      top_k_(top_k),
      words_((experts + 63) / 64),
      net_(std::move(net)),
      usage_(usage),
      all_(layers * experts),
      used_(layers * experts, -1000),
      bits_(layers * kForecastPlaces * words_),
      tokens_(kForecastPlaces * layers * top_k, -1),
      after_(kForecastPlaces, -1),
      prior_(kForecastPlaces, -1),
      votes_(layers * experts),
      later_(layers * experts),
      far_(layers * experts),
      x_(kForecastInputs * experts),
      h_(kForecastHidden * experts),
      p_(kForecastSpans * experts),
      keep_(layers * experts),
      next_(layers * experts) {}

void Forecast::begin(std::span<const std::int64_t> rows, bool decoding) {
    rows_.assign(rows.begin(), rows.end());
    decoding_ = decoding;
    layer_ = 0;
    if (decoding) {
        ++now_;
        ++decode_tokens_;
    }
    active_.clear();
    for (const std::int64_t row : rows_) {
        auto [found, fresh] = requests_.try_emplace(row);
        Request& request = found->second;
        if (std::find(active_.begin(), active_.end(), &request) != active_.end()) continue;
        if (!fresh && !decoding && request.decode_tokens > 0) request = Request();
        if (request.prompt.empty()) {
            request.prompt.assign(keep_.size(), 0);
            request.decoded.assign(keep_.size(), 0);
            request.overlap.assign(kForecastPlaces, 0);
            request.before.assign(kForecastPlaces, 0);
        }
        active_.push_back(&request);
        request.chosen.assign(layers_ * words_, 0);
        if (decoding) {
            ++request.decode_tokens;
            for (std::size_t at = 0; at < request.before.size(); ++at)
                request.before[at] =
                    held(prior_[at]) ? kBefore * request.overlap[place(prior_[at])] : 0;
            std::fill(request.overlap.begin(), request.overlap.end(), 0.0F);
        }
    }
    pass_.assign(rows_.size() * layers_ * top_k_, -1);
}

bool Forecast::routed(std::size_t layer, std::span<const int> ids) {
    layer_ = layer;
    const std::size_t width = rows_.empty() ? 0 : ids.size() / rows_.size();
    for (std::size_t row = 0; row < rows_.size(); ++row) {
        const auto found = requests_.find(rows_[row]);
        if (found == requests_.end()) continue;
        Request& request = found->second;
        if (!decoding_) ++request.prompt_tokens;
        for (std::size_t k = 0; k < std::min(width, top_k_); ++k) {
            const int id = ids[row * width + k];
            if (id < 0) continue;
            const auto expert = static_cast<std::size_t>(id);
            const std::size_t cell = layer * experts_ + expert;
            pass_[(row * layers_ + layer) * top_k_ + k] = static_cast<std::int16_t>(id);
            request.chosen[layer * words_ + expert / 64] |= std::uint64_t{1} << (expert % 64);
            ++(decoding_ ? request.decoded : request.prompt)[cell];
            if (decoding_ && used_[cell] != now_) ++all_[cell];
            used_[cell] = now_;
        }
    }
    const std::size_t every = (layers_ + kRefreshes - 1) / kRefreshes;
    const bool all = layer + 1 == layers_ || (decoding_ && (layer + 1) % every == 0);
    if (decoding_) {
        for (Request* request : active_) observe(*request, layer);
        if (all) {
            std::fill(votes_.begin(), votes_.end(), 0.0F);
            std::fill(later_.begin(), later_.end(), 0.0F);
            if (layer + 1 == layers_) std::fill(far_.begin(), far_.end(), 0.0F);
            for (Request* request : active_) vote(*request);
        }
    }
    if (!all && decoding_) {  // the votes on this row were about the token that it has just run for
        const auto row = [&](std::vector<float>& votes) {
            return votes.begin() + static_cast<std::ptrdiff_t>(layer * experts_);
        };
        std::copy_n(row(later_), experts_, row(votes_));
    }
    all ? score(0, layers_) : score(layer, layer + 1);
    return all;
}

void Forecast::end(std::span<const char> accepted) {
    const std::size_t size = layers_ * top_k_;
    const std::size_t skip = rows_.size() > kPrompt ? rows_.size() - kPrompt : 0;
    for (std::size_t row = skip; row < rows_.size(); ++row) {
        const auto found = requests_.find(rows_[row]);
        if (found == requests_.end() || (!accepted.empty() && !accepted[row])) continue;
        append(found->second, std::span(pass_).subspan(row * size, size));
    }
    if (decoding_ || active_.empty()) return;
    std::fill(votes_.begin(), votes_.end(), 0.0F);
    std::fill(later_.begin(), later_.end(), 0.0F);
    std::fill(far_.begin(), far_.end(), 0.0F);
    layer_ = layers_ - 1;
    for (auto& [name, request] : requests_) {
        if (std::find(active_.begin(), active_.end(), &request) == active_.end()) continue;
        if (!held(request.last)) continue;
        std::fill(request.overlap.begin(), request.overlap.end(), 0.0F);
        for (std::size_t i = 0; i < layers_ * words_; ++i)
            request.chosen[i] = bits_[i * kForecastPlaces + place(request.last)];
        for (std::size_t layer = 0; layer < layers_; ++layer) observe(request, layer);
        request.overlap[place(request.last)] = 0;
        vote(request);
    }
    score(0, layers_);
}

void Forecast::end_request(std::int64_t request) {
    const auto found = requests_.find(request);
    if (found == requests_.end()) return;
    std::erase(active_, &found->second);
    requests_.erase(found);
    ++ended_;
}

void Forecast::observe(Request& request, std::size_t layer) {
    const std::uint64_t* bits = bits_.data() + layer * kForecastPlaces * words_;
    const std::uint64_t* chosen = request.chosen.data() + layer * words_;
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(size_, std::ssize(after_)));
    add_overlap(bits, chosen, words_, kForecastPlaces, count, request.overlap.data());
}

void Forecast::vote(Request& request) {
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(size_, std::ssize(after_)));
    const std::int64_t first = size_ - static_cast<std::int64_t>(count);
    const bool last = layer_ + 1 == layers_;  // then a position without a token after it has no vote
    similar_.resize(count);
    steps_.resize(count);
    const float best = add_similar(request.overlap.data(), request.before.data(), after_.data(),
                                   last, count, similar_.data());
    count_steps(similar_.data(), best, count, steps_.data());
    std::array<std::uint32_t, static_cast<std::size_t>(kTooFar) + 1> counts;
    count_each(steps_, counts);
    std::size_t limit = 0;  // the least number of steps that has kNearest positions
    for (std::size_t found = counts[0]; found < kNearest && limit + 2 < counts.size();)
        found += counts[++limit];
    auto& near = near_;
    near.clear();
    for (std::size_t at = 0; at < count; ++at) {
        if (steps_[at] > limit) continue;
        const std::size_t number = (at + kForecastPlaces - place(first)) % kForecastPlaces;
        near.emplace_back(-similar_[at], -static_cast<std::int32_t>(number));
    }
    quality_ = 0;
    if (near.empty()) return;
    const std::size_t most = std::min(kNearest, near.size());
    const auto middle = near.begin() + static_cast<std::ptrdiff_t>(most);
    std::nth_element(near.begin(), middle - 1, near.end());
    std::sort(near.begin(), middle);
    const auto position = [&](std::size_t j) { return first - near[j].second; };
    float full = 0, power = 1;
    for (std::size_t layer = 0; layer < layers_; ++layer, power *= kFade) full += power;
    quality_ = best / (full * static_cast<float>(top_k_) * (1 + kBefore));
    std::vector<float> votes(votes_.size()), later(votes_.size());
    for (std::size_t part = 0; part < 2; ++part) {  // rows up to the running layer, rows after it
        const std::size_t from = part ? layer_ + 1 : 0, to = part ? layers_ : layer_ + 1;
        float voted = 0, voted_later = 0;
        for (std::size_t j = 0; j < most; ++j) {
            const float weight = exp2_of((-near[j].first - best) * kSharp * 1.442695F);
            const std::int64_t n = part ? position(j) : after_[place(position(j))];
            if (!held(n)) continue;
            voted += weight;
            add_votes(votes, n, from, to, weight);
            const std::int64_t follows = after_[place(n)];
            if (!held(follows)) continue;
            voted_later += weight;
            add_votes(later, follows, from, to, weight);
        }
        for (std::size_t c = from * experts_; c < to * experts_; ++c) {
            if (voted > 0) votes_[c] = 1 - (1 - votes_[c]) * (1 - votes[c] / voted);
            if (voted_later > 0) later_[c] = 1 - (1 - later_[c]) * (1 - later[c] / voted_later);
        }
    }
    if (last) vote_far(best, most, first);
}

void Forecast::vote_far(float best, std::size_t most, std::int64_t first) {
    std::vector<float> far(far_.size());
    float voted = 0;
    for (std::size_t j = 0; j < std::min(most, kFarNearest); ++j) {
        const float weight = exp2_of((-near_[j].first - best) * kSharp * 1.442695F);
        std::int64_t n = after_[place(first - near_[j].second)];
        for (std::size_t t = 0; t <= kFarTokens && held(n); ++t, n = after_[place(n)]) {
            if (t == 0) continue;  // the next token has the votes of its own
            voted += weight;
            add_votes(far, n, 0, layers_, weight);
        }
    }
    if (voted <= 0) return;
    for (std::size_t c = 0; c < far.size(); ++c)
        far_[c] = 1 - (1 - far_[c]) * (1 - far[c] / voted);
}

void Forecast::add_votes(std::vector<float>& votes, std::int64_t position, std::size_t first,
                         std::size_t last, float weight) const {
    const std::int16_t* token = tokens_.data() + place(position) * layers_ * top_k_;
    for (std::size_t layer = first; layer < last; ++layer)
        for (std::size_t k = 0; k < top_k_; ++k)
            if (const int id = token[layer * top_k_ + k]; id >= 0)
                votes[layer * experts_ + static_cast<std::size_t>(id)] += weight;
}

void Forecast::append(Request& request, std::span<const std::int16_t> token) {
    const std::size_t at = place(size_);
    std::copy(token.begin(), token.end(), tokens_.begin() + static_cast<std::ptrdiff_t>(at * token.size()));
    for (std::size_t layer = 0; layer < layers_; ++layer) {
        std::uint64_t* bits = bits_.data() + layer * words_ * kForecastPlaces + at;
        for (std::size_t w = 0; w < words_; ++w) bits[w * kForecastPlaces] = 0;
        for (std::size_t k = 0; k < top_k_; ++k)
            if (const int id = token[layer * top_k_ + k]; id >= 0)
                bits[static_cast<std::size_t>(id / 64) * kForecastPlaces] |= std::uint64_t{1} << (id % 64);
    }
    for (auto& [name, other] : requests_) {  // the place had another token
        if (!other.overlap.empty()) other.overlap[at] = 0;
    }
    const std::int64_t position = size_++;
    after_[at] = -1;
    prior_[at] = held(request.last) ? request.last : -1;
    if (prior_[at] >= 0) after_[place(request.last)] = position;
    request.last = position;
}

void Forecast::gather(std::size_t layer) {
    const std::size_t first = layer * experts_;
    float* x = x_.data();
    const auto share = static_cast<float>(top_k_) / static_cast<float>(experts_);
    const auto input = [&](std::size_t j) { return x + j * experts_; };
    for (std::size_t j = 0; j <= kForecastDecays; ++j)  // the last share is the EAMC's
        std::copy_n(usage_.share(j).data() + first, experts_, input(j < kForecastDecays ? j : 10));
    float* known = input(9);
    for (std::size_t e = 0; e < experts_; ++e) {
        const auto since = static_cast<float>(std::min<std::int64_t>(now_ - used_[first + e], 1000));
        input(5)[e] = count_input(since);
        input(6)[e] = since <= 1 ? 1.0F : 0.0F;
        known[e] = all_[first + e] / std::max(1.0F, decode_tokens_);
    }
    std::fill_n(input(7), 2 * experts_, 0.0F);
    float age = 0;
    for (const Request* request : active_) {
        age = std::max(age, request->decode_tokens);
        // prompt_tokens counts a token once per layer
        const float tokens = request->prompt_tokens / static_cast<float>(layers_);
        const float* prompt = request->prompt.data() + first;
        const float* decoded = request->decoded.data() + first;
        for (std::size_t e = 0; e < experts_; ++e) {
            const float before = tokens > 0 ? std::min(prompt[e] / tokens, 1.0F) : known[e];
            input(7)[e] = std::max(input(7)[e], before);
            input(8)[e] = std::max(input(8)[e], (decoded[e] + share) / (request->decode_tokens + 1));
        }
    }
    std::copy_n(votes_.data() + first, experts_, input(11));
    std::copy_n(later_.data() + first, experts_, input(12));
    std::copy_n(far_.data() + first, experts_, input(18));
    share_inputs(x, 5 * experts_);
    share_inputs(input(7), 6 * experts_);
    share_inputs(input(18), experts_);
    const auto distance = static_cast<float>(layer > layer_ ? layer - layer_ : layer + layers_ - layer_);
    const std::array<float, 5> constants{share_input(share), layer > layer_ ? 1.0F : 0.0F,
                                         count_input(age), quality_,
                                         distance / static_cast<float>(layers_)};
    for (std::size_t j = 0; j < constants.size(); ++j)
        std::fill_n(x + (13 + j) * experts_, experts_, constants[j]);
}

void Forecast::inputs(std::size_t layer, std::span<float> out) {
    gather(layer);
    for (std::size_t e = 0; e < experts_; ++e)
        for (std::size_t j = 0; j < kForecastInputs; ++j)
            out[e * kForecastInputs + j] = x_[j * experts_ + e];
}

void Forecast::score(std::size_t first, std::size_t last) {
    const float mixture = kMixture + 1 / (1 + ended_);
    for (std::size_t layer = first; layer < last; ++layer) {
        gather(layer);
        for (std::size_t j = 0; j < kForecastInputs; ++j)
            scale_row(x_.data() + j * experts_, net_.mean[j], net_.scale[j], experts_);
        affine(x_.data(), net_.hidden.data(), net_.hidden_bias, kForecastInputs, experts_, h_.data());
        rectify(h_.data(), h_.size());
        affine(h_.data(), net_.output.data(), net_.output_bias, kForecastHidden, experts_, p_.data());
        logistic(p_.data(), p_.size());
        // Times count from the start of the running token, or from its end after the last layer.
        const bool again = layer <= layer_ && layer_ + 1 < layers_;
        const float start = static_cast<float>(layer) / static_cast<float>(layers_) + (again ? 1 : 0);
        std::array<float, kForecastSpans> discount;
        for (std::size_t s = 0; s < kForecastSpans; ++s)
            discount[s] = exp2_of(-1.442695F * kDiscount * (kWait[s] + start));
        const std::size_t cell = layer * experts_;
        float *keep = keep_.data() + cell, *next = next_.data() + cell;
        std::copy_n(p_.data(), experts_, next);
        keep_row(p_.data(), discount, usage_.score().data() + cell, mixture, experts_, keep);
        if (cell >= silent_) continue;
        const std::size_t over = std::min(experts_, silent_ - cell);
        std::fill_n(keep, over, kOver);
        std::fill_n(next, over, kOver);
    }
}

}  // namespace moeinf
