// Bind the cores of cache policies to Python: check sizes and ids, convert, call.
//
// The GIL is kept: a call takes a microsecond or two, and may ask Python which cell can leave.
#include "bindings/policy.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "policy/adaptive_core.h"
#include "policy/eam_match.h"
#include "policy/eamc_core.h"

namespace py = pybind11;

namespace moeinf {
namespace {

constexpr std::size_t kMaxCells = std::size_t{1} << 24;

void check_shape(std::size_t layers, std::size_t experts) {
    if (layers < 1 || experts < 1 || layers > kMaxCells / experts)
        throw std::invalid_argument("layers · experts lies in 1 ... 2^24");
}

void check_layer(std::size_t layer, std::size_t layers) {
    if (layer >= layers) throw std::out_of_range("layer " + std::to_string(layer));
}

void check_cell(int cell, std::size_t cells) {
    if (cell < 0 || static_cast<std::size_t>(cell) >= cells)
        throw std::out_of_range("cell " + std::to_string(cell));
}

template <class T>
void copy_ids(const py::array& array, std::size_t experts, std::vector<int>& out) {
    const auto rows = array.shape(0), width = array.shape(1);
    const char* base = static_cast<const char*>(array.data());
    for (py::ssize_t row = 0; row < rows; ++row)
        for (py::ssize_t k = 0; k < width; ++k) {
            const T id = *reinterpret_cast<const T*>(base + row * array.strides(0) +
                                                     k * array.strides(1));
            if (id >= 0 && static_cast<std::size_t>(id) >= experts)
                throw std::out_of_range("expert " + std::to_string(id));
            out.push_back(id < 0 ? -1 : static_cast<int>(id));
        }
}

// Ids [T, K] of two, four or eight bytes, row by row.
std::vector<int> ids_of(const py::array& array, std::size_t experts) {
    if (array.ndim() != 2 || array.dtype().kind() != 'i')
        throw std::invalid_argument("ids are [T, K], signed");
    std::vector<int> ids;
    ids.reserve(static_cast<std::size_t>(array.size()));
    if (array.itemsize() == 2)
        copy_ids<std::int16_t>(array, experts, ids);
    else if (array.itemsize() == 4)
        copy_ids<std::int32_t>(array, experts, ids);
    else if (array.itemsize() == 8)
        copy_ids<std::int64_t>(array, experts, ids);
    else
        throw std::invalid_argument("ids have two, four or eight bytes");
    return ids;
}

// An array on memory that `owner` keeps alive.
template <class T>
py::array_t<T> view(std::vector<py::ssize_t> shape, const T* data, const py::handle& owner) {
    return py::array_t<T>(std::move(shape), data, owner);
}

using Floats = py::array_t<float>;

class Adaptive {
  public:
    Adaptive(std::size_t layers, std::size_t experts, std::size_t keep_at_most, double hysteresis,
             double worth, float sure, std::vector<float> decays, double step, double prompt,
             std::size_t encoder_layers)
        : layers_(checked(layers, experts)),
          experts_(experts),
          core_({layers, experts, keep_at_most, checked_encoder(encoder_layers, layers)},
                {hysteresis, worth, sure}, {std::move(decays), step, prompt}) {}

    void routed(std::size_t layer, const py::array& ids) {
        check_layer(layer, layers_);
        const auto flat = ids_of(ids, experts_);
        core_.routed(layer, {flat, static_cast<std::size_t>(ids.shape(0))});
    }

    void hinted(std::size_t layer, const py::array& ids) {
        check_layer(layer, layers_);
        const auto flat = ids_of(ids, experts_);
        core_.hinted(layer, {flat, static_cast<std::size_t>(ids.shape(0))});
    }

    void admitted(int cell) {
        check_cell(cell, layers_ * experts_);
        core_.admitted(cell);
    }

    void forget(int cell) {
        check_cell(cell, layers_ * experts_);
        core_.forget(cell);
    }

    bool keeps(int cell) {
        check_cell(cell, layers_ * experts_);
        return core_.keeps(cell);
    }

    std::vector<std::tuple<int, bool, double>> wishes(std::size_t most) {
        std::vector<std::tuple<int, bool, double>> found;
        for (const CellWish& one : core_.wishes(most))
            found.emplace_back(one.cell, one.urgent, one.probability);
        return found;
    }

