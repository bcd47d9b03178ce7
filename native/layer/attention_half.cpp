// Calls the pieces in order, and keeps the rows between them.
#include "layer/attention_half.h"

#include <array>
#include <cstring>

#include "kernels/bf16.h"
#include "threads/scratch.h"

namespace moeinf {
namespace {

std::byte* bytes(std::uint16_t* items) {
    return reinterpret_cast<std::byte*>(items);
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

// Divides rows of [q, gate] by head, `width` columns each, into queries and gates.
void split_gates(const std::uint16_t* both, std::size_t heads, std::size_t width,
                 std::uint16_t* queries, std::uint16_t* gates) {
    for (std::size_t h = 0; h < heads; ++h) {
        std::memcpy(queries + h * width, both + 2 * h * width, width * sizeof *both);
        std::memcpy(gates + h * width, both + (2 * h + 1) * width, width * sizeof *both);
    }
}

}  // namespace

void attention_half(ThreadPool& pool, const Kernels& kernels, const AttentionHalf& half,
                    float residual, const Attended& attended, const std::uint16_t* x,
                    std::uint16_t* normed, std::uint16_t* y) {
    thread_local std::array<Rows, 3> inputs;
    thread_local Rows results, narrowed, widened, queries;
    const auto& [requests, angles, q8] = attended;
    const std::size_t count = requests.size(), hidden = half.output.weight.rows;

    rms_norm(half.norm, x, count, normed);
    std::array<std::uint16_t*, 3> rows{};
    std::vector<Product> products;
    for (std::size_t i = 0; i < half.inputs.size(); ++i) {
        rows[i] = inputs[i].take(count * half.inputs[i].weight.rows);
        products.push_back({half.inputs[i].weight, bytes(rows[i])});
    }
    linears(pool, kernels, products, bytes(normed), Dtype::kBf16, count, Dtype::kBf16);
    for (std::size_t i = 0; i < half.inputs.size(); ++i) add_bias(half.inputs[i], count, rows[i]);
    if (half.widening) {
        const auto& [norm, up] = *half.widening;
        std::uint16_t* const narrow_rows = narrowed.take(count * norm.width);
        rms_norm(norm, rows[0], count, narrow_rows);
        rows[0] = widened.take(count * up.weight.rows);
        linear(pool, kernels, up.weight, bytes(narrow_rows), Dtype::kBf16, count, bytes(rows[0]),
               Dtype::kBf16);
        add_bias(up, count, rows[0]);
    }
    const std::size_t width = std::visit([](const auto& s) { return output_width(s); }, half.step);
    std::uint16_t *const out = results.take(count * width), *gates = nullptr;
    if (half.gated) {
        const AttentionShape& shape = std::get<GqaStep>(half.step).shape;
        std::uint16_t* const both = rows[0];
        rows[0] = queries.take(2 * count * width);
        gates = rows[0] + count * width;
        split_gates(both, count * shape.heads, shape.key_width, rows[0], gates);
    }
    if (const auto* found = std::get_if<GqaStep>(&half.step)) {
        GqaStep step = *found;
        step.shape.q8 = q8;
        gqa_step(step, requests, rows[0], rows[1], rows[2], angles, out);
    } else {
        MlaStep step = std::get<MlaStep>(half.step);
        step.shape.q8 = q8;
        mla_step(step, requests, rows[0], rows[1], angles, out);
    }
    if (half.gated) sigmoid_product(pool, gates, 1, out, count * width, out);
    linear(pool, kernels, half.output.weight, bytes(out), Dtype::kBf16, count, bytes(y),
           Dtype::kBf16);
    add_bias(half.output, count, y);

    for (std::size_t i = 0; i < count * hidden; ++i)  // a factor of 1 changes nothing
        y[i] = narrow(widen(x[i]) + widen(narrow(widen(y[i]) * residual)));
}

}  // namespace moeinf
