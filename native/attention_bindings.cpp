// Binds decode attention: addresses and strides in, the GIL released while it runs.
// Does not know how it works. Addresses are integers: torch's bfloat16 has no buffer protocol.
#include "attention_bindings.h"

#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode_attention.h"

namespace py = pybind11;

namespace moeinf {
namespace {

using Planes = std::array<std::uint64_t, 7>;  // CachedRows, field by field

AttentionPath path_named(const std::string& name) {
    for (const AttentionPath path : {AttentionPath::kPortable, AttentionPath::kAvx2,
                                     AttentionPath::kAvx512, AttentionPath::kAvx512Bf16})
        if (name == name_of(path)) return path;
    throw std::invalid_argument("no attention path " + name);
}

AttentionShape checked(AttentionShape shape) {
    if (!shape.heads || !shape.kv_heads || !shape.key_width || !shape.value_width ||
        shape.heads % shape.kv_heads)
        throw std::invalid_argument("heads must be a multiple of kv_heads, widths at least 1");
    return shape;
}

void attend(const AttentionShape& shape, std::uint64_t q, std::uint64_t out,
            const std::vector<Planes>& requests, const std::optional<std::string>& path) {
    std::vector<CachedRows> rows;
    rows.reserve(requests.size());
    for (const auto& [keys, values, key_head, key_row, value_head, value_row, count] : requests) {
        if (!count) throw std::invalid_argument("a cache without tokens");
        rows.push_back({reinterpret_cast<const void*>(keys), reinterpret_cast<const void*>(values),
                        key_head, key_row, value_head, value_row, count});
    }
    const AttentionPath chosen = path ? path_named(*path) : best_attention_path();
    const py::gil_scoped_release no_gil;
    decode_attention(shape, rows, reinterpret_cast<const void*>(q), reinterpret_cast<void*>(out),
                     chosen);
}

}  // namespace

void bind_attention(py::module_& m) {
    m.def("attention_path", [] { return name_of(best_attention_path()); });
    m.def("attention_block_keys", &block_keys, py::arg("seen"));
    py::class_<AttentionShape>(m, "DecodeAttention", py::is_final())
        .def(py::init([](std::size_t heads, std::size_t kv_heads, std::size_t key_width,
                         std::size_t value_width, float scale, bool bf16, std::size_t window,
                         std::uint64_t sinks) {
                 return checked({heads, kv_heads, key_width, value_width, scale, bf16, window,
                                 reinterpret_cast<const float*>(sinks)});
             }),
             py::arg("heads"), py::arg("kv_heads"), py::arg("key_width"), py::arg("value_width"),
             py::arg("scale"), py::kw_only(), py::arg("bf16"), py::arg("window") = 0,
             py::arg("sinks") = 0)
        .def("__call__", &attend, py::arg("q"), py::arg("out"), py::arg("requests"),
             py::arg("path") = py::none());
}

}  // namespace moeinf
