// Whole decoder layers for one token per request, where all experts that they select are in slots.
//
//   attention (attention_half.h)  x -> y; a layer without it takes x as y
//   y -> norm = z;  z -> router -> ids, weights
//   out = Σ_k weights · expert(ids)(z)  (slot_experts.h), plus mlp(z), the shared experts, times
//   sigmoid(gate · z) if there is a gate; without a router out = mlp(z)
//   y = y + residual · out
//
// The pieces round as they do alone, and so does every sum: the result has their bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "layer/attention_half.h"
#include "layer/gated_mlp.h"
#include "layer/router.h"
#include "layer/slot_experts.h"

namespace moeinf {

struct DecoderLayer {
    std::optional<AttentionHalf> attention;
    float residual;  // a factor on what is added to a row
    RowNorm ffn_norm;
    std::optional<Router> router;
    std::optional<GatedMlp> mlp;  // the shared experts, or the network of a layer without a router
    std::optional<Projection> gate;  // of the shared experts: one value per row
};

// The experts of all layers, and which layer of them this one is. Null: they are not in slots.
struct LayerSlots {
    const SlotExperts* experts;
    std::size_t layer;
};

struct LayerResult {
    std::uint16_t* y;   // [R][D]
    std::uint16_t* z;   // [R][D]
    std::int64_t* ids;  // [R][K]; unused without a router, as weights
    float* weights;     // [R][K]
};

// Computes the layer from x [R][D] and returns true; result.y is its output. Returns false if there
// is more to do than it can: then result is that of the steps up to the router. Throws
// std::bad_alloc.
bool decoder_layer(ThreadPool& pool, const Kernels& kernels, const DecoderLayer& layer,
                   LayerSlots slots, const Attended& attended, const std::uint16_t* x,
                   const LayerResult& result);

// One of several layers that follow each other. A row has a cache in each of them.
struct LayerInOrder {
    const DecoderLayer* layer;
    LayerSlots slots;
    std::span<const CachedRows> requests;
};

// Computes the layers, each from the output of the one before it, and returns how many it could
// complete. Then result is that of the last layer, or of the steps of the first that it could not
// complete. A layer's ids and weights lie [R][top_k] after those of the layer before, in
// result.ids and result.weights. Throws std::bad_alloc.
std::size_t decoder_layers(ThreadPool& pool, const Kernels& kernels,
                           std::span<const LayerInOrder> layers, std::size_t top_k,
                           const std::uint16_t* x, Angles angles, bool q8,
                           const LayerResult& result);

}  // namespace moeinf