    static py::object past(const py::object& self) {
        auto& core = self.cast<Adaptive&>().core_;
        return self.cast<Adaptive&>().matrix(core.usage().past().data(), self);
    }

    static py::object score(const py::object& self) {
        auto& core = self.cast<Adaptive&>().core_;
        return self.cast<Adaptive&>().matrix(core.usage().score().data(), self);
    }

    std::vector<float> share(std::size_t estimate) {
        if (estimate > core_.usage().decays()) throw std::out_of_range("no such estimate");
        const auto found = core_.usage().share(estimate);
        return {found.begin(), found.end()};
    }

    using Net = std::map<std::string, std::vector<float>>;

    void forecast_with(std::size_t top_k, const Net& net) {
        const auto part = [&](const char* name, std::size_t size) {
            const auto found = net.find(name);
            if (found == net.end() || found->second.size() != size)
                throw std::invalid_argument(std::string("the network's ") + name);
            return found->second;
        };
        if (top_k < 1 || top_k > experts_ || experts_ >= 1 << 15 ||
            core_.usage().decays() != kForecastDecays)
            throw std::invalid_argument("a forecast has 1 ... 2^15 experts and five decays");
        core_.forecast_with(top_k, {part("mean", kForecastInputs), part("scale", kForecastInputs),
                                    part("hidden", kForecastHidden * kForecastInputs),
                                    part("hidden_bias", kForecastHidden),
                                    part("output", kForecastSpans * kForecastHidden),
                                    part("output_bias", kForecastSpans)});
    }

    Forecast& forecast() {
        if (!core_.forecast()) throw std::logic_error("forecast_with comes first");
        return *core_.forecast();
    }

    void begin_rows(const std::vector<std::int64_t>& rows, bool decoding) {
        forecast().begin(rows, decoding);
    }

    Floats inputs(std::size_t layer) {
        check_layer(layer, layers_);
        Floats out({static_cast<py::ssize_t>(experts_), static_cast<py::ssize_t>(kForecastInputs)});
        forecast().inputs(layer, {out.mutable_data(), static_cast<std::size_t>(out.size())});
        return out;
    }

    static py::object keep(const py::object& self) {
        auto& mine = self.cast<Adaptive&>();
        return mine.matrix(mine.forecast().keep().data(), self);
    }

    static py::object next(const py::object& self) {
        auto& mine = self.cast<Adaptive&>();
        return mine.matrix(mine.forecast().next().data(), self);
    }

    std::vector<float> weights() {
        const auto found = core_.usage().weights();
        return {found.begin(), found.end()};
    }

    AdaptiveCore& core() { return core_; }

  private:
    static std::size_t checked_encoder(std::size_t encoder_layers, std::size_t layers) {
        if (encoder_layers >= layers) throw std::invalid_argument("an encoder has some of the layers");
        return encoder_layers;
    }

    static std::size_t checked(std::size_t layers, std::size_t experts) {
        check_shape(layers, experts);
        return layers;
    }

    py::array_t<float> matrix(const float* data, const py::handle& owner) const {
        return view<float>({static_cast<py::ssize_t>(layers_), static_cast<py::ssize_t>(experts_)},
                           data, owner);
    }

    std::size_t layers_, experts_;
    AdaptiveCore core_;
};

class Paper {
  public:
    Paper(std::size_t layers, std::size_t experts, std::size_t slots, float epsilon,
          std::size_t encoder_layers)
        : layers_((check_shape(layers, experts), layers)),
          experts_(experts),
          core_(layers, experts, slots, std::min(encoder_layers, layers), epsilon) {}

    void routed(std::size_t layer, const py::array& ids) {
        check_layer(layer, layers_);
        const auto flat = ids_of(ids, experts_);
        core_.routed(layer, {flat, static_cast<std::size_t>(ids.shape(0))});
    }

    void predict(const py::array_t<float, py::array::c_style>& prediction) {
        if (prediction.ndim() != 2 || prediction.shape(0) != static_cast<py::ssize_t>(layers_) ||
            prediction.shape(1) != static_cast<py::ssize_t>(experts_))
            throw std::invalid_argument("a prediction is [L, E]");
        core_.predict({prediction.data(), layers_ * experts_});
    }

