// Binds the kernels to Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/expert_ffn.h"
#include "kernels/router.h"

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
                 bool renormalise, float scale, std::size_t groups, std::size_t kept);
    void run(std::uintptr_t x, std::size_t rows, std::uintptr_t ids, std::uintptr_t weights) const;
    const Router& router() const { return router_; }

  private:
    Router router_;
};

void bind_kernels(pybind11::module_& m);

}  // namespace moeinf
