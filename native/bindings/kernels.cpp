// Binds kernels to Python: checks sizes and places, releases the GIL, calls.
//
// Tensors are passed as addresses: torch has no buffer protocol for bf16, and a call of a decode
// step should cost a microsecond. The caller must pass valid addresses (shapes: _native.pyi).
#include "bindings/kernels.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/expert_ffn.h"
#include "kernels/quantise.h"

namespace py = pybind11;

namespace moeinf {
namespace {

constexpr std::size_t kMaxSide = std::size_t{1} << 24;

Format format_of(const std::string& name) {
    if (name == "q4") return Format::kQ4;
    if (name == "q8") return Format::kQ8;
    if (name == "q3") return Format::kQ3;
    if (name == "q2") return Format::kQ2;
    if (name == "mxfp4") return Format::kMxfp4;
    if (name == "q4k") return Format::kQ4k;
    if (name == "q5k") return Format::kQ5k;
    if (name == "q6k") return Format::kQ6k;
    if (name == "nvfp4") return Format::kNvfp4;
    if (name == "bf16") return Format::kBf16;
    throw std::invalid_argument("no kernel for the format '" + name + "'");
}

Activation activation_of(const std::string& name) {
    if (name == "swiglu") return Activation::kSwiGlu;
    if (name == "swiglu10") return Activation::kSwiGlu10;
    if (name == "clamped_swiglu") return Activation::kClampedSwiGlu;
    if (name == "geglu") return Activation::kGeGlu;
    if (name == "relu") return Activation::kRelu;
    if (name == "relu2") return Activation::kRelu2;
    throw std::invalid_argument("no kernel for the activation '" + name + "'");
}

Scoring scoring_of(const std::string& name) {
    if (name == "softmax") return Scoring::kSoftmax;
    if (name == "sigmoid") return Scoring::kSigmoid;
    if (name == "top_softmax") return Scoring::kTopSoftmax;
    throw std::invalid_argument("no kernel for the scores '" + name + "'");
}

Format tiled_format(const std::string& name) {
    const Format format = format_of(name);
    if (format == Format::kBf16) throw std::invalid_argument("bf16 has no tiles");
    return format;
}

Format quantised_format(const std::string& name) {
    const Format format = tiled_format(name);
    if (is_e2m1(format))
        throw std::invalid_argument(name + " is copied from a source, not quantised");
    return format;
}

Format interleaved_format(const std::string& name) {
    const Format format = format_of(name);
    if (!is_interleaved(format))
        throw std::invalid_argument(name + " is not a format of interleaved blocks");
    return format;
}

void check_side(std::size_t side) {
    if (side < 1 || side > kMaxSide) throw std::invalid_argument("sizes lie in 1 ... 2^24");
}

template <class T = std::byte>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

const std::byte* weights_at(std::uintptr_t address, Format format) {
    if (address == 0 || address % (format == Format::kBf16 ? 2 : 64) != 0)
        throw std::invalid_argument("weights in tiles lie at multiples of 64 bytes");
    return at(address);
}

Dtype dtype_of(bool f32) {
    return f32 ? Dtype::kF32 : Dtype::kBf16;
}

Router checked(const Router& router) {
    check_side(router.weight.rows);
    check_side(router.weight.columns);
    if (router.top_k < 1 || router.top_k > router.weight.rows)
        throw std::invalid_argument("a token goes to 1 ... all experts");
    if (router.groups < 1 || router.groups > kMaxRouterGroups ||
        router.weight.rows % router.groups || router.kept < 1 || router.kept > router.groups)
        throw std::invalid_argument("groups are equal, and 1 ... all of them are kept");
    if (router.bias != nullptr && router.groups > 1 && router.weight.rows < 2 * router.groups)
        throw std::invalid_argument("a group has at least two experts");
    if (router.scoring == Scoring::kTopSoftmax && (router.bias == nullptr || router.groups > 1))
        throw std::invalid_argument("top_softmax has a bias and no groups");
    return router;
}

}  // namespace

class ExpertKernel {
  public:
    ExpertKernel(const std::string& format, std::size_t hidden, std::size_t intermediate,
                 const std::string& activation, bool biased, const std::string& down)
        : shape_{format_of(format), format_of(down.empty() ? format : down),
                 activation_of(activation), hidden, intermediate, biased} {
        check_side(hidden);
        check_side(intermediate);
        if (shape_.down == shape_.format) return;
        if (shape_.down == Format::kBf16 || shape_.format == Format::kBf16)
            throw std::invalid_argument("bf16 does not mix with tiles");
        if (shape_.down_offset() % 64 != 0)
            throw std::invalid_argument("the tiles of down lie at a multiple of 64 bytes");
    }

