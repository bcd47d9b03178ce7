// The decisions of the policy `adaptive`: which cells leave, stay and are read ahead.
// For one thread at a time.
//
// A cell is layer · E + expert. Its place, as the policy records it:
//
//            admitted                    more probable than the least kept one
//   absent ───────────▶ staged ─────────────────────────────▶ kept
//      ▲                  │  ▲                                  │
//      └── victim ────────┘  └──── displaced by that one ───────┤
//      └── victim, when nothing staged may go ──────────────────┘
//
// Admission: an expert that has been read is staged first. It replaces the least probable kept
// expert only if it is more probable by the factor 1 + ε. The two change places, nothing is copied,
// and the loser stays usable until its slot is needed. Victims are staged ones, the least probable
// first. So a miss that does not recur costs one read and displaces no kept expert.
//
// Prefetch: a gate's hints for a later layer, and lookahead by probability, each only while it is
// more probably right than wrong. Hints are judged by the later routing, acted upon or not, in
// classes by the probability that their expert had anyway. Hinted experts are not evicted before
// their layer has run, unless no other may leave, and are settled only then. Lookahead is judged in
// the same way, and stops while it is right less often than it claims.
//
// An encoder's experts leave first once it has run: outside a pass that encodes they score less
// than any probability.
//
// The policy `learned` is the same with other scores: a forecast (forecast.h) says which cells stay
// and how probable a use by the next token is.
//
// least_ stores the least probable kept cell of each layer. A row is searched again when its scores
// or its kept cells changed. kUnknown marks such a row, kNone one without kept cells.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "policy/forecast.h"
#include "policy/usage.h"

namespace moeinf {

inline constexpr std::array kSurprise{0.01, 0.03, 0.1, 0.3};  // borders of the classes of hints
inline constexpr double kHintMemory = 0.99;  // decay of hint success: ~100 hints

struct AdaptiveSizes {
    std::size_t layers, experts;
    std::size_t keep_at_most;    // slots except those for staging
    std::size_t encoder_layers;  // the first layers
};

struct AdaptiveKnobs {
    double hysteresis;  // ε
    double worth;       // the probability from which a hinted read pays
    float sure;         // the probability from which lookahead reads; 0.5: use is likelier
};

using Evictable = std::function<bool(int cell)>;

// Rows [T, K] of experts, row by row; negative: no expert.
struct IdRows {
    std::span<const int> ids;
    std::size_t rows;
};

struct CellWish {
    int cell;
    bool urgent;  // a gate's hint, before any lookahead
    double probability;  // of its use
};

class AdaptiveCore {
  public:
    AdaptiveCore(AdaptiveSizes sizes, AdaptiveKnobs knobs, UsageKnobs usage);

    Usage& usage() { return usage_; }

    // Scores by a trained network from now on. Each pass then begins with Forecast::begin and ends
    // with Forecast::end.
    void forecast_with(std::size_t top_k, ForecastNet net);
    Forecast* forecast() { return forecast_.get(); }
    std::size_t insertions() const { return insertions_; }

    void begin_encode();  // a source is read: the encoder's layers count
    void begin_prefill();
    void begin_decode(unsigned age);  // after usage().past() was written; see Usage::begin_token
    void routed(std::size_t layer, IdRows chosen);
    void hinted(std::size_t layer, IdRows hints);  // the surest of every row first
    void end_pass(std::span<const char> accepted = {});  // empty: all rows are

    void admitted(int cell);
    std::optional<int> victim(const Evictable& evictable);
    void resize(std::size_t keep_at_most);  // the tier has another number of slots now
    void forget(int cell);  // the cell has left, or never arrived; no effect if absent
    bool keeps(int cell);
    std::vector<CellWish> wishes(std::size_t most);

    // Share of recent hints that were right, among experts of similar probability.
    double hint_precision(float score) const;

  private:
    enum class Place : char { kAbsent, kStaged, kKept };
    static constexpr int kUnknown = -2, kNone = -1;

    struct Class {
        double right = 1, seen = 1;

        void judge(bool came) {
            right = right * kHintMemory + (came ? 1 : 0);
            seen = seen * kHintMemory + 1;
        }
        double precision() const { return right / seen; }
    };

    std::span<const float> scores() const { return forecast_ ? forecast_->keep() : usage_.score(); }
    std::span<const float> chances() const { return forecast_ ? forecast_->next() : usage_.score(); }
    float score(int cell) const { return scores()[static_cast<std::size_t>(cell)]; }
    float chance(int cell) const { return chances()[static_cast<std::size_t>(cell)]; }
    Place& place(int cell) { return place_[static_cast<std::size_t>(cell)]; }
    std::size_t layer_of(int cell) const { return static_cast<std::size_t>(cell) / experts_; }
    bool is_hinted(int cell) const { return hint_class_[static_cast<std::size_t>(cell)] >= 0; }

    void begin(bool decoding, std::size_t over);
    void stage_least_kept();
    void forget_least() { std::fill(least_.begin(), least_.end(), kUnknown); }
    bool deserves(int cell, int loser) const;
    int least_kept();
    std::optional<int> staged_victim(const Evictable& evictable);
    std::optional<int> kept_victim(const Evictable& evictable);
    void settle(int cell);
    void keep(int cell);
    void unkeep(int cell);
    void judge(std::size_t layer, std::span<const int> cells);
    void forget_hints(std::size_t layer);

    std::size_t layers_, experts_, keep_at_most_, encoder_cells_;
    AdaptiveKnobs knobs_;
    Usage usage_;
    std::unique_ptr<Forecast> forecast_;
    std::vector<Place> place_;
    std::vector<int> staged_;  // the oldest first
    std::vector<int> least_;   // [L]
    std::size_t kept_ = 0;
    std::size_t insertions_ = 0;
    bool decoding_ = false;
    std::ptrdiff_t layer_ = -1;             // the last one routed in this pass
    std::vector<std::vector<int>> hints_;   // [L]: cells, the surest first
    std::vector<signed char> hint_class_;   // [L·E]; -1: not hinted
    std::array<Class, kSurprise.size() + 1> classes_;
    std::vector<std::vector<int>> foreseen_;  // [L]: cells of lookahead, to be judged
    std::vector<char> is_foreseen_;           // [L·E]
    Class lookahead_;
    std::vector<int> scratch_, counts_;
};

}  // namespace moeinf
