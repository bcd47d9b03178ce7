// Calls the pieces in order, and keeps the rows between them.
#include "attention/attention_half.h"

#include <array>

#include "kernels/bf16.h"
#include "threads/scratch.h"

namespace moeinf {
namespace {

std::byte* bytes(std::uint16_t* items) {
    return reinterpret_cast<std::byte*>(items);
}

void add_bias(const Projection& projection, std::size_t count, std::uint16_t* out) {
    if (projection.bias == nullptr) return;
    const std::size_t width = projection.weight.rows;
    for (std::size_t t = 0; t < count; ++t)
        for (std::size_t i = 0; i < width; ++i)
            out[t * width + i] = narrow(widen(out[t * width + i]) + widen(projection.bias[i]));
}

std::size_t output_width(const GqaStep& step) {
    return step.shape.heads * step.shape.value_width;
}

std::size_t output_width(const MlaStep& step) {
    return step.shape.heads * step.value;
}

// Items that grow, one area for every use.
class Rows {
  public:
    std::uint16_t* take(std::size_t items) {
        return reinterpret_cast<std::uint16_t*>(held_.take(items * sizeof(std::uint16_t)));
    }

  private:
    Scratch held_;
};

}  // namespace

void attention_half(ThreadPool& pool, const Kernels& kernels, const AttentionHalf& half,
                    std::span<const CachedRows> requests, const std::uint16_t* x, Angles angles,
                    const HalfResult& result) {
    thread_local std::array<Rows, 3> inputs;
    thread_local Rows attended;
    const std::size_t count = requests.size(), hidden = half.output.weight.rows;
    std::uint16_t *const y = result.y, *const z = result.z;

    rms_norm(half.norm, x, count, z);
    std::array<std::uint16_t*, 3> rows{};
    std::vector<Product> products;
    for (std::size_t i = 0; i < half.inputs.size(); ++i) {
        rows[i] = inputs[i].take(count * half.inputs[i].weight.rows);
        products.push_back({half.inputs[i].weight, bytes(rows[i])});
    }
    linears(pool, kernels, products, bytes(z), Dtype::kBf16, count, Dtype::kBf16);
    for (std::size_t i = 0; i < half.inputs.size(); ++i) add_bias(half.inputs[i], count, rows[i]);
    const std::size_t width = std::visit([](const auto& s) { return output_width(s); }, half.step);
    std::uint16_t* const out = attended.take(count * width);
    if (const auto* gqa = std::get_if<GqaStep>(&half.step))
        gqa_step(*gqa, requests, rows[0], rows[1], rows[2], angles, out);
    else
        mla_step(std::get<MlaStep>(half.step), requests, rows[0], rows[1], angles, out);
    linear(pool, kernels, half.output.weight, bytes(out), Dtype::kBf16, count, bytes(y),
           Dtype::kBf16);
    add_bias(half.output, count, y);

    for (std::size_t i = 0; i < count * hidden; ++i)  // a factor of 1 changes nothing
        y[i] = narrow(widen(x[i]) + widen(narrow(widen(y[i]) * half.residual)));
    rms_norm(half.ffn_norm, y, count, z);
    if (half.router)
        route(pool, kernels, *half.router, bytes(z), count, result.ids, result.weights);
}

}  // namespace moeinf