    void admitted(int cell) {
        check_cell(cell, layers_ * experts_);
        core_.admitted(cell);
    }

    void forget(int cell) {
        check_cell(cell, layers_ * experts_);
        core_.forget(cell);
    }

    EamcCore& core() { return core_; }

  private:
    std::size_t layers_, experts_;
    EamcCore core_;
};

Floats sum_as_shares(const py::array_t<float, py::array::c_style>& entries,
                     const std::vector<std::size_t>& places) {
    if (entries.ndim() != 3) throw std::invalid_argument("entries are [N, L, E]");
    for (const std::size_t place : places)
        if (place >= static_cast<std::size_t>(entries.shape(0)))
            throw std::out_of_range("entry " + std::to_string(place));
    Floats out({entries.shape(1), entries.shape(2)});
    predicted({entries.data(), static_cast<std::size_t>(entries.size())}, places,
              static_cast<std::size_t>(entries.shape(2)),
              {out.mutable_data(), static_cast<std::size_t>(out.size())});
    return out;
}

class Match {
  public:
    Match(std::size_t layers, std::size_t experts)
        : layers_(layers), experts_(experts), match_((check_shape(layers, experts), layers), experts) {}

    // Keeps the arrays alive while it reads them.
    void rebuild(const Floats& counts, const Floats& squares) {
        const auto layers = static_cast<py::ssize_t>(layers_);
        const auto experts = static_cast<py::ssize_t>(experts_);
        if (counts.ndim() != 3 || counts.shape(0) != layers || counts.shape(1) != experts ||
            squares.ndim() != 2 || squares.shape(0) != layers ||
            squares.shape(1) != counts.shape(2))
            throw std::invalid_argument("counts are [L, E, N], squares [L, N]");
        constexpr auto item = static_cast<py::ssize_t>(sizeof(float));
        const py::ssize_t stride = counts.strides(1) / item;
        const bool rows = counts.shape(2) == 0 ||
                          ((counts.strides(2) == item && squares.strides(1) == item) &&
                           counts.strides(0) == experts * stride * item &&
                           squares.strides(0) == stride * item);
        if (!rows) throw std::invalid_argument("entries lie side by side");
        counts_ = counts;
        squares_ = squares;
        match_.rebuild({counts.data(), squares.data(), static_cast<std::size_t>(counts.shape(2)),
                        static_cast<std::size_t>(stride)});
    }

    void observe(std::size_t layer, const py::array& ids) {
        check_layer(layer, layers_);
        match_.observe(layer, ids_of(ids, experts_));
    }

    Floats similarity() const {
        Floats out(static_cast<py::ssize_t>(match_.size()));
        match_.similarity({out.mutable_data(), match_.size()});
        return out;
    }

    EamMatch& match() { return match_; }