    std::size_t expert_bytes() const { return shape_.bytes(); }
    const ExpertShape& shape() const { return shape_; }

    void run(const std::vector<std::uintptr_t>& experts,
             const std::vector<std::vector<std::int64_t>>& places, std::uintptr_t x,
             std::size_t tokens, std::size_t top_k, std::uintptr_t out, bool f32) const {
        if (experts.size() != places.size())
            throw std::invalid_argument("as many lists of places as experts");
        std::vector<ExpertRows> rows;
        for (std::size_t e = 0; e < experts.size(); ++e) {
            rows.push_back({weights_at(experts[e], shape_.format), places[e]});
            for (const std::int64_t place : places[e])
                if (place < 0 || static_cast<std::size_t>(place) >= tokens * top_k)
                    throw std::out_of_range("place " + std::to_string(place) + " of " +
                                            std::to_string(tokens * top_k));
        }
        const py::gil_scoped_release no_gil;
        expert_ffn(compute_pool(), current_kernels(), shape_, rows, at(x), top_k, at(out),
                   dtype_of(f32));
    }

  private:
    ExpertShape shape_;
};

MlpKernel::MlpKernel(const LinearKernel& gate, const LinearKernel& up, const LinearKernel& down)
    : mlp_{gate.matrix(), up.matrix(), down.matrix()} {
    if (mlp_.gate.rows != mlp_.up.rows || mlp_.gate.columns != mlp_.up.columns ||
        mlp_.down.columns != mlp_.gate.rows || mlp_.down.rows != mlp_.gate.columns)
        throw std::invalid_argument("matrices of another network");
}

void MlpKernel::run(std::uintptr_t x, std::size_t rows, std::uintptr_t out) const {
    const py::gil_scoped_release no_gil;
    gated_mlp(compute_pool(), current_kernels(), mlp_, at<const std::uint16_t>(x), rows,
              at<std::uint16_t>(out));
}

SlotKernel::SlotKernel(const ExpertKernel& kernel, std::uintptr_t table, std::size_t layers,
                       std::size_t experts, std::uintptr_t slots, std::size_t slot_bytes)
    : experts_{kernel.shape(), at<const std::int32_t>(table), layers, experts,
               weights_at(slots, kernel.shape().format), slot_bytes} {
    if (slot_bytes < kernel.expert_bytes() || slot_bytes % 64 != 0)
        throw std::invalid_argument("an expert does not fit into a slot");
}

std::ptrdiff_t SlotKernel::count(std::size_t layer, std::uintptr_t ids, std::size_t rows,
                                 std::size_t top_k) const {
    return count_present(experts_, routing(layer, rows, top_k, ids, 0));
}

void SlotKernel::run(std::size_t layer, std::uintptr_t x, std::size_t rows, std::uintptr_t ids,
                     std::uintptr_t weights, std::size_t top_k, std::uintptr_t out,
                     bool f32) const {
    const LayerRouting found = routing(layer, rows, top_k, ids, weights);
    if (count_present(experts_, found) < 0)
        throw std::out_of_range("an expert of layer " + std::to_string(layer) + " is absent");
    const py::gil_scoped_release no_gil;
    run_present(compute_pool(), current_kernels(), experts_, found, at(x), at(out), dtype_of(f32));
}

LayerRouting SlotKernel::routing(std::size_t layer, std::size_t rows, std::size_t top_k,
                                 std::uintptr_t ids, std::uintptr_t weights) const {
    if (layer >= experts_.layers)
        throw std::out_of_range("layer " + std::to_string(layer) + " of " +
                                std::to_string(experts_.layers));
    return {layer, rows, top_k, at<const std::int64_t>(ids), at<const float>(weights)};
}

LinearKernel::LinearKernel(const std::string& format, std::size_t out_features,
                           std::size_t in_features, std::uintptr_t weights)
    : matrix_{nullptr, format_of(format), out_features, in_features} {
    check_side(out_features);
    check_side(in_features);
    matrix_.data = weights_at(weights, matrix_.format);
}

void LinearKernel::run(std::uintptr_t x, std::size_t rows, std::uintptr_t out, bool f32) const {
    const py::gil_scoped_release no_gil;
    linear(compute_pool(), current_kernels(), matrix_, at(x), dtype_of(f32), rows, at(out),
           dtype_of(f32));
}

RouterKernel::RouterKernel(std::uintptr_t weight, std::size_t experts, std::size_t hidden,
                           std::size_t top_k, bool renormalise, float scale, std::size_t groups,
                           std::size_t kept, const std::string& scoring, std::uintptr_t bias)
    : router_(checked({{weights_at(weight, Format::kBf16), Format::kBf16, experts, hidden},
                       top_k, renormalise, scale, groups, kept, scoring_of(scoring),
                       at<const float>(bias)})) {}

void RouterKernel::run(std::uintptr_t x, std::size_t rows, std::uintptr_t ids,
                       std::uintptr_t weights) const {
    const py::gil_scoped_release no_gil;
    route(compute_pool(), current_kernels(), router_, at(x), rows, at<std::int64_t>(ids),
          at<float>(weights));
}

void bind_kernels(py::module_& m) {
    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    m.attr("MAX_COMPUTE_THREADS") = kMaxComputeThreads;
    m.def("compute_threads", [] { return compute_pool().threads(); });
    m.def(
        "set_compute_threads", [](int threads) { compute_pool().set_threads(threads); },
        py::arg("threads"), no_gil);
    m.def("kernel_path", [] { return std::string(current_kernels().name); });
    m.def("kernels_are_fast", [] { return current_kernels().fast; });
    m.def("_use_kernels", [](const std::string& name) { return use_kernels(name); },
          py::arg("name"));

    py::class_<LinearKernel>(m, "LinearKernel", py::is_final())
        .def(py::init<const std::string&, std::size_t, std::size_t, std::uintptr_t>(),
             py::arg("format"), py::arg("out_features"), py::arg("in_features"),
             py::arg("weights"))
        .def("run", &LinearKernel::run, py::arg("x"), py::arg("rows"), py::arg("out"),
             py::arg("f32"));
    py::class_<RouterKernel>(m, "RouterKernel", py::is_final())
        .def(py::init<std::uintptr_t, std::size_t, std::size_t, std::size_t, bool, float,
                      std::size_t, std::size_t, const std::string&, std::uintptr_t>(),
             py::arg("weight"), py::arg("experts"), py::arg("hidden"), py::arg("top_k"),
             py::arg("renormalise"), py::arg("scale"), py::arg("groups"), py::arg("kept"),
             py::arg("scoring") = "softmax", py::arg("bias") = 0)
        .def("run", &RouterKernel::run, py::arg("x"), py::arg("rows"), py::arg("ids"),
             py::arg("weights"));
    py::class_<ExpertKernel>(m, "ExpertKernel", py::is_final())
        .def(py::init<const std::string&, std::size_t, std::size_t, const std::string&, bool,
                      const std::string&>(),
             py::arg("format"), py::arg("hidden"), py::arg("intermediate"),
             py::arg("activation") = "swiglu", py::arg("biased") = false, py::arg("down") = "")
        .def_property_readonly("expert_bytes", &ExpertKernel::expert_bytes)
        .def("run", &ExpertKernel::run, py::arg("experts"), py::arg("places"), py::arg("x"),
              py::arg("tokens"), py::arg("top_k"), py::arg("out"), py::arg("f32"));
    py::class_<SlotKernel>(m, "SlotKernel", py::is_final())
        .def(py::init<const ExpertKernel&, std::uintptr_t, std::size_t, std::size_t,
                      std::uintptr_t, std::size_t>(),
             py::arg("kernel"), py::arg("table"), py::arg("layers"), py::arg("experts"),
             py::arg("slots"), py::arg("slot_bytes"))
        .def("count", &SlotKernel::count, py::arg("layer"), py::arg("ids"), py::arg("rows"),
             py::arg("top_k"))
        .def("run", &SlotKernel::run, py::arg("layer"), py::arg("x"), py::arg("rows"),
             py::arg("ids"), py::arg("weights"), py::arg("top_k"), py::arg("out"), py::arg("f32"));
    py::class_<MlpKernel>(m, "MlpKernel", py::is_final())
        .def(py::init<const LinearKernel&, const LinearKernel&, const LinearKernel&>(),
             py::arg("gate"), py::arg("up"), py::arg("down"))
        .def("run", &MlpKernel::run, py::arg("x"), py::arg("rows"), py::arg("out"));
    m.def(
        "silu_product",
        [](std::uintptr_t gate, std::uintptr_t up, std::size_t count, std::uintptr_t out) {
            silu_product(compute_pool(), at<const std::uint16_t>(gate),
                         at<const std::uint16_t>(up), count, at<std::uint16_t>(out));
        },
        py::arg("gate"), py::arg("up"), py::arg("count"), py::arg("out"), no_gil);
    m.def(
        "sigmoid_product",
        [](std::uintptr_t gate, std::size_t each, std::uintptr_t x, std::size_t count,
           std::uintptr_t out) {
            if (each == 0) throw std::invalid_argument("a gate has at least one value");
            sigmoid_product(compute_pool(), at<const std::uint16_t>(gate), each,
                            at<const std::uint16_t>(x), count, at<std::uint16_t>(out));
        },
        py::arg("gate"), py::arg("each"), py::arg("x"), py::arg("count"), py::arg("out"), no_gil);
    m.def(
        "combine_rows",
        [](std::uintptr_t rows, std::uintptr_t weights, std::size_t tokens, std::size_t top_k,
           std::size_t width, std::uintptr_t out, bool f32) {
            combine(at(rows), at<const float>(weights), tokens, top_k, width, at(out),
                    dtype_of(f32));
        },
        py::arg("rows"), py::arg("weights"), py::arg("tokens"), py::arg("top_k"), py::arg("width"),
        py::arg("out"), py::arg("f32"), no_gil);
    m.def(
        "matrix_bytes",
        [](const std::string& format, std::size_t rows, std::size_t columns) {
            check_side(rows);
            check_side(columns);
            return matrix_bytes(format_of(format), rows, columns);
        },
        py::arg("format"), py::arg("rows"), py::arg("columns"));
    m.def(
        "quantise_rows",
        [](std::uintptr_t rows, std::size_t count, std::size_t columns, bool f32,
           const std::string& format, std::uintptr_t out) {
            quantise_rows(at(rows), dtype_of(f32), count, columns, quantised_format(format),
                          at(out));
        },
        py::arg("rows"), py::arg("count"), py::arg("columns"), py::arg("f32"), py::arg("format"),
        py::arg("out"), no_gil);
    m.def(
        "dequantise_rows",
        [](std::uintptr_t blocks, const std::string& format, std::size_t count,
           std::size_t columns, std::uintptr_t out) {
            dequantise_rows(at(blocks), tiled_format(format), count, columns, at<float>(out));
        },
        py::arg("blocks"), py::arg("format"), py::arg("count"), py::arg("columns"), py::arg("out"),
        no_gil);
    m.def(
        "gather_rows",
        [](std::uintptr_t blocks, const std::string& format, std::size_t rows, std::size_t columns,
           std::uintptr_t ids, std::size_t count, std::uintptr_t out, bool f32) {
            const std::span wanted{at<const std::int64_t>(ids), count};
            for (const std::int64_t id : wanted)
                if (id < 0 || static_cast<std::size_t>(id) >= rows)
                    throw std::out_of_range("row " + std::to_string(id) + " of " +
                                            std::to_string(rows));
            gather_rows(at(blocks), tiled_format(format), columns, wanted, at(out),
                        dtype_of(f32));
        },
        py::arg("blocks"), py::arg("format"), py::arg("rows"), py::arg("columns"), py::arg("ids"),
        py::arg("count"), py::arg("out"), py::arg("f32"), no_gil);
    m.def(
        "interleave_rows",
        [](std::uintptr_t rows, std::uintptr_t factors, std::size_t count, std::size_t columns,
           const std::string& format, std::uintptr_t out) {
            interleave_rows(at(rows), at<const float>(factors), count, columns,
                            interleaved_format(format), at(out));
        },
        py::arg("rows"), py::arg("factors"), py::arg("count"), py::arg("columns"),
        py::arg("format"), py::arg("out"), no_gil);
    m.def(
        "tile_columns",
        [](const std::string& format) { return tile_columns(tiled_format(format)); },
        py::arg("format"));
    m.def("is_gated", [](const std::string& name) { return is_gated(activation_of(name)); },
          py::arg("activation"));
    m.attr("BLOCK_ROWS") = kBlockRows;
    m.attr("GROUP") = kGroup;
}

}  // namespace moeinf
