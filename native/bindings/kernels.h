// Binds the kernels to Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/expert_ffn.h"
#include "layer/gated_mlp.h"
#include "layer/router.h"
#include "layer/slot_experts.h"

namespace moeinf {

// A linear layer over weights that the caller keeps: see _native.pyi.
class LinearKernel {
  public:
    LinearKernel(const std::string& format, std::size_t out_features, std::size_t in_features,
                 std::uintptr_t weights);
    void run(std::uintptr_t x, std::size_t rows, std::uintptr_t out, bool f32) const;
    const Matrix& matrix() const { return matrix_; }

  private:
    Matrix matrix_;
};

// A router over weights that the caller keeps: see _native.pyi.
class RouterKernel {
  public:
    RouterKernel(std::uintptr_t weight, std::size_t experts, std::size_t hidden, std::size_t top_k,
                 bool renormalise, float scale, std::size_t groups, std::size_t kept,
                 const std::string& scoring, std::uintptr_t bias);
    void run(std::uintptr_t x, std::size_t rows, std::uintptr_t ids, std::uintptr_t weights) const;
    const Router& router() const { return router_; }

  private:
    Router router_;
};

// A dense network with a gate over weights that the caller keeps: see _native.pyi.
class MlpKernel {
  public:
    MlpKernel(const LinearKernel& gate, const LinearKernel& up, const LinearKernel& down);
    void run(std::uintptr_t x, std::size_t rows, std::uintptr_t out) const;
    const GatedMlp& mlp() const { return mlp_; }

  private:
    GatedMlp mlp_;
};

class ExpertKernel;

// Layers of experts in slots that the caller keeps: see _native.pyi.
class SlotKernel {
  public:
    SlotKernel(const ExpertKernel& kernel, std::uintptr_t table, std::size_t layers,
               std::size_t experts, std::uintptr_t slots, std::size_t slot_bytes);
    std::ptrdiff_t count(std::size_t layer, std::uintptr_t ids, std::size_t rows,
                         std::size_t top_k) const;
    void run(std::size_t layer, std::uintptr_t x, std::size_t rows, std::uintptr_t ids,
             std::uintptr_t weights, std::size_t top_k, std::uintptr_t out, bool f32) const;
    const SlotExperts& experts() const { return experts_; }

  private:
    LayerRouting routing(std::size_t layer, std::size_t rows, std::size_t top_k,
                         std::uintptr_t ids, std::uintptr_t weights) const;

    SlotExperts experts_;
};

void bind_kernels(pybind11::module_& m);

}  // namespace moeinf
