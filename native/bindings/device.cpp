// Binds the CUDA driver, page-locking and device slots; turns driver errors into exceptions.
//
// Calls that may wait for the device or the system release the GIL: opening, locking, waiting,
// allocating, destruction, and queueing copies, because copies from pageable memory may block.
#include "bindings/device.h"

#include <pybind11/stl.h>

#include "device/device_slots.h"

namespace py = pybind11;

namespace moeinf {
namespace {

py::handle device_error;  // from moeinf.errors, set once in bind_device; the module keeps them
py::handle out_of_memory;

void raise(const DriverError& error) {
    py::object made = (error.out_of_memory() ? out_of_memory : device_error)(error.what());
    made.attr("name") = error.name();
    made.attr("call") = error.call();
    PyErr_SetObject(py::type::handle_of(made).ptr(), made.ptr());
}


void bind_context(py::module_& m) {
    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver", py::is_final())
        .def(py::init<const std::string&>(), py::arg("library") = kDriverLibrary, no_gil)
        .def_property_readonly("version", &Driver::version)
        .def_property_readonly("devices", &Driver::devices)
        .def_property_readonly("has_batches", &Driver::has_batches)
        .def(
            "info",
            [](const Driver& driver, int device) {
                const DeviceInfo info = driver.info(device);
                return std::tuple(info.name, info.total_bytes, info.bus);
            },
            py::arg("device"));
    py::class_<Context, std::shared_ptr<Context>>(m, "DeviceContext", py::is_final(),
                                                  py::release_gil_before_calling_cpp_dtor())
        .def(py::init<std::shared_ptr<Driver>, int>(), py::arg("driver"), py::arg("device") = 0,
             no_gil)
        .def("memory", [](const Context& context) {
            const MemoryInfo info = context.memory();
            return std::pair(info.free_bytes, info.total_bytes);
        })
        .def_property_readonly("allocated_bytes", &Context::allocated_bytes);
}

}  // namespace

void bind_device(py::module_& m) {
    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    const py::module_ errors = py::module_::import("moeinf.errors");
    m.attr("DeviceError") = errors.attr("DeviceError");
    m.attr("OutOfDeviceMemory") = errors.attr("OutOfDeviceMemory");
    device_error = py::object(m.attr("DeviceError"));
    out_of_memory = py::object(m.attr("OutOfDeviceMemory"));
    py::register_exception<NoDriver>(m, "NoDriver", PyExc_RuntimeError);
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const DriverError& error) {
            raise(error);
        }
    });
    m.attr("DRIVER_LIBRARY") = kDriverLibrary;
    m.attr("LEAST_BATCHED_BYTES") = kLeastBatchedBytes;
    bind_context(m);

    py::class_<HostLock, std::shared_ptr<HostLock>>(m, "HostLock", py::is_final(),
                                                    py::release_gil_before_calling_cpp_dtor())
        .def(py::init<std::shared_ptr<Context>, std::shared_ptr<SlotPool>, std::size_t>(),
             py::arg("context"), py::arg("pool"), py::arg("slice_bytes"))
        .def_property_readonly("next_bytes", &HostLock::next_bytes)
        .def_property_readonly("locked_slots", &HostLock::locked_slots)
        .def("lock_next", &HostLock::lock_next, no_gil);

    using Slots = std::vector<std::size_t>;
    py::class_<DeviceSlots>(m, "DeviceSlots", py::is_final(),
                            py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](std::shared_ptr<Context> context, std::shared_ptr<HostLock> host,
                         std::size_t slots, std::uintptr_t stream, std::size_t least_batched) {
                 return std::make_unique<DeviceSlots>(std::move(context), std::move(host), slots,
                                                      reinterpret_cast<StreamHandle>(stream),
                                                      least_batched);
             }),
             py::arg("context"), py::arg("host"), py::arg("slots"), py::arg("stream"),
             py::arg("least_batched_bytes") = kLeastBatchedBytes, no_gil)
        .def_property_readonly("address", &DeviceSlots::base)
        .def_property_readonly("slots", &DeviceSlots::slots)
        .def_property_readonly("slot_bytes", &DeviceSlots::slot_bytes)
        .def(
            "copy",
            [](DeviceSlots& slots, const Slots& from, const Slots& to, std::size_t bytes) {
                return slots.copy(from, to, bytes);
            },
            py::arg("host_slots"), py::arg("slots"), py::arg("bytes"), no_gil)
        .def("done", &DeviceSlots::done, py::arg("batch"))
        .def("wait", &DeviceSlots::wait, py::arg("batch"), no_gil)
        .def(
            "begin_read",
            [](DeviceSlots& slots, const Slots& which) { slots.begin_read(which); },
            py::arg("slots"))
        .def(
            "end_read", [](DeviceSlots& slots, const Slots& which) { slots.end_read(which); },
            py::arg("slots"))
        .def("finish", &DeviceSlots::finish, no_gil);
}

}  // namespace moeinf
