// The probability that the next token uses each expert: estimates, mixed by their success.
// One thread at a time; no call may race another.
//
// Each estimate is a matrix q [L, E] whose rows sum to about K, the experts that a token uses:
//
//   shares_   | λ_0: [L·E] | λ_1: [L·E] | ... | past: [L·E] |      float32, J = decays + 1 matrices
//
//   decayed   one per λ: q <- λ·q + (1 - λ)·(1 where the token used the expert)
//   past      the decode routing of the matched EAMC entries, times K; written through past() by
//             the policy (offload/policy/adaptive.py), which has the running requests
//
// score [L·E] is the mixture p = Σ_j w_j·q_j, updated row by row. An online form of EM fits the
// weights w to the observed routing. After a layer, w moves a step towards each estimate's share of
// the probability that p gave to the experts actually chosen. So recent success sets the weight of
// each λ and of the EAMC. There is one set of weights per age of a request, because the past
// matters most in the first tokens.
//
// Every sum runs in one order, in float32, so that a plain transcription gives the same decisions
// (tests/offload/policy/plain.py).
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace moeinf {

inline constexpr int kAges = 6;  // 0: the first decode token, then up to 1, 3, 7, 15, and more
inline constexpr float kOver = -1.0F;         // less than any probability
inline constexpr float kLeastWeight = 0.01F;  // above 0, so that each estimate can recover

struct UsageKnobs {
    std::vector<float> decays;  // λ per token
    double step;                // the least step of the weights per token
    double prompt;              // the decode tokens that one prompt token counts for
};

class Usage {
  public:
    Usage(std::size_t layers, std::size_t experts, UsageKnobs knobs);

    // Sets the score of the first `cells` to kOver, whatever their shares: the experts of an
    // encoder after it has run. Returns true if the number of such cells changed.
    bool silence(std::size_t cells);

    // Starts a decode pass of requests with `age` decode tokens: computes the whole mixture again.
    void begin_token(unsigned age);

    // Records the distinct cells of `layer` that one decode pass chose. Updates its row of score.
    void used(std::size_t layer, std::span<const int> cells);

    // Records counts [E], how often a prefill pass of `tokens` > 0 tokens chose each expert of
    // `layer`. Updates its row of score.
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
    std::size_t silent_ = 0;  // the first silent_ cells score kOver
};

}  // namespace moeinf
