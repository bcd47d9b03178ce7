// How probably the next token uses each expert: several estimates, mixed by how well they did.
// Does not know residency, slots, hints or Python. One thread at a time; no call may race another.
//
// Each estimate is a matrix q [L, E] whose rows sum to about K, the experts that a token uses:
//
//   shares_   | λ_0: [L·E] | λ_1: [L·E] | ... | past: [L·E] |      float32, J = decays + 1 matrices
//
//   decayed   one per λ: q <- λ·q + (1 - λ)·(1 where the token used the expert)
//   past      what the matched entries of the EAMC did while decoding, times K; written by whoever
//             knows the running requests
//
// score [L·E] is the mixture p = Σ_j w_j·q_j, current row by row. An online form of EM fits the
// weights w to the routing as it comes: after a layer, w moves a step towards each estimate's share
// of the probability that p gave to the experts that were really chosen. So λ is chosen by recent
// success, and so is the trust in the EAMC. Weights are kept apart by the age of the request: the
// past matters most in its first tokens.
//
// Every sum runs in one order, in float32, so that a plain transcription decides the same
// (tests/offload/policy/plain.py).
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace moeinf {

inline constexpr int kAges = 6;  // 0: the first decode token, then up to 1, 3, 7, 15, and more
inline constexpr float kOver = -1.0F;         // less than any probability
inline constexpr float kLeastWeight = 0.01F;  // no estimate is given up for good

struct UsageKnobs {
    std::vector<float> decays;  // λ per token
    double step;                // how far a token moves the weights, at least
    double prompt;              // how many decode tokens a token of a prompt counts for
};

class Usage {
  public:
    Usage(std::size_t layers, std::size_t experts, UsageKnobs knobs);

    // From now on the first `cells` score kOver, whatever their shares say: an encoder's experts once
    // it has run. True if that changed a score.
    bool silence(std::size_t cells);

    // A decode pass of requests that have had `age` decode tokens starts: the whole mixture anew.
    void begin_token(unsigned age);

    // One decode pass chose these distinct cells of `layer`. Changes the layer's row of score.
    void used(std::size_t layer, std::span<const int> cells);

    // A prefill pass of `tokens` > 0 tokens chose the experts of `layer` so often, [E]; likewise.
    void prompted(std::size_t layer, std::span<const int> counts, std::size_t tokens);

    std::span<const float> score() const { return score_; }
    std::span<float> share(std::size_t estimate) {
        return std::span(shares_).subspan(estimate * score_.size(), score_.size());
    }
    std::span<float> past() { return share(decays()); }
    std::span<const float> weights() const { return weights_[age_]; }
    std::size_t decays() const { return knobs_.decays.size(); }

  private:
    void mix(std::size_t first, std::size_t count);

    std::size_t layers_, experts_;
    UsageKnobs knobs_;
    std::vector<float> shares_, score_;
    std::array<std::vector<float>, kAges> weights_;
    std::array<std::size_t, kAges> tokens_{};
    std::size_t age_ = 0;
    std::size_t silent_ = 0;  // so many cells, the first, score kOver
};

}  // namespace moeinf
