// The decisions of the policy `eamc`: who leaves and what is read ahead, by Algorithm 1.
// Does not know past requests, bytes, time, threads or Python. One thread at a time.
//
// Source: MoE-Infinity (arXiv 2401.14361 v3). P [L, E] is the prediction, rows sum to 1:
//
//   eviction_   [L·E]  (P + ε)·(1 - i/L) for layer i; an encoder's rows are -1 once it has run
//   priority    [L·E]  P·(1 - (i - l)/L) for the layers i after the last routed layer l
//
// The resident cell with the smallest key leaves. Keys within kEqual of it are equal: of these the
// cell used longest ago leaves, then the one with the lowest number. The largest priorities are read
// ahead, the lowest number first among equals. So the order does not depend on a sort's algorithm.
//
// All sums and products are float32 in the order of tests/offload/policy/plain_eamc.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "policy/adaptive_core.h"  // Evictable, IdRows

namespace moeinf {

class EamcCore {
  public:
    EamcCore(std::size_t layers, std::size_t experts, std::size_t slots, std::size_t encoder_layers,
             float epsilon);

    void begin_pass(bool encoding);  // an encoder's rows count while it runs
    void routed(std::size_t layer, IdRows chosen);
    void predict(std::span<const float> prediction);  // P [L·E], copied

    void admitted(int cell);
    void forget(int cell);
    std::optional<int> victim(const Evictable& evictable);
    std::vector<int> wishes(std::size_t most) const;

  private:
    static constexpr float kEqual = 1e-6F;

    void set_keys();

    std::size_t layers_, experts_, slots_, encoder_cells_;
    float epsilon_;
    bool encoding_ = false;
    std::ptrdiff_t layer_ = -1;  // the last one routed in this pass
    std::int64_t time_ = 0;
    std::size_t residents_ = 0;
    std::vector<float> prediction_, eviction_;
    std::vector<char> resident_;
    std::vector<std::int64_t> last_use_;
    std::vector<int> candidates_, ties_;
};

// out [L·E]: the entries' matrices at `places` of entries [N, L·E], summed; then each row of
// `experts` numbers divided by its sum. A row that sums to 0 is uniform.
void predicted(std::span<const float> entries, std::span<const std::size_t> places,
               std::size_t experts, std::span<float> out);

}  // namespace moeinf
