// The calls of the CUDA driver that the device tier needs, found in libcuda at run time.
// Does not know experts, slots or torch; needs no CUDA headers and no GPU to be built.
//
//   Driver          the library: opened once, never closed (its threads live on); what is there
//     └ Context     a device's primary context, retained: the one that torch uses as well
//         └ DeviceMemory, Stream, Event, HostLock (host_lock.h), DeviceSlots (device_slots.h)
//
// Ownership: everything below holds a shared_ptr to its Context, a Context one to its Driver. The
// handles are move-only and give themselves back; giving back ignores errors, because after a fault
// of the device every call fails.
//
// Current context: each call pushes the context and pops it, so that a thread is left as it came.
//
// Errors: every call's result is checked. DriverError has the driver's own name of the error and
// the call's name; an error of work that was queued earlier comes out of a later call, whichever.
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

// As in the driver's binary interface (x86-64 and aarch64 Linux).
using DevicePointer = std::uint64_t;
using StreamHandle = void*;
using EventHandle = void*;
using ContextHandle = void*;
inline constexpr const char* kDriverLibrary = "libcuda.so.1";

namespace cuda {
struct Calls;  // cuda_calls.h
}

// There is no libcuda, or it lacks a call: this machine has no usable driver.
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
    bool unsupported() const noexcept;  // the call is there, but not for this device or such arguments

  private:
    const char* call_;
    int code_;
    std::string name_;
};

struct DeviceInfo {
    std::string name;
    std::size_t total_bytes;
    std::string bus;  // its PCI address, by which other libraries know it; "": it has none
};

struct MemoryInfo {
    std::size_t free_bytes;  // of the whole device, whoever uses the rest
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
    // Opens the library and initialises it. NoDriver; DriverError, as when there is no device.
    explicit Driver(const std::string& library = kDriverLibrary);
    ~Driver();
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    int version() const;  // 1000 · major + 10 · minor, of the newest CUDA that it serves
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

    StreamHandle make_stream() const;  // that does not wait for the default stream
    void destroy_stream(StreamHandle stream) const noexcept;
    void synchronise(StreamHandle stream) const;

    EventHandle make_event() const;  // without timing
    void destroy_event(EventHandle event) const noexcept;
    void record(EventHandle event, StreamHandle stream) const;
    // What is queued to the stream from now on waits for the event as it was last recorded.
    void wait(StreamHandle stream, EventHandle event) const;
    bool done(EventHandle event) const;
    void synchronise_event(EventHandle event) const;

    void copy(const DeviceCopy& copy, StreamHandle stream) const;
    // All of them by one call, in no particular order. Needs driver().has_batches().
    void copy_batch(std::span<const DeviceCopy> copies, StreamHandle stream) const;

  private:
    class Current;
    std::shared_ptr<Driver> driver_;
    int device_;
    ContextHandle handle_ = nullptr;
    mutable std::atomic<std::size_t> allocated_{0};
};

}  // namespace moeinf
