// Binds the native classes to Python and turns a Failure into an exception.
//
// Calls that may wait for a drive, a thread or a large unmapping release the GIL. submit, cancel
// and similar calls keep it. They hold the queue's mutex for microseconds, and taking the GIL back
// could cost a whole switch interval (5 ms). No reader thread takes the GIL, so holding it while
// taking the mutex cannot deadlock.
//
// A blocked wait checks for pending signals every kPollSeconds, so that Ctrl-C ends it; the tickets
// then stay undelivered.
#include <pybind11/pybind11.h>  // Python.h must come before the system's headers
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "bindings/attention.h"
#include "queue/copy_queue_files.h"
#include "queue/crc32c.h"
#include "bindings/device.h"
#include "bindings/kernels.h"
#include "bindings/policy.h"
#include "measure/read_loop.h"
#include "platform/files.h"
#include "platform/threads.h"

namespace py = pybind11;
using namespace moeinf;

namespace {

py::handle corrupt_shard;  // set once in module initialisation; the module keeps both alive
py::handle cancelled;

py::object make_os_error(py::handle type, int code, const std::string& message,
                         const std::string& path) {
    if (path.empty()) return type(code, message);
    return type(code, message, py::cast(std::filesystem::path(path)).attr("__fspath__")());
}

// Makes the exception of a failure; failure.h has the table.
py::object make_exception(const Failure& failure) {
    switch (failure.kind) {
        case Failure::Kind::kIo:
            return make_os_error(PyExc_OSError, failure.code, failure.message, failure.path);
        case Failure::Kind::kCorrupt:
            return make_os_error(corrupt_shard, failure.code, failure.message, failure.path);
        case Failure::Kind::kCancelled:
            return cancelled(failure.message);
        case Failure::Kind::kInternal:
            break;
    }
    return py::handle(PyExc_RuntimeError)(failure.message);
}

void set_error(const py::object& exception) {
    PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
}

// KeepWaiting for a caller without the GIL: false when a signal handler raised, such as Ctrl-C's.
bool no_signal_pending() noexcept {
    const py::gil_scoped_acquire gil;
    return PyErr_CheckSignals() == 0;
}

// Runs `blocking(no_signal_pending)` without the GIL; raises the exception of a signal handler.
template <class Blocking>
void block(Blocking&& blocking) {
    bool finished = false;
    {
        const py::gil_scoped_release no_gil;
        finished = blocking(no_signal_pending);
    }
    if (!finished) throw py::error_already_set();
}

// Waits for a ticket; for a resident expert it returns without releasing the GIL.
void wait(CopyQueue& queue, Ticket ticket) {
    if (ticket == kResident) return;
    block([&](auto keep_waiting) { return queue->wait({&ticket, 1}, keep_waiting); });
}

void wait_many(CopyQueue& queue, const std::vector<Ticket>& tickets) {
    block([&](auto keep_waiting) { return queue->wait(tickets, keep_waiting); });
}

std::vector<std::pair<Ticket, py::object>> collect(CopyQueue& queue) {
    std::vector<std::pair<Ticket, py::object>> ended;
    for (const auto& [ticket, failure] : queue->collect())
        ended.emplace_back(ticket, failure ? make_exception(*failure) : py::none());
    return ended;
}

using CrcFunction = std::uint32_t (*)(const void*, std::size_t, std::uint32_t) noexcept;

std::uint32_t crc_of_buffer(CrcFunction function, const py::buffer& buffer, std::uint32_t crc) {
    constexpr Py_ssize_t kLargeBytes = 64 << 10;  // takes microseconds: worth releasing the GIL
    Py_buffer view;
    if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    struct Release {
        Py_buffer* view;
        ~Release() { PyBuffer_Release(view); }
    } release{&view};
    const auto bytes = static_cast<std::size_t>(view.len);
    if (view.len < kLargeBytes) return function(view.buf, bytes, crc);
    const py::gil_scoped_release no_gil;
    return function(view.buf, bytes, crc);
}

void sync_file_system(int fd) {
    int code = 0;
    {
        const py::gil_scoped_release no_gil;
        if (platform::sync_file_system(fd) != 0) code = errno;
    }
    if (code != 0) {
        set_error(make_os_error(PyExc_OSError, code, std::generic_category().message(code), ""));
        throw py::error_already_set();
    }
}

void bind_slot_pool(py::module_& m) {
    py::class_<SlotPool, std::shared_ptr<SlotPool>>(m, "SlotPool", py::buffer_protocol(),
                                                    py::is_final(),
                                                    py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](std::size_t slots, std::size_t slot_bytes) {
                 return std::make_shared<SlotPool>(slots, slot_bytes);
             }),
             py::arg("slots"), py::arg("slot_bytes"))
        .def_property_readonly("slots", &SlotPool::slots)
        .def_property_readonly("slot_bytes", &SlotPool::slot_bytes)
        .def_property_readonly("bytes", &SlotPool::bytes)
        .def("release", &SlotPool::release, py::arg("slot"))
        .def("release_all", &SlotPool::release_all, py::call_guard<py::gil_scoped_release>())
        .def_buffer([](SlotPool& pool) {
            const auto row = static_cast<py::ssize_t>(pool.slot_bytes());
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(pool.base()),
                                   {static_cast<py::ssize_t>(pool.slots()), row},
                                   {row, py::ssize_t{1}});
        });
}

