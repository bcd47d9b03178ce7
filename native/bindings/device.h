// Binds the CUDA driver and the device tier to Python.
#pragma once

#include <pybind11/pybind11.h>

namespace moeinf {

void bind_device(pybind11::module_& m);

}  // namespace moeinf
