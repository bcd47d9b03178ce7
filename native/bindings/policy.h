// Binds the cores of cache policies to Python.
#pragma once

#include <pybind11/pybind11.h>

namespace moeinf {

void bind_policies(pybind11::module_& m);

}  // namespace moeinf
