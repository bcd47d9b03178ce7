// A libcuda without a GPU: device memory is host memory, streams run late and in any allowed order.
// Built as a shared library by the tests; the product loads it as libcuda.
//
// Three modes run the queued operations (fake_configure, or the environment variable FAKE_CUDA):
//
//   deferred   nothing runs until a call must wait for it; then, and a little at random in other
//              calls, the heads of the streams run in a seeded random order. Reproducible.
//   at_once    everything runs when it is queued: a device that is never behind.
//   threads    a thread per stream runs its queue, after random delays.
//
// All modes keep CUDA's guarantees and no others. A stream's operations run in order. A wait holds
// its stream until the event's latest record at the time the wait was queued. A copy from
// registered memory reads its source when it runs; a copy from pageable memory reads it at once. So
// a missing wait, or a source that is overwritten too early, shows as wrong bytes.
//
// It also refuses calls that the real one refuses: calls without a current context, copies across
// two registrations, requests for more memory than is free. `fail=` makes calls fail at once. With
// code 700 a copy is queued and fails when it runs; then every call fails, as after a device fault.
// FAKE_CUDA is the version at build time: 12080 and 13000 each have their own batched copy.
#ifndef FAKE_CUDA
#define FAKE_CUDA 13000
#endif
#include "fake_nvml.h"
#include "fake_streams.h"

using namespace fake;

namespace {

int queue_copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, void* stream) {
    if (!is_device(to, bytes)) return kInvalidValue;
    const int registered = registration_of(from, bytes);
    if (registered == kInvalidValue) return kInvalidValue;
    if (state().fault_next) {
        state().fault_next = false;
        return queue(stream, [] {
            const Lock lock(state().mutex);
            state().sticky = kIllegalAddress;
        });
    }
    const auto target = reinterpret_cast<void*>(to);
    const auto source = reinterpret_cast<const char*>(from);
    state().counts["bytes copied"] += static_cast<long>(bytes);
    if (registered == kOk)
        return queue(stream, [=] { std::memcpy(target, source, bytes); });
    ++state().counts["pageable copies"];
    const auto staged = std::make_shared<std::vector<char>>(source, source + bytes);
    return queue(stream, [=] { std::memcpy(target, staged->data(), bytes); });
}

[[maybe_unused]] int batch(std::uint64_t* to, std::uint64_t* from, std::size_t* bytes, std::size_t count,
          const int* attributes, const std::size_t* first, std::size_t kinds, void* stream) {
    State& s = state();
    Lock lock(s.mutex);
    if (const int code = enter("cuMemcpyBatchAsync")) return code;
    if (stream == nullptr || count == 0) return kInvalidValue;
    constexpr int kInStreamOrder = 1;  // else the source may be read before the stream reaches it
    if (kinds != 1 || first[0] != 0 || attributes[0] != kInStreamOrder) return kInvalidValue;
    std::vector<std::size_t> order(count);  // the entries run in no particular order
    for (std::size_t i = 0; i < count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), s.random);
    for (const std::size_t i : order) {
        if (bytes[i] < (256u << 10)) ++s.counts["synchronous batches"];
        if (const int code = queue_copy(to[i], from[i], bytes[i], stream)) return code;
    }
    pass_time(lock);
    return kOk;
}

}  // namespace

