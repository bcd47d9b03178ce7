// Binds decode attention: takes addresses and strides, and releases the GIL while it runs.
// Addresses are integers, because torch's bfloat16 has no buffer protocol.
#include "bindings/attention.h"

#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "attention/attention_step.h"
#include "attention/decode_attention.h"
#include "attention/kv_q8.h"
#include "bindings/kernels.h"
#include "layer/decoder_layer.h"
#include "measure/ceilings.h"

namespace py = pybind11;

namespace moeinf {
namespace {

constexpr std::size_t kValuesWithGil = 1 << 16;

using Planes = std::array<std::uint64_t, 7>;  // the fields of CachedRows, in order

AttentionPath path_named(const std::string& name) {
    for (const AttentionPath path :
         {AttentionPath::kPortable, AttentionPath::kNeon, AttentionPath::kAvx2,
          AttentionPath::kAvx512, AttentionPath::kAvx512Bf16})
        if (name == name_of(path)) return path;
    throw std::invalid_argument("no attention path " + name);
}

AttentionShape checked(AttentionShape shape) {
    if (!shape.heads || !shape.kv_heads || !shape.key_width || !shape.value_width ||
        shape.heads % shape.kv_heads)
        throw std::invalid_argument("heads must be a multiple of kv_heads, widths at least 1");
    if (shape.q8 && !shape.bf16)
        throw std::invalid_argument("a cache in q8 has queries in bfloat16");
    return shape;
}

std::vector<CachedRows> to_rows(const std::vector<Planes>& requests) {
    std::vector<CachedRows> rows;
    rows.reserve(requests.size());
    for (const auto& [keys, values, key_head, key_row, value_head, value_row, count] : requests) {
        if (!count) throw std::invalid_argument("a cache without tokens");
        rows.push_back({reinterpret_cast<const void*>(keys), reinterpret_cast<const void*>(values),
                        key_head, key_row, value_head, value_row, count});
    }
    return rows;
}

const std::uint16_t* items(std::uint64_t address) {
    return reinterpret_cast<const std::uint16_t*>(address);
}

const float* floats(std::uint64_t address) {
    return reinterpret_cast<const float*>(address);
}

// Address of the weight, width, eps, and whether it is a `wide` one of RowNorm.
using Norm = std::tuple<std::uint64_t, std::size_t, float, bool>;

RowNorm to_norm(const std::optional<Norm>& norm, std::size_t width) {
    if (!norm) return {nullptr, width, 0};
    const auto& [weight, columns, eps, wide] = *norm;
    if (!weight || !columns || width % columns)
        throw std::invalid_argument("a norm's width must divide that of its rows");
    if (wide) return {nullptr, columns, eps, floats(weight)};
    return {items(weight), columns, eps};
}

Rotation rotation_named(const std::string& name) {
    if (name == "half") return Rotation::kHalf;
    if (name == "pairs") return Rotation::kPairs;
    if (name == "none") return Rotation::kNone;
    throw std::invalid_argument("no rotation '" + name + "'");
}

void check_angles(const GqaStep& step, std::size_t pairs) {
    if (step.rotation != Rotation::kNone && 2 * pairs > step.shape.key_width)
        throw std::invalid_argument("more angles than a head has columns");
}

void check_angles(const MlaStep& step, std::size_t pairs) {
    const std::size_t rope = step.shape.key_width - step.shape.value_width;
    if (rope != 0 && 2 * pairs != rope)
        throw std::invalid_argument("as many angles as pairs of columns rotate");
}

void attend(const AttentionShape& shape, std::uint64_t q, std::uint64_t out,
            const std::vector<Planes>& requests, const std::optional<std::string>& path) {
    const std::vector<CachedRows> rows = to_rows(requests);
    const AttentionPath chosen = path ? path_named(*path) : best_attention_path();
    const py::gil_scoped_release no_gil;
    decode_attention(shape, rows, reinterpret_cast<const void*>(q), reinterpret_cast<void*>(out),
                     chosen);
}

GqaStep make_gqa(std::size_t heads, std::size_t kv_heads, std::size_t width, float scale,
                 std::size_t window, const std::optional<Norm>& q_norm,
                 const std::optional<Norm>& k_norm, float clip, std::uint64_t sinks,
                 std::size_t value_width, const std::string& rotation, bool norms_last) {
    if (width % 2) throw std::invalid_argument("a head that is rotated has an even width");
    return {checked({heads, kv_heads, width, value_width ? value_width : width, scale, true,
                     window, reinterpret_cast<const float*>(sinks)}),
            to_norm(q_norm, heads * width), to_norm(k_norm, kv_heads * width), clip,
            rotation_named(rotation), norms_last};
}

MlaStep make_mla(std::size_t heads, std::size_t nope, std::size_t rope, std::size_t value,
                 std::size_t kv_lora, float scale, const Norm& norm, std::uint64_t kv_b) {
    if (rope % 2 || !value) throw std::invalid_argument("rope must be even, value at least 1");
    return {checked({heads, 1, kv_lora + rope, kv_lora, scale, true, 0}), nope, value,
            to_norm(norm, kv_lora), items(kv_b)};
}

void run_gqa(const GqaStep& step, std::uint64_t q, std::uint64_t k, std::uint64_t v,
             std::uint64_t cos, std::uint64_t sin, std::size_t pairs, std::uint64_t out,
             const std::vector<Planes>& requests, bool q8) {
    const std::vector<CachedRows> rows = to_rows(requests);
    check_angles(step, pairs);
    GqaStep here = step;
    here.shape.q8 = q8;
    const py::gil_scoped_release no_gil;
    gqa_step(here, rows, items(q), items(k), items(v), {floats(cos), floats(sin), pairs},
             const_cast<std::uint16_t*>(items(out)));
}

void run_mla(const MlaStep& step, std::uint64_t q, std::uint64_t latent, std::uint64_t cos,
             std::uint64_t sin, std::size_t pairs, std::uint64_t out,
             const std::vector<Planes>& requests, bool q8) {
    const std::vector<CachedRows> rows = to_rows(requests);
    check_angles(step, pairs);
    MlaStep here = step;
    here.shape.q8 = q8;
    const py::gil_scoped_release no_gil;
    mla_step(here, rows, items(q), items(latent), {floats(cos), floats(sin), pairs},
             const_cast<std::uint16_t*>(items(out)));
}

using Biased = std::pair<const LinearKernel*, std::uint64_t>;  // a layer, the address of its bias
using Step = std::variant<const GqaStep*, const MlaStep*>;

Projection to_projection(const Biased& linear) {
    return {linear.first->matrix(), items(linear.second)};
}

std::vector<std::size_t> input_widths(const GqaStep& step) {
    const std::size_t wide = step.shape.heads * step.shape.key_width;
    const std::size_t kv_heads = step.shape.kv_heads;
    return {wide, kv_heads * step.shape.key_width, kv_heads * step.shape.value_width};
}

std::vector<std::size_t> input_widths(const MlaStep& step) {
    const std::size_t rope = step.shape.key_width - step.shape.value_width;
    return {step.shape.heads * (step.nope + rope), step.shape.key_width};
}

std::size_t output_width(const GqaStep& step) {
    return step.shape.heads * step.shape.value_width;
}

std::size_t output_width(const MlaStep& step) {
    return step.shape.heads * step.value;
}

AttentionHalf make_half(const Norm& norm, const std::vector<Biased>& inputs, const Step& step,
                        const Biased& output,
                        const std::optional<std::pair<Norm, Biased>>& widening, bool gated) {
    const std::size_t hidden = output.first->matrix().rows;
    AttentionHalf half{to_norm(norm, hidden), {}, {}, {}, to_projection(output), gated};
    std::vector<std::size_t> widths;
    std::visit(
        [&](const auto* found) {
            half.step = *found;
            widths = input_widths(*found);
            if (half.output.weight.columns != output_width(*found)) widths.clear();
        },
        step);
    if (inputs.size() != widths.size()) throw std::invalid_argument("projections of another step");
    if (gated) {
        const auto* const gqa = std::get_if<GqaStep>(&half.step);
        if (widening || gqa == nullptr || gqa->shape.key_width != gqa->shape.value_width)
            throw std::invalid_argument("gates of another step");
        widths[0] *= 2;
    }
    if (widening) {
        const Projection up = to_projection(widening->second);
        half.widening = Widening{to_norm(widening->first, up.weight.columns), up};
        if (half.widening->norm.width != up.weight.columns || up.weight.rows != widths[0])
            throw std::invalid_argument("a bottleneck of another step");
        widths[0] = up.weight.columns;
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const Projection& input = half.inputs.emplace_back(to_projection(inputs[i]));
        if (input.weight.rows != widths[i] || input.weight.columns != hidden)
            throw std::invalid_argument("projections of another step");
    }
    if (half.norm.width != hidden) throw std::invalid_argument("a norm of another width");
    return half;
}

DecoderLayer make_layer(const AttentionHalf* attention, std::size_t width, float residual,
                        const Norm& ffn_norm, const RouterKernel* router, const MlpKernel* mlp,
                        const std::optional<Biased>& gate) {
    DecoderLayer layer{{}, residual, to_norm(ffn_norm, width), {}, {}, {}};
    if (layer.ffn_norm.width != width ||
        (router != nullptr && router->router().weight.columns != width))
        throw std::invalid_argument("norms and router of another width");
    if (attention != nullptr) layer.attention = *attention;
    if (layer.attention && layer.attention->output.weight.rows != width)
        throw std::invalid_argument("attention of another width");
    if (router != nullptr) layer.router = router->router();
    if (mlp != nullptr) layer.mlp = mlp->mlp();
    if (layer.mlp && layer.mlp->down.rows != width)
        throw std::invalid_argument("a network of another width");
    if (gate) layer.gate = to_projection(*gate);
    if (layer.gate &&
        (!layer.mlp || layer.gate->weight.rows != 1 || layer.gate->weight.columns != width))
        throw std::invalid_argument("a gate of another network");
    return layer;
}

// Layers that follow each other; Python keeps them.
struct LayerRun {
    std::vector<const DecoderLayer*> layers;
    std::vector<std::size_t> numbers;  // of a layer with experts, in its SlotKernel
    std::size_t top_k, hidden;
};

LayerRun make_run(const std::vector<const DecoderLayer*>& layers,
                  const std::vector<std::size_t>& numbers, std::size_t top_k) {
    if (layers.empty() || layers.size() != numbers.size())
        throw std::invalid_argument("a number for each of one or more layers");
    const std::size_t hidden = layers[0]->ffn_norm.width;
    for (const DecoderLayer* layer : layers)
        if (layer->ffn_norm.width != hidden || (layer->router && layer->router->top_k != top_k))
            throw std::invalid_argument("layers of another width or top_k");
    return {layers, numbers, top_k, hidden};
}

// Returns the caches of a layer; one without attention has none.
std::vector<CachedRows> rows_of(const DecoderLayer& layer, const std::vector<Planes>& requests,
                                std::size_t rows, std::size_t pairs) {
    if (requests.size() != (layer.attention ? rows : 0))
        throw std::invalid_argument("a cache for each row of a layer with attention");
    if (!layer.attention) return std::vector<CachedRows>(rows);
    std::visit([&](const auto& step) { check_angles(step, pairs); }, layer.attention->step);
    return to_rows(requests);
}

std::size_t run_layers(const LayerRun& run, std::size_t first, std::uint64_t x, std::size_t rows,
                       std::uint64_t cos, std::uint64_t sin, std::size_t pairs,
                       const std::vector<std::vector<Planes>>& requests, bool q8,
                       const std::vector<const SlotKernel*>& slots, std::uint64_t y,
                       std::uint64_t z, std::uint64_t ids, std::uint64_t weights) {
    const std::size_t count = requests.size(), all = run.layers.size();
    if (rows == 0 || count == 0 || slots.size() != count || count > all || first > all - count)
        throw std::invalid_argument("caches and slots for each layer");
    std::vector<std::vector<CachedRows>> caches;
    for (std::size_t n = 0; n < count; ++n)
        caches.push_back(rows_of(*run.layers[first + n], requests[n], rows, pairs));
    std::vector<LayerInOrder> layers;
    for (std::size_t n = 0; n < count; ++n) {
        const std::size_t number = run.numbers[first + n];
        const SlotExperts* const experts = slots[n] == nullptr ? nullptr : &slots[n]->experts();
        if (experts != nullptr && number >= experts->layers)
            throw std::out_of_range("layer " + std::to_string(number) + " of " +
                                    std::to_string(experts->layers));
        if (experts != nullptr && experts->shape.hidden != run.hidden)
            throw std::invalid_argument("experts of another width");
        layers.push_back({run.layers[first + n], {experts, number}, caches[n]});
    }
    const std::size_t before = first * rows * run.top_k;
    const py::gil_scoped_release no_gil;
    return decoder_layers(
        compute_pool(), current_kernels(), layers, run.top_k, items(x),
        {floats(cos), floats(sin), pairs}, q8,
        {const_cast<std::uint16_t*>(items(y)), const_cast<std::uint16_t*>(items(z)),
         reinterpret_cast<std::int64_t*>(ids) + before, reinterpret_cast<float*>(weights) + before});
}

// Keeps the GIL for few values: the call takes only some microseconds.
void norm_rows(const Norm& norm, std::uint64_t x, std::size_t rows, std::uint64_t out) {
    const RowNorm row_norm = to_norm(norm, std::get<1>(norm));
    std::optional<py::gil_scoped_release> no_gil;
    if (rows * row_norm.width > kValuesWithGil) no_gil.emplace();
    rms_norm(row_norm, items(x), rows, const_cast<std::uint16_t*>(items(out)));
}

}  // namespace

void bind_attention(py::module_& m) {
    m.def("attention_path", [] { return name_of(best_attention_path()); });
    m.def("_measure_products",
          [](const std::string& path) { return measure_products(path_named(path)); });
    m.def("_measure_reading",
          [](std::uint64_t data, std::size_t bytes, std::size_t threads, std::size_t ahead) {
              return measure_reading(reinterpret_cast<const std::byte*>(data), bytes, threads,
                                     ahead);
          });
    m.attr("KV_Q8_VALUES") = kQ8Values;
    m.def("kv_q8_row_bytes", &q8_row_bytes, py::arg("width"));
    m.def("attention_block_keys", &block_keys, py::arg("seen"));
    py::class_<AttentionShape>(m, "DecodeAttention", py::is_final())
        .def(py::init([](std::size_t heads, std::size_t kv_heads, std::size_t key_width,
                         std::size_t value_width, float scale, bool bf16, std::size_t window,
                         std::uint64_t sinks, bool q8) {
                 return checked({heads, kv_heads, key_width, value_width, scale, bf16, window,
                                 reinterpret_cast<const float*>(sinks), q8});
             }),
             py::arg("heads"), py::arg("kv_heads"), py::arg("key_width"), py::arg("value_width"),
             py::arg("scale"), py::kw_only(), py::arg("bf16"), py::arg("window") = 0,
             py::arg("sinks") = 0, py::arg("q8") = false)
        .def("__call__", &attend, py::arg("q"), py::arg("out"), py::arg("requests"),
             py::arg("path") = py::none());
    py::class_<GqaStep>(m, "GqaStep", py::is_final())
        .def(py::init(&make_gqa), py::arg("heads"), py::arg("kv_heads"), py::arg("width"),
             py::arg("scale"), py::arg("window"), py::arg("q_norm"), py::arg("k_norm"),
             py::arg("clip"), py::arg("sinks") = 0, py::kw_only(), py::arg("value_width") = 0,
             py::arg("rotation") = "half", py::arg("norms_last") = false)
        .def("__call__", &run_gqa, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("cos"),
             py::arg("sin"), py::arg("pairs"), py::arg("out"), py::arg("requests"),
             py::arg("q8") = false);
    py::class_<MlaStep>(m, "MlaStep", py::is_final())
        .def(py::init(&make_mla), py::arg("heads"), py::arg("nope"), py::arg("rope"),
             py::arg("value"), py::arg("kv_lora"), py::arg("scale"), py::arg("norm"),
             py::arg("kv_b"))
        .def("__call__", &run_mla, py::arg("q"), py::arg("latent"), py::arg("cos"),
             py::arg("sin"), py::arg("pairs"), py::arg("out"), py::arg("requests"),
             py::arg("q8") = false);
    py::class_<AttentionHalf>(m, "AttentionHalf", py::is_final())
        .def(py::init(&make_half), py::arg("norm"), py::arg("inputs"), py::arg("step"),
             py::arg("output"), py::kw_only(), py::arg("widening") = py::none(),
             py::arg("gated") = false);
    py::class_<DecoderLayer>(m, "DecoderLayer", py::is_final())
        .def(py::init(&make_layer), py::arg("attention"), py::arg("width"), py::arg("residual"),
             py::arg("ffn_norm"), py::arg("router"), py::arg("mlp"),
             py::arg("gate") = py::none());
    py::class_<LayerRun>(m, "LayerRun", py::is_final())
        .def(py::init(&make_run), py::arg("layers"), py::arg("numbers"), py::arg("top_k"),
             py::keep_alive<1, 2>())
        .def("__call__", &run_layers, py::arg("first"), py::arg("x"), py::arg("rows"),
             py::arg("cos"), py::arg("sin"), py::arg("pairs"), py::arg("requests"), py::arg("q8"),
             py::arg("slots"), py::arg("y"), py::arg("z"), py::arg("ids"), py::arg("weights"));
    m.def("rms_norm", &norm_rows, py::arg("norm"), py::arg("x"), py::arg("rows"), py::arg("out"));
}

}  // namespace moeinf
