// Binds decode attention to Python.
#pragma once

#include <pybind11/pybind11.h>

namespace moeinf {

void bind_attention(pybind11::module_& m);

}  // namespace moeinf