extern "C" {

void fake_configure(const char* words) {
    const Lock lock(state().mutex);
    state().configure(words);
}

// Restores the state of a new process, except for allocations. Call it while nothing is queued.
void fake_reset(const char* words) {
    State& s = state();
    const Lock lock(s.mutex);
    s.failures.clear();
    s.counts.clear();
    s.sticky = kOk;
    s.fault_next = false;
    s.threads = s.at_once = false;
    s.memory_bytes = std::size_t{1} << 30;
    s.context_bytes = std::size_t{8} << 20;
    s.others_bytes = 0;
    s.nvml = "";
    s.said = -1;
    s.lockable_bytes = ~std::size_t{0};
    s.devices = 1;
    s.configure(words);
}

// Returns the number of calls of that name; or "allocated", "registered", "bytes copied", ...
long fake_count(const char* name) {
    State& s = state();
    const Lock lock(s.mutex);
    long total = 0;
    if (std::string(name) == "allocated") {
        for (const auto& [base, bytes] : s.allocated) total += static_cast<long>(bytes);
        return total;
    }
    if (std::string(name) == "registered") {
        for (const auto& [base, bytes] : s.registered) total += static_cast<long>(bytes);
        return total;
    }
    if (std::string(name) == "handles")
        return static_cast<long>(s.streams.size() + s.events.size());
    return s.counts[name];
}

int cuInit(unsigned) {
    const Lock lock(state().mutex);
    if (const int code = enter("cuInit", false)) return code;
    return state().devices > 0 ? kOk : kNoDevice;
}

int cuDriverGetVersion(int* version) {
    *version = FAKE_CUDA;
    return kOk;
}

int cuGetErrorName(int code, const char** name) {
    static const std::map<int, const char*> names{
        {kOk, "CUDA_SUCCESS"},
        {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
        {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
        {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
        {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
        {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
        {kNotReady, "CUDA_ERROR_NOT_READY"},
        {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
        {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
        {kUnknown, "CUDA_ERROR_UNKNOWN"},
    };
    const auto found = names.find(code);
    if (found == names.end()) return kInvalidValue;
    *name = found->second;
    return kOk;
}

int cuGetErrorString(int code, const char** words) {
    *words = code == kOutOfMemory ? "out of memory" : "";
    return kOk;
}

int cuDeviceGetCount(int* count) {
    const Lock lock(state().mutex);
    *count = state().devices;
    return kOk;
}

int cuDeviceGet(int* device, int ordinal) {
    const Lock lock(state().mutex);
    *device = ordinal;
    return ordinal >= 0 && ordinal < state().devices ? kOk : kInvalidValue;
}

int cuDeviceGetName(char* name, int bytes, int) {
    std::strncpy(name, "Fake GPU", static_cast<std::size_t>(bytes));
    return kOk;
}

int cuDeviceTotalMem_v2(std::size_t* bytes, int) {
    const Lock lock(state().mutex);
    *bytes = state().memory_bytes;
    return kOk;
}

int cuDeviceGetPCIBusId(char* bus, int bytes, int) {
    std::strncpy(bus, "0000:65:00.0", static_cast<std::size_t>(bytes));
    return kOk;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
    const Lock lock(state().mutex);
    if (const int code = enter("cuDevicePrimaryCtxRetain", false)) return code;
    ++state().retained;
    *context = &primary;
    return kOk;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    const Lock lock(state().mutex);
    --state().retained;
    return kOk;
}

int cuCtxPushCurrent_v2(void* context) {
    if (context != &primary) return kInvalidContext;
    current.push_back(context);
    return kOk;
}

int cuCtxPopCurrent_v2(void** context) {
    if (current.empty()) return kInvalidContext;
    *context = current.back();
    current.pop_back();
    return kOk;
}

int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
    State& s = state();
    const Lock lock(s.mutex);
    if (const int code = enter("cuMemGetInfo")) return code;
    const std::size_t used = s.others_bytes + held_by_us();
    *total = s.memory_bytes;
    *free = s.memory_bytes - std::min(s.memory_bytes, used);
    return kOk;
}

int cuMemAlloc_v2(std::uint64_t* memory, std::size_t bytes) {
    State& s = state();
    const Lock lock(s.mutex);
    if (const int code = enter("cuMemAlloc")) return code;
    const std::size_t used = s.others_bytes + held_by_us();
    if (bytes > s.memory_bytes - std::min(used, s.memory_bytes)) return kOutOfMemory;
    void* const made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                            -1, 0);
    if (made == MAP_FAILED) return kOutOfMemory;
    *memory = reinterpret_cast<std::uintptr_t>(made);
    s.allocated[*memory] = bytes;
    return kOk;
}

int cuMemFree_v2(std::uint64_t memory) {
    State& s = state();
    Lock lock(s.mutex);
    const auto found = s.allocated.find(memory);
    if (found == s.allocated.end()) return kInvalidValue;
    const std::size_t bytes = found->second;
    s.allocated.erase(found);
    for (Stream* stream : all_streams())  // waits for the device, like the real one
        wait_until([&] { return stream->queue.empty(); }, lock);
    munmap(reinterpret_cast<void*>(memory), bytes);
    return kOk;
}

int cuMemHostRegister_v2(void* host, std::size_t bytes, unsigned) {
    State& s = state();
    const Lock lock(s.mutex);
    if (const int code = enter("cuMemHostRegister")) return code;
    const auto base = reinterpret_cast<std::uintptr_t>(host);
    std::size_t used = bytes;
    for (const auto& [other, size] : s.registered) {
        if (base < other + size && other < base + bytes) return kAlreadyRegistered;
        used += size;
    }
    if (used > s.lockable_bytes) return kOutOfMemory;
    s.registered[base] = bytes;
    return kOk;
}

int cuMemHostUnregister(void* host) {
    const Lock lock(state().mutex);
    return state().registered.erase(reinterpret_cast<std::uintptr_t>(host)) ? kOk : kNotRegistered;
}

int cuStreamCreate(void** stream, unsigned) {
    State& s = state();
    const Lock lock(s.mutex);
    if (const int code = enter("cuStreamCreate")) return code;
    auto made = std::make_unique<Stream>();
    if (s.threads) made->thread = std::thread(serve, made.get());
    *stream = made.get();
    s.streams[made.get()] = std::move(made);
    return kOk;
}

int cuStreamDestroy_v2(void* handle) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* const stream = handle != nullptr ? find(handle) : nullptr;
    if (stream == nullptr) return kInvalidHandle;
    wait_until([&] { return stream->queue.empty(); }, lock);
    stream->stop = true;
    s.changed.notify_all();
    lock.unlock();
    if (stream->thread.joinable()) stream->thread.join();
    lock.lock();
    s.streams.erase(stream);
    return kOk;
}

int cuStreamSynchronize(void* handle) {
    State& s = state();
    Lock lock(s.mutex);
    const int failed = enter("cuStreamSynchronize");
    Stream* const stream = find(handle);
    if (stream == nullptr) return kInvalidHandle;
    const int code = wait_until([&] { return stream->queue.empty(); }, lock);
    return failed != kOk ? failed : code;
}

int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
    Lock lock(state().mutex);
    if (const int code = enter("cuStreamWaitEvent")) return code;
    const auto event = find_event(handle);
    if (!event) return kInvalidHandle;
    const std::uint64_t wanted = event->recorded;
    const int code = queue(stream, [] {}, [=] { return event->done >= wanted; });
    pass_time(lock);
    return code;
}

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    Lock lock(state().mutex);
    if (const int code = enter("cuLaunchHostFunc", false)) return code;
    const int code = queue(stream, [=] { function(data); });
    pass_time(lock);
    return code;
}

int cuEventCreate(void** event, unsigned) {
    State& s = state();
    const Lock lock(s.mutex);
    if (const int code = enter("cuEventCreate")) return code;
    auto made = std::make_shared<Event>();
    *event = made.get();
    s.events[made.get()] = std::move(made);
    return kOk;
}

int cuEventDestroy_v2(void* handle) {
    const Lock lock(state().mutex);
    return state().events.erase(static_cast<Event*>(handle)) ? kOk : kInvalidHandle;
}

int cuEventRecord(void* handle, void* stream) {
    State& s = state();
    Lock lock(s.mutex);
    if (const int code = enter("cuEventRecord")) return code;
    const auto event = find_event(handle);
    if (!event) return kInvalidHandle;
    const std::uint64_t number = ++event->recorded;
    const int code = queue(stream, [=, &s] {
        const Lock inner(s.mutex);
        event->done = std::max(event->done, number);
    });
    pass_time(lock);
    return code;
}

int cuEventQuery(void* handle) {
    Lock lock(state().mutex);
    if (const int code = enter("cuEventQuery")) return code;
    pass_time(lock);
    const auto event = find_event(handle);
    if (!event) return kInvalidHandle;
    return event->done >= event->recorded ? kOk : kNotReady;
}

int cuEventSynchronize(void* handle) {
    State& s = state();
    Lock lock(s.mutex);
    if (const int code = enter("cuEventSynchronize")) return code;
    const auto event = find_event(handle);
    if (!event) return kInvalidHandle;
    const std::uint64_t wanted = event->recorded;
    return wait_until([&] { return event->done >= wanted; }, lock);
}

int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void* from, std::size_t bytes, void* stream) {
    Lock lock(state().mutex);
    if (const int code = enter("cuMemcpyHtoDAsync")) return code;
    const int code = queue_copy(to, reinterpret_cast<std::uintptr_t>(from), bytes, stream);
    pass_time(lock);
    return code;
}

#if FAKE_CUDA >= 13000
int cuMemcpyBatchAsync_v2(std::uint64_t* to, std::uint64_t* from, std::size_t* bytes,
                          std::size_t count, int* attributes, std::size_t* first,
                          std::size_t kinds, void* stream) {
    return batch(to, from, bytes, count, attributes, first, kinds, stream);
}
#elif FAKE_CUDA >= 12080
int cuMemcpyBatchAsync(std::uint64_t* to, std::uint64_t* from, std::size_t* bytes,
                       std::size_t count, int* attributes, std::size_t* first, std::size_t kinds,
                       std::size_t* failed, void* stream) {
    *failed = ~std::size_t{0};
    return batch(to, from, bytes, count, attributes, first, kinds, stream);
}
#endif

}  // extern "C"