  private:
    std::size_t layers_, experts_;
    Floats counts_, squares_;
    EamMatch match_;
};

std::vector<std::size_t> best(const Floats& similarity, const py::array_t<std::int64_t>& stamps,
                              std::size_t most) {
    const auto count = static_cast<std::size_t>(similarity.size());
    if (similarity.ndim() != 1 || stamps.ndim() != 1 || stamps.size() < similarity.size() ||
        similarity.strides(0) != sizeof(float) || stamps.strides(0) != sizeof(std::int64_t))
        throw std::invalid_argument("similarity is [N], stamps at least as long");
    return best_matches({similarity.data(), count}, {stamps.data(), count}, most);
}

}  // namespace

void bind_policies(py::module_& m) {
    py::class_<Adaptive>(m, "AdaptiveCore", py::is_final())
        .def(py::init<std::size_t, std::size_t, std::size_t, double, double, float, std::vector<float>,
                      double, double, std::size_t>(),
             py::arg("layers"), py::arg("experts"), py::arg("keep_at_most"), py::kw_only(),
             py::arg("hysteresis"), py::arg("worth"), py::arg("sure"), py::arg("decays"), py::arg("step"),
             py::arg("prompt"), py::arg("encoder_layers") = 0)
        .def("begin_encode", [](Adaptive& self) { self.core().begin_encode(); })
        .def("begin_prefill", [](Adaptive& self) { self.core().begin_prefill(); })
        .def(
            "begin_decode", [](Adaptive& self, unsigned age) { self.core().begin_decode(age); },
            py::arg("age"))
        .def("routed", &Adaptive::routed, py::arg("layer"), py::arg("ids"))
        .def("hinted", &Adaptive::hinted, py::arg("layer"), py::arg("ids"))
        .def(
            "end_pass",
            [](Adaptive& self, const std::vector<bool>& accepted) {
                self.core().end_pass(std::vector<char>(accepted.begin(), accepted.end()));
            },
            py::arg("accepted") = std::vector<bool>())
        .def("forecast_with", &Adaptive::forecast_with, py::arg("top_k"), py::arg("net"))
        .def("begin_rows", &Adaptive::begin_rows, py::arg("rows"), py::arg("decoding"))
        .def(
            "end_request",
            [](Adaptive& self, std::int64_t request) { self.forecast().end_request(request); },
            py::arg("request"))
        .def("inputs", &Adaptive::inputs, py::arg("layer"))
        .def_property_readonly("keep", &Adaptive::keep)
        .def_property_readonly("next", &Adaptive::next)
        .def("admitted", &Adaptive::admitted, py::arg("cell"))
        .def("resize", [](Adaptive& a, std::size_t keep) { a.core().resize(keep); },
             py::arg("keep_at_most"))
        .def(
            "victim",
            [](Adaptive& self, const Evictable& evictable) {
                return self.core().victim(evictable);
            },
            py::arg("evictable"))
        .def("forget", &Adaptive::forget, py::arg("cell"))
        .def("keeps", &Adaptive::keeps, py::arg("cell"))
        .def("wishes", &Adaptive::wishes, py::arg("most"))
        .def("share", &Adaptive::share, py::arg("estimate"))
        .def_property_readonly("insertions",
                               [](Adaptive& self) { return self.core().insertions(); })
        .def_property_readonly("past", &Adaptive::past)
        .def_property_readonly("score", &Adaptive::score)
        .def_property_readonly("weights", &Adaptive::weights);

    py::class_<Paper>(m, "EamcCore", py::is_final())
        .def(py::init<std::size_t, std::size_t, std::size_t, float, std::size_t>(),
             py::arg("layers"), py::arg("experts"), py::arg("slots"), py::kw_only(),
             py::arg("epsilon"), py::arg("encoder_layers") = 0)
        .def(
            "begin_pass", [](Paper& self, bool encoding) { self.core().begin_pass(encoding); },
            py::arg("encoding"))
        .def("routed", &Paper::routed, py::arg("layer"), py::arg("ids"))
        .def("predict", &Paper::predict, py::arg("prediction").noconvert())
        .def("admitted", &Paper::admitted, py::arg("cell"))
        .def("resize", [](Paper& p, std::size_t n) { p.core().resize(n); }, py::arg("slots"))
        .def("forget", &Paper::forget, py::arg("cell"))
        .def(
            "victim",
            [](Paper& self, const Evictable& evictable) { return self.core().victim(evictable); },
            py::arg("evictable"))
        .def(
            "wishes", [](Paper& self, std::size_t most) { return self.core().wishes(most); },
            py::arg("most"));
    m.def("sum_as_shares", &sum_as_shares, py::arg("entries").noconvert(), py::arg("places"));

    py::class_<Match>(m, "EamMatch", py::is_final())
        .def(py::init<std::size_t, std::size_t>(), py::arg("layers"), py::arg("experts"))
        .def("rebuild", &Match::rebuild, py::arg("counts").noconvert(),
             py::arg("squares").noconvert())
        .def("begin_pass", [](Match& self) { self.match().begin_pass(); })
        .def("observe", &Match::observe, py::arg("layer"), py::arg("ids"))
        .def("similarity", &Match::similarity)
        .def_property_readonly("layer", [](Match& self) { return self.match().layer(); });
    m.def("best_matches", &best, py::arg("similarity").noconvert(), py::arg("stamps").noconvert(),
          py::arg("most"));
}

}  // namespace moeinf
