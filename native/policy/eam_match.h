// Follows one request through the passes of one phase and keeps its cosine to every past request.
// Does not know where the counts come from, caches or Python. One thread at a time.
//
// The query is the request's EAM of this phase on the observed rows: layers 0 ... l of the running
// pass, each with the request's earlier passes of the phase added. N entries are compared:
//
//   counts    [L·E, stride] float32, borrowed: one routed expert is one contiguous row of N numbers
//   squares   [L, stride] float32, borrowed: each entry's squared norm over layers 0 ... l
//   dots_     [L, N] query · entry, layer by layer: grows by K rows of counts per routed layer
//   before_   [N] the sum of dots_ over the observed layers before the last
//
// So a layer costs K · N additions, whatever the size of the matrices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moeinf {

inline constexpr double kTie = 1e-6;  // cosines that differ by less are equal: rounding of float32

struct PastEams {
    const float* counts = nullptr;
    const float* squares = nullptr;
    std::size_t size = 0;    // N
    std::size_t stride = 0;  // >= N
};

class EamMatch {
  public:
    EamMatch(std::size_t layers, std::size_t experts);

    // Entries came or went: everything anew, also in the middle of a pass. `past` must stay where
    // it is until the next call.
    void rebuild(PastEams past);

    // Nothing of this pass is observed yet.
    void begin_pass();

    // `layer` of the running pass routed these experts [n], once per row that chose them; negative:
    // none. Layers ascend; one that the pass skipped counts with its history.
    void observe(std::size_t layer, std::span<const int> experts);

    // [N]: the cosine over the observed rows; 0 before anything is observed.
    void similarity(std::span<float> out) const;

    std::ptrdiff_t layer() const { return layer_; }  // the last observed one
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

// The places of the `most` most similar entries, best first; of equally similar ones that with the
// largest stamp, the newest, comes first.
std::vector<std::size_t> best_matches(std::span<const float> similarity,
                                      std::span<const std::int64_t> stamps, std::size_t most);

}  // namespace moeinf
