// The calls of the CUDA driver that the device tier needs, found in libcuda at run time.
// Needs no CUDA headers and no GPU to build.
//
//   Driver          the library: opened once, never closed (its threads live on); its devices
//     └ Context     a device's primary context, retained: the one that torch uses as well
//         └ DeviceMemory, Stream, Event, HostLock (host_lock.h), DeviceSlots (device_slots.h)
//
// Ownership: everything below holds a shared_ptr to its Context, and a Context one to its Driver.
// The handles are move-only and release themselves. Release ignores errors, because after a device
// fault every call fails.
//
// Current context: each call pushes the context and pops it, so a thread's context stack is kept.
//
// Errors: every call's result is checked. DriverError has the driver's name of the error and the
// name of the call. An error in work queued earlier is returned by any later call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace moeinf {

// Types of the driver's binary interface (x86-64 and aarch64 Linux).
using DevicePointer = std::uint64_t;
using StreamHandle = void*;
using EventHandle = void*;
using ContextHandle = void*;
inline constexpr const char* kDriverLibrary = "libcuda.so.1";

namespace cuda {
struct Calls;  // cuda_calls.h
}

// libcuda is missing, or lacks a call: this machine has no usable driver.
class NoDriver : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

class DriverError : public std::runtime_error {
  public:
    DriverError(const char* call, int code, std::string name, const std::string& words);
    const char* call() const noexcept { return call_; }  // "cuMemAlloc"
    int code() const noexcept { return code_; }
    const std::string& name() const noexcept { return name_; }  // "CUDA_ERROR_OUT_OF_MEMORY"
    bool out_of_memory() const noexcept;
    bool unsupported() const noexcept;  // the call exists, but not for this device or arguments

  private:
    const char* call_;
    int code_;
    std::string name_;
};

struct DeviceInfo {
    std::string name;
    std::size_t total_bytes;
    std::string bus;  // PCI address, which identifies the device to other libraries; "": unknown
};

struct MemoryInfo {
    std::size_t free_bytes;  // of the whole device: memory that no process uses
    std::size_t total_bytes;
};

// One host-to-device copy.
struct DeviceCopy {
    DevicePointer to;
    const std::byte* from;
    std::size_t bytes;
};

class Driver {
  public:
    // Opens the library and initialises it. Throws NoDriver, or DriverError (such as no device).
    explicit Driver(const std::string& library = kDriverLibrary);
    ~Driver();
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    int version() const;  // 1000 · major + 10 · minor, of the newest CUDA that it supports
    int devices() const;
    DeviceInfo info(int device) const;
    bool has_batches() const noexcept;

  private:
    friend class Context;
    void check(int code, const char* call) const;
    std::unique_ptr<cuda::Calls> calls_;
};

class Context {
  public:
    Context(std::shared_ptr<Driver> driver, int device);
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    MemoryInfo memory() const;
    std::size_t allocated_bytes() const noexcept { return allocated_; }  // by `allocate`
    const Driver& driver() const noexcept { return *driver_; }

    DevicePointer allocate(std::size_t bytes) const;
    void free(DevicePointer memory, std::size_t bytes) const noexcept;
    void lock(void* host, std::size_t bytes) const;  // cuMemHostRegister
    void unlock(void* host) const noexcept;

    StreamHandle make_stream() const;  // does not wait for the default stream
    void destroy_stream(StreamHandle stream) const noexcept;
    void synchronise(StreamHandle stream) const;

    EventHandle make_event() const;  // without timing
    void destroy_event(EventHandle event) const noexcept;
    void record(EventHandle event, StreamHandle stream) const;
    // Makes work queued to the stream after this call wait for the event's last recording.
    void wait(StreamHandle stream, EventHandle event) const;
    bool done(EventHandle event) const;
    void synchronise_event(EventHandle event) const;

    void copy(const DeviceCopy& copy, StreamHandle stream) const;
    // Queues all copies by one call, in no particular order. Needs driver().has_batches().
    void copy_batch(std::span<const DeviceCopy> copies, StreamHandle stream) const;

  private:
    class Current;
    std::shared_ptr<Driver> driver_;
    int device_;
    ContextHandle handle_ = nullptr;
    mutable std::atomic<std::size_t> allocated_{0};
};

}  // namespace moeinf
