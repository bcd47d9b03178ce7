// The forecast of the policy `learned`: when each expert is used next, by a small trained network.
// One thread at a time; no call may race another.
//
// Inputs, per cell (layer · E + expert): decayed counts and the EAMC's shares (usage.h), recency,
// the shares of prompt, request and all tokens, and what followed similar past tokens:
//
//   bank   a ring of past tokens. A token is compared with each one by the experts in common, layer
//          by layer while it runs: overlap <- kFade · overlap + common experts of this layer
//          similarity of position n = overlap of n + kBefore · overlap of the token before n
//          kNearest positions vote with exp(kSharp · similarity). Rows behind the running layer take
//          the votes of the tokens after n, rows before it those of n itself.
//   far    once per token, the kFarNearest positions vote by the kFarTokens tokens that follow the
//          next one: what the rest of the request uses
//
// Outputs, per cell: the probabilities of a use within 1, 2, 4, 8, 16 and 32 decode tokens. `next` is
// the first. `keep` is the sum of their differences, discounted by the time until then, plus the
// score of usage.h: it ranks the cells that the network expects beyond its last span. Its weight is
// kMixture + 1 / (1 + ended requests), because the first requests have no past to judge from.
// All rows are computed again every kRefresh layers, a row that has just run at once.
//
// scripts/train_eviction.py trains the network on recorded requests. Every input is a share or a
// logarithm, so one set of weights serves models of all shapes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "policy/usage.h"

namespace moeinf {

inline constexpr std::size_t kForecastInputs = 19, kForecastHidden = 16, kForecastSpans = 6;
inline constexpr std::size_t kForecastDecays = 5;
inline constexpr std::size_t kForecastPlaces = 4096;  // tokens in the bank; a power of two

// Weights: inputs are (x - mean) · scale; hidden units are leaky rectifiers; outputs are logistic.
struct ForecastNet {
    std::vector<float> mean, scale;            // [inputs]
    std::vector<float> hidden, hidden_bias;    // [hidden, inputs], [hidden]
    std::vector<float> output, output_bias;    // [spans, hidden], [spans]
};

class Forecast {
  public:
    // usage: has kForecastDecays decays, and outlives this object.
    Forecast(std::size_t layers, std::size_t experts, std::size_t top_k, ForecastNet net,
             Usage& usage);

    void silence(std::size_t cells) {  // like Usage::silence
        if (cells != std::exchange(silent_, cells)) score(0, layers_);
    }

    // Starts a pass; rows [T] names the request of each row.
    void begin(std::span<const std::int64_t> rows, bool decoding);

    // Records the ids [T, K] of `layer`, after Usage has them. Returns true if all rows of keep and
    // next were computed again, false if only the one of `layer` was.
    bool routed(std::size_t layer, std::span<const int> ids);

    // Puts the accepted rows of the pass into the bank. An empty span accepts all.
    void end(std::span<const char> accepted);
    void end_request(std::int64_t request);

    std::span<const float> keep() const { return keep_; }
    std::span<const float> next() const { return next_; }

    // Writes the inputs [E, kForecastInputs] of one layer, for the training.
    void inputs(std::size_t layer, std::span<float> out);

  private:
    struct Request {
        std::vector<float> prompt, decoded;       // [L·E] counts
        float prompt_tokens = 0, decode_tokens = 0;
        std::vector<float> overlap;               // per place of the bank: of the running token
        std::vector<float> before;                // kBefore · overlap of the tokens before both
        std::vector<std::uint64_t> chosen;        // [L·W]: bits of the running token
        std::int64_t last = -1;                   // position of its newest token
    };

    bool held(std::int64_t position) const {
        return position >= 0 && position + static_cast<std::int64_t>(kForecastPlaces) > size_;
    }
    std::size_t place(std::int64_t position) const {
        return static_cast<std::size_t>(position) % kForecastPlaces;
    }
    void observe(Request& request, std::size_t layer);
    void vote(Request& request);
    void add_votes(std::vector<float>& votes, std::int64_t position, std::size_t first,
                   std::size_t last, float weight) const;
    void vote_far(float best, std::size_t most, std::int64_t first);
    void append(Request& request, std::span<const std::int16_t> token);
    void score(std::size_t first, std::size_t last);
    void gather(std::size_t layer);

    std::size_t layers_, experts_, top_k_, words_;
    ForecastNet net_;
    Usage& usage_;
    std::size_t silent_ = 0;
    bool decoding_ = false;
    std::size_t layer_ = 0;
    std::int64_t now_ = 0;
    float ended_ = 0;                        // requests
    float decode_tokens_ = 0;
    std::vector<float> all_;                 // [L·E] decode tokens that used the cell
    std::vector<std::int64_t> used_;         // [L·E] the last token that used it
    std::map<std::int64_t, Request> requests_;
    std::vector<std::int64_t> rows_;
    std::vector<Request*> active_;           // of the running pass
    std::vector<std::int16_t> pass_;         // [T, L, K]
    std::int64_t size_ = 0;                  // positions ever
    std::vector<std::uint64_t> bits_;        // [L, W, places]
    std::vector<std::int16_t> tokens_;       // [places, L, K]
    std::vector<std::int64_t> after_, prior_;  // [places] positions; -1: none
    std::vector<float> votes_, later_, far_;  // [L·E]
    float quality_ = 0;                      // similarity of the nearest position, 0 ... 1
    std::vector<float> similar_;
    std::vector<std::uint16_t> steps_;       // similarity below the best, in steps
    std::vector<std::pair<float, std::int32_t>> near_;  // negative: similarity, number in the bank
    std::vector<float> x_, h_, p_, keep_, next_;
};

}  // namespace moeinf
