// The decisions of the policy `eamc`: which expert is evicted and which are prefetched.
// One thread at a time.
//
// Source: MoE-Infinity, Algorithm 1 (arXiv 2401.14361 v3). P [L, E] is the prediction; its rows sum
// to 1:
//
//   eviction_   [L·E]  (P + ε)·(1 - i/L) for layer i; an encoder's rows are -1 after it has run
//   priority    [L·E]  P·(1 - (i - l)/L) for the layers i after the last routed layer l
//
// The victim is the resident cell with the smallest key. Keys within a relative kEqual of it are
// equal. Among these the victim is the cell used longest ago, then the lowest number. The largest
// priorities are prefetched, the lowest number first among equals. So the order does not depend on
// the sorting algorithm.
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

    void begin_pass(bool encoding);  // while the encoder runs, its rows have their normal keys
    void routed(std::size_t layer, IdRows chosen);
    void predict(std::span<const float> prediction);  // P [L·E], copied

    void admitted(int cell);
    void forget(int cell);
    void resize(std::size_t slots) { slots_ = slots; }
    std::optional<int> victim(const Evictable& evictable);
    std::vector<int> wishes(std::size_t most) const;

  private:
    static constexpr float kEqual = 1e-6F;

    void set_keys();

    std::size_t layers_, experts_, slots_, encoder_cells_;
    float epsilon_;
    bool encoding_ = false;
    std::ptrdiff_t layer_ = -1;  // the last layer routed in this pass
    std::int64_t time_ = 0;
    std::size_t residents_ = 0;
    std::vector<float> prediction_, eviction_;
    std::vector<char> resident_;
    std::vector<std::int64_t> last_use_;
    std::vector<int> candidates_, ties_;
};

// Writes out [L·E]: the sum of the matrices at `places` of entries [N, L·E], each row of `experts`
// numbers divided by its sum. A row that sums to 0 is uniform.
void predicted(std::span<const float> entries, std::span<const std::size_t> places,
               std::size_t experts, std::span<float> out);

}  // namespace moeinf
