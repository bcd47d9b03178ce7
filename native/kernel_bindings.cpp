// Binds kernels to Python: checks sizes and places, releases the GIL, calls.
// Does not know how anything works: no logic here beyond conversion.
//
// Tensors come as addresses: torch's have no buffer protocol for bf16, and a call of a decode step
// should cost a microsecond. The caller answers for what lies there (_native.pyi has the shapes).
#include "kernel_bindings.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "expert_ffn.h"
#include "quantise.h"

namespace py = pybind11;

namespace moeinf {
namespace {

constexpr std::size_t kMaxSide = std::size_t{1} << 24;

Format format_of(const std::string& name) {
    if (name == "q4") return Format::kQ4;
    if (name == "q8") return Format::kQ8;
    if (name == "bf16") return Format::kBf16;
    throw std::invalid_argument("no kernel for the format '" + name + "'");
}

Activation activation_of(const std::string& name) {
    if (name == "swiglu") return Activation::kSwiGlu;
    if (name == "clamped_swiglu") return Activation::kClampedSwiGlu;
    if (name == "relu") return Activation::kRelu;
    throw std::invalid_argument("no kernel for the activation '" + name + "'");
}

Format quantised_format(const std::string& name) {
    const Format format = format_of(name);
    if (format == Format::kBf16) throw std::invalid_argument("bf16 has no tiles");
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
        throw std::invalid_argument("weights of q4 and q8 lie at multiples of 64 bytes");
    return at(address);
}

Dtype dtype_of(bool f32) {
    return f32 ? Dtype::kF32 : Dtype::kBf16;
}

class LinearKernel {
  public:
    LinearKernel(const std::string& format, std::size_t out_features, std::size_t in_features,
                 std::uintptr_t weights)
        : matrix_{nullptr, format_of(format), out_features, in_features} {
        check_side(out_features);
        check_side(in_features);
        matrix_.data = weights_at(weights, matrix_.format);
    }

    void run(std::uintptr_t x, std::size_t rows, std::uintptr_t out, bool f32) const {
        const py::gil_scoped_release no_gil;
        linear(compute_pool(), current_kernels(), matrix_, at(x), rows, at(out), dtype_of(f32));
    }

  private:
    Matrix matrix_;
};

class ExpertKernel {
  public:
    ExpertKernel(const std::string& format, std::size_t hidden, std::size_t intermediate,
                 const std::string& activation, bool biased)
        : shape_{format_of(format), activation_of(activation), hidden, intermediate, biased} {
        check_side(hidden);
        check_side(intermediate);
    }

    std::size_t expert_bytes() const { return shape_.bytes(); }

    void run(const std::vector<std::uintptr_t>& experts, const std::vector<std::size_t>& counts,
             std::uintptr_t places, std::uintptr_t x, std::size_t tokens, std::size_t top_k,
             std::uintptr_t out, bool f32) const {
        if (experts.size() != counts.size())
            throw std::invalid_argument("as many counts as experts");
        std::vector<ExpertRows> rows;
        const auto* place = at<const std::int64_t>(places);
        for (std::size_t e = 0; e < experts.size(); ++e) {
            rows.push_back({weights_at(experts[e], shape_.format), {place, counts[e]}});
            for (std::size_t i = 0; i < counts[e]; ++i, ++place)
                if (*place < 0 || static_cast<std::size_t>(*place) >= tokens * top_k)
                    throw std::out_of_range("place " + std::to_string(*place) + " of " +
                                            std::to_string(tokens * top_k));
        }
        const py::gil_scoped_release no_gil;
        expert_ffn(compute_pool(), current_kernels(), shape_, rows, at(x), top_k, at(out),
                   dtype_of(f32));
    }

  private:
    ExpertShape shape_;
};

}  // namespace

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
    py::class_<ExpertKernel>(m, "ExpertKernel", py::is_final())
        .def(py::init<const std::string&, std::size_t, std::size_t, const std::string&, bool>(),
             py::arg("format"), py::arg("hidden"), py::arg("intermediate"),
             py::arg("activation") = "swiglu", py::arg("biased") = false)
        .def_property_readonly("expert_bytes", &ExpertKernel::expert_bytes)
        .def("run", &ExpertKernel::run, py::arg("experts"), py::arg("counts"), py::arg("places"),
             py::arg("x"), py::arg("tokens"), py::arg("top_k"), py::arg("out"), py::arg("f32"));
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
            dequantise_rows(at(blocks), quantised_format(format), count, columns, at<float>(out));
        },
        py::arg("blocks"), py::arg("format"), py::arg("count"), py::arg("columns"), py::arg("out"),
        no_gil);
    m.def("is_gated", [](const std::string& name) { return is_gated(activation_of(name)); },
          py::arg("activation"));
    m.attr("BLOCK_ROWS") = kBlockRows;
}

}  // namespace moeinf