void bind_counters(py::module_& m) {
    py::class_<Counters>(m, "Counters", py::is_final())
        .def_readonly("submitted", &Counters::submitted)
        .def_readonly("resident", &Counters::resident)
        .def_readonly("queued", &Counters::queued)
        .def_readonly("running", &Counters::running)
        .def_readonly("hung", &Counters::hung)
        .def_readonly("done", &Counters::done)
        .def_readonly("errors", &Counters::errors)
        .def_readonly("cancelled", &Counters::cancelled)
        .def_readonly("undelivered", &Counters::undelivered)
        .def_readonly("waiting", &Counters::waiting)
        .def_readonly("reads", &Counters::reads)
        .def_readonly("bytes_read", &Counters::bytes_read)
        .def_readonly("yields", &Counters::yields)
        .def_readonly("read_seconds", &Counters::read_seconds)
        .def_readonly("whole_calls", &Counters::whole_calls)
        .def_readonly("whole_seconds", &Counters::whole_seconds)
        .def_readonly("piece_calls", &Counters::piece_calls)
        .def_readonly("piece_seconds", &Counters::piece_seconds);
}

void bind_copy_queue(py::module_& m) {
    const FileOptions defaults;
    const auto make = [](std::shared_ptr<SlotPool> pool, int readers, bool direct,
                         std::size_t max_open_files, std::size_t block_bytes, double hang_seconds,
                         int busy, std::size_t piece_bytes) {
        const FileOptions files{direct, max_open_files, block_bytes, {}};
        return std::make_unique<CopyQueue>(std::move(pool), readers, hang_seconds, files, busy,
                                           piece_bytes);
    };
    const auto add_source = [](CopyQueue& queue, const std::filesystem::path& path,
                               std::uint64_t offset, std::size_t bytes,
                               std::optional<std::uint32_t> crc32c) {
        return queue->add_source({path.string(), offset, bytes, crc32c});
    };
    const auto replace_sources = [](CopyQueue& queue, const std::vector<SourceId>& ids,
                                    const std::vector<std::filesystem::path>& paths,
                                    const std::vector<std::uint64_t>& offsets, std::size_t bytes) {
        if (paths.size() != offsets.size()) throw std::invalid_argument("as many paths as offsets");
        std::vector<Source> sources;
        for (std::size_t i = 0; i < paths.size(); ++i)
            sources.push_back({paths[i].string(), offsets[i], bytes, std::nullopt});
        queue->replace_sources(ids, sources);
    };
    const auto submit = [](CopyQueue& queue, SourceId source, std::size_t slot, double priority) {
        return queue->submit(source, slot, priority);
    };
    const auto submit_many = [](CopyQueue& queue, const std::vector<SourceId>& sources,
                                const std::vector<std::size_t>& slots, double priority) {
        return queue->submit(sources, slots, priority);
    };
    const auto drain = [](CopyQueue& queue) {
        block([&](auto keep_waiting) { return queue->drain(keep_waiting); });
    };
    const auto no_gil = py::call_guard<py::gil_scoped_release>();

    py::class_<CopyQueue>(m, "CopyQueue", py::is_final(), py::release_gil_before_calling_cpp_dtor())
        .def(py::init(make), py::arg("pool"), py::kw_only(), py::arg("readers") = 2,
             py::arg("direct") = defaults.direct,
             py::arg("max_open_files") = defaults.max_open_files,
             py::arg("block_bytes") = defaults.block_bytes, py::arg("hang_seconds") = kHangSeconds,
             py::arg("busy") = kMaxReaders, py::arg("piece_bytes") = kPieceBytes)
        .def("add_source", add_source, py::arg("path"), py::arg("offset"), py::arg("bytes"),
             py::arg("crc32c") = py::none())
        .def("replace_sources", replace_sources, py::arg("sources"), py::arg("paths"),
             py::arg("offsets"), py::arg("bytes"))
        .def("submit", submit, py::arg("source"), py::arg("slot"), py::arg("priority"))
        .def("submit_many", submit_many, py::arg("sources"), py::arg("slots"), py::arg("priority"))
        .def(
            "raise_priority",
            [](CopyQueue& queue, Ticket ticket, double priority) {
                queue->raise_priority(ticket, priority);
            },
            py::arg("ticket"), py::arg("priority"))
        .def(
            "cancel",
            [](CopyQueue& queue, Ticket ticket, bool half_read) {
                return queue->cancel(ticket, half_read);
            },
            py::arg("ticket"), py::arg("half_read") = false)
        .def(
            "invalidate", [](CopyQueue& queue, std::size_t slot) { queue->invalidate(slot); },
            py::arg("slot"))
        .def(
            "can_submit",
            [](CopyQueue& queue, std::size_t slot) { return queue->can_submit(slot); },
            py::arg("slot"))
        .def("wait", &wait, py::arg("ticket"))
        .def("wait_many", &wait_many, py::arg("tickets"))
        .def("collect", &collect)
        .def("drain", drain)
        .def("pause", [](CopyQueue& queue) { queue->pause(); })
        .def("resume", [](CopyQueue& queue) { queue->resume(); })
        .def("close", &CopyQueue::close, no_gil)
        .def("counters", [](CopyQueue& queue) { return queue->counters(); })
        .def_property_readonly("direct",
                               [](const CopyQueue& queue) { return queue.files().direct(); })
        .def_property_readonly(
            "direct_refusals",
            [](const CopyQueue& queue) { return queue.files().direct_refusals(); })
        .def_property_readonly("open_files",
                               [](const CopyQueue& queue) { return queue.files().open_files(); });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Slots, the copy queue and checksums; see _native.pyi for units and errors.";

    m.attr("PAGE_BYTES") = kPageBytes;
    m.attr("SHARD_DATA_OFFSET") = kShardDataOffset;
    m.attr("DEMAND") = kDemand;
    m.attr("RESIDENT") = kResident;
    m.attr("MAX_READERS") = kMaxReaders;

    corrupt_shard = py::exception<Failed>(m, "CorruptShard", PyExc_OSError);
    cancelled = py::exception<Failed>(m, "Cancelled", PyExc_RuntimeError);
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const Failed& error) {
            set_error(make_exception(*error.failure()));
        }
    });

    bind_slot_pool(m);
    bind_counters(m);
    bind_copy_queue(m);

    m.def(
        "crc32c",
        [](const py::buffer& buffer, std::uint32_t crc) {
            return crc_of_buffer(crc32c, buffer, crc);
        },
        py::arg("buffer"), py::arg("crc") = 0);
    m.def("_crc32c_paths", [] {
        std::vector<std::string> names;
        for (const auto& path : crc32c_paths()) names.emplace_back(path.name);
        return names;
    });
    m.def(
        "_crc32c_on",
        [](const std::string& name, const py::buffer& buffer, std::uint32_t crc) {
            for (const auto& path : crc32c_paths())
                if (name == path.name) return crc_of_buffer(path.function, buffer, crc);
            throw py::value_error("no path " + name);
        },
        py::arg("path"), py::arg("buffer"), py::arg("crc") = 0);
    m.def(
        "read_bandwidth",
        [](std::size_t bytes, int threads, bool prefetch, bool huge_pages, int rounds) {
            return read_bandwidth({bytes, threads, prefetch, huge_pages, rounds});
        },
        py::arg("bytes"), py::arg("threads"), py::arg("prefetch"), py::arg("huge_pages"),
        py::arg("rounds"), py::call_guard<py::gil_scoped_release>());
    m.def("most_open_files", &most_open_files);
    m.def("_nothing", [] {});  // measures the cost of a call, for tests and benchmarks
    m.def("end_after_signals", &platform::end_after_signals, py::arg("seconds"));
    m.def("syncfs", &sync_file_system, py::arg("fd"));
    bind_attention(m);
    bind_device(m);  // after SlotPool, which its signatures use
    bind_kernels(m);
    bind_policies(m);
}
