// Calls the pieces in order, and adds what they return.
#include "layer/decoder_layer.h"

#include <cstring>

#include "kernels/bf16.h"
#include "threads/scratch.h"

namespace moeinf {

bool decoder_layer(ThreadPool& pool, const Kernels& kernels, const DecoderLayer& layer,
                   LayerSlots slots, const Attended& attended, const std::uint16_t* x,
                   const LayerResult& result) {
    thread_local Scratch held;
    const auto bytes = [](auto* items) { return reinterpret_cast<std::byte*>(items); };
    const std::size_t count = attended.requests.size(), values = count * layer.ffn_norm.width;
    if (layer.attention)
        attention_half(pool, kernels, *layer.attention, layer.residual, attended, x, result.z,
                       result.y);
    else
        std::memcpy(result.y, x, values * sizeof *x);
    rms_norm(layer.ffn_norm, result.y, count, result.z);
    if (layer.router)
        route(pool, kernels, *layer.router, bytes(result.z), count, result.ids, result.weights);
    else if (!layer.mlp)
        return false;

    auto* const out =
        reinterpret_cast<std::uint16_t*>(held.take((2 * values + count) * sizeof(*x)));
    if (layer.router) {
        if (slots.experts == nullptr) return false;
        const LayerRouting routing{slots.layer, count, layer.router->top_k, result.ids,
                                   result.weights};
        if (count_present(*slots.experts, routing) < 0) return false;
        run_present(pool, kernels, *slots.experts, routing, bytes(result.z), bytes(out),
                    Dtype::kBf16);
    }
    if (layer.mlp) {
        std::uint16_t* const dense = layer.router ? out + values : out;
        gated_mlp(pool, kernels, *layer.mlp, result.z, count, dense);
        if (layer.gate) {
            std::uint16_t* const gates = out + 2 * values;
            linear(pool, kernels, layer.gate->weight, bytes(result.z), Dtype::kBf16, count,
                   bytes(gates), Dtype::kBf16);
            add_bias(*layer.gate, count, gates);
            sigmoid_product(pool, gates, values / count, dense, count, dense);
        }
        if (layer.router)
            for (std::size_t i = 0; i < values; ++i)
                out[i] = narrow(widen(out[i]) + widen(dense[i]));
    }
    for (std::size_t i = 0; i < values; ++i)  // a factor of 1 changes nothing
        result.y[i] =
            narrow(widen(result.y[i]) + widen(narrow(widen(out[i]) * layer.residual)));
    return true;
}

std::size_t decoder_layers(ThreadPool& pool, const Kernels& kernels,
                           std::span<const LayerInOrder> layers, std::size_t top_k,
                           const std::uint16_t* x, Angles angles, bool q8,
                           const LayerResult& result) {
    thread_local Scratch held;
    for (std::size_t n = 0; n < layers.size(); ++n) {
        const auto& [layer, slots, requests] = layers[n];
        const std::size_t bytes = requests.size() * layer->ffn_norm.width * sizeof(*x);
        const std::size_t before = n * requests.size() * top_k;
        const LayerResult mine{result.y, result.z, result.ids + before, result.weights + before};
        if (n > 0)
            x = static_cast<std::uint16_t*>(std::memcpy(held.take(bytes), result.y, bytes));
        const Attended attended{requests, angles, q8};
        if (!decoder_layer(pool, kernels, *layer, slots, attended, x, mine)) return n;
    }
    return layers.size();
}

}  // namespace moeinf
