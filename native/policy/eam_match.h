// Follows one request through the passes of one phase and keeps its cosine to every past request.
// One thread at a time.
//
// The query is the request's EAM of this phase on the observed rows: layers 0 ... l of the running
// pass. Each row includes the request's earlier passes of the phase. It is compared with N entries:
//
//   counts    [L·E, stride] float32, borrowed: one routed expert is one contiguous row of N numbers
//   squares   [L, stride] float32, borrowed: each entry's squared norm over layers 0 ... l
//   dots_     [L, N] query · entry, layer by layer: grows by K rows of counts per routed layer
//   before_   [N] the sum of dots_ over the observed layers before the last
//
// So a layer costs K · N additions for any size of the matrices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moeinf {

inline constexpr double kTie = 1e-6;  // cosines are rounded to multiples: float32 is inexact

struct PastEams {
    const float* counts = nullptr;
    const float* squares = nullptr;
    std::size_t size = 0;    // N
    std::size_t stride = 0;  // >= N
};

class EamMatch {
  public:
    EamMatch(std::size_t layers, std::size_t experts);

    // Computes all state again after entries were added or removed, also in the middle of a pass.
    // Borrows the arrays of `past` until the next call of rebuild().
    void rebuild(PastEams past);

    // Starts a pass without observed layers.
    void begin_pass();

    // Adds the experts [n] that `layer` of the running pass routed, once per row that chose them.
    // Negative ids are skipped. Layers ascend; a layer that the pass skips counts with its history.
    void observe(std::size_t layer, std::span<const int> experts);

    // Writes the cosines [N] over the observed rows; 0 before the first observed layer.
    void similarity(std::span<float> out) const;

    std::ptrdiff_t layer() const { return layer_; }  // the last observed layer; -1: none yet
    std::size_t size() const { return past_.size; }
    std::span<const float> query() const { return query_; }  // [L·E]

  private:
    void close(std::size_t layer);

    std::size_t layers_, experts_;
    PastEams past_;
    std::vector<float> query_;           // [L·E]
    std::vector<double> query_squares_;  // [L]
    std::vector<float> dots_, before_;
    double square_before_ = 0;
    std::ptrdiff_t layer_ = -1;
    std::vector<std::uint32_t> times_;  // [E], all 0 between calls
};

// Returns the places of the `most` most similar entries, best first. Among equally similar entries
// the largest stamp (the newest) comes first.
std::vector<std::size_t> best_matches(std::span<const float> similarity,
                                      std::span<const std::int64_t> stamps, std::size_t most);

}  // namespace moeinf
