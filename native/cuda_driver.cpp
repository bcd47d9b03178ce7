// Loads libcuda, checks every result, and passes arguments on.
// Does not know what is copied or why.
#include "cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <vector>

namespace moeinf {
namespace {

// Values of the driver's interface, which never change.
constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kNotReady = 600;
constexpr int kNotSupported = 801;
constexpr unsigned kNonBlockingStream = 1;
constexpr unsigned kEventWithoutTiming = 2;
constexpr unsigned kPortable = 1;  // page-locked for every context
constexpr int kSourceInStreamOrder = 1;

struct Location {
    int type;  // 0: no hint
    int id;
};
struct CopyAttributes {
    int source_order;
    Location source_hint;
    Location target_hint;
    unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24, "as CUmemcpyAttributes");

}  // namespace

DriverError::DriverError(const char* call, int code, std::string name, const std::string& words)
    : std::runtime_error(std::string(call) + ": " + name + (words.empty() ? "" : ": " + words)),
      call_(call),
      code_(code),
      name_(std::move(name)) {}

bool DriverError::out_of_memory() const noexcept {
    return code_ == kOutOfMemory;
}

bool DriverError::unsupported() const noexcept {
    return code_ == kNotSupported || code_ == kInvalidValue;
}

// The names with _v2 are those that every driver since CUDA 4 exports for 64-bit sizes.
struct Driver::Calls {
    void* library = nullptr;
    int (*init)(unsigned) = nullptr;
    int (*version)(int*) = nullptr;
    int (*error_name)(int, const char**) = nullptr;
    int (*error_words)(int, const char**) = nullptr;
    int (*device_count)(int*) = nullptr;
    int (*device_get)(int*, int) = nullptr;
    int (*device_name)(char*, int, int) = nullptr;
    int (*device_memory)(std::size_t*, int) = nullptr;
    int (*retain)(ContextHandle*, int) = nullptr;
    int (*release)(int) = nullptr;
    int (*push)(ContextHandle) = nullptr;
    int (*pop)(ContextHandle*) = nullptr;
    int (*memory_info)(std::size_t*, std::size_t*) = nullptr;
    int (*allocate)(DevicePointer*, std::size_t) = nullptr;
    int (*free)(DevicePointer) = nullptr;
    int (*lock)(void*, std::size_t, unsigned) = nullptr;
    int (*unlock)(void*) = nullptr;
    int (*stream_create)(StreamHandle*, unsigned) = nullptr;
    int (*stream_destroy)(StreamHandle) = nullptr;
    int (*stream_synchronise)(StreamHandle) = nullptr;
    int (*stream_wait)(StreamHandle, EventHandle, unsigned) = nullptr;
    int (*event_create)(EventHandle*, unsigned) = nullptr;
    int (*event_destroy)(EventHandle) = nullptr;
    int (*event_record)(EventHandle, StreamHandle) = nullptr;
    int (*event_query)(EventHandle) = nullptr;
    int (*event_synchronise)(EventHandle) = nullptr;
    int (*copy)(DevicePointer, const void*, std::size_t, StreamHandle) = nullptr;
    // CUDA 12.8 has the first, with the index of the entry that failed; CUDA 13 the second.
    int (*batch)(DevicePointer*, DevicePointer*, std::size_t*, std::size_t, CopyAttributes*,
                 std::size_t*, std::size_t, std::size_t*, StreamHandle) = nullptr;
    int (*batch_v2)(DevicePointer*, DevicePointer*, std::size_t*, std::size_t, CopyAttributes*,
                    std::size_t*, std::size_t, StreamHandle) = nullptr;

    template <class Function>
    bool find(Function& function, const char* name) const {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function != nullptr;
    }
    template <class Function>
    void need(Function& function, const char* name) const {
        if (!find(function, name)) throw NoDriver(std::string("libcuda has no ") + name);
    }
};

Driver::Driver(const std::string& library) : calls_(std::make_unique<Calls>()) {
    Calls& c = *calls_;
    c.library = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (c.library == nullptr) {
        const char* const why = dlerror();
        throw NoDriver(why != nullptr ? why : library + " cannot be opened");
    }
    c.need(c.init, "cuInit");
    c.need(c.version, "cuDriverGetVersion");
    c.need(c.error_name, "cuGetErrorName");
    c.need(c.error_words, "cuGetErrorString");
    c.need(c.device_count, "cuDeviceGetCount");
    c.need(c.device_get, "cuDeviceGet");
    c.need(c.device_name, "cuDeviceGetName");
    c.need(c.device_memory, "cuDeviceTotalMem_v2");
    c.need(c.retain, "cuDevicePrimaryCtxRetain");
    c.need(c.release, "cuDevicePrimaryCtxRelease_v2");
    c.need(c.push, "cuCtxPushCurrent_v2");
    c.need(c.pop, "cuCtxPopCurrent_v2");
    c.need(c.memory_info, "cuMemGetInfo_v2");
    c.need(c.allocate, "cuMemAlloc_v2");
    c.need(c.free, "cuMemFree_v2");
    c.need(c.lock, "cuMemHostRegister_v2");
    c.need(c.unlock, "cuMemHostUnregister");
    c.need(c.stream_create, "cuStreamCreate");
    c.need(c.stream_destroy, "cuStreamDestroy_v2");
    c.need(c.stream_synchronise, "cuStreamSynchronize");
    c.need(c.stream_wait, "cuStreamWaitEvent");
    c.need(c.event_create, "cuEventCreate");
    c.need(c.event_destroy, "cuEventDestroy_v2");
    c.need(c.event_record, "cuEventRecord");
    c.need(c.event_query, "cuEventQuery");
    c.need(c.event_synchronise, "cuEventSynchronize");
    c.need(c.copy, "cuMemcpyHtoDAsync_v2");
    if (!c.find(c.batch_v2, "cuMemcpyBatchAsync_v2")) c.find(c.batch, "cuMemcpyBatchAsync");
    check(c.init(0), "cuInit");
}

// The library stays: its own threads, and torch, may use it until the process ends.
Driver::~Driver() = default;

void Driver::check(int code, const char* call) const {
    if (code == kSuccess) return;
    const char* name = nullptr;
    const char* words = nullptr;
    if (calls_->error_name(code, &name) != kSuccess || name == nullptr) name = nullptr;
    if (calls_->error_words(code, &words) != kSuccess || words == nullptr) words = "";
    throw DriverError(call, code, name != nullptr ? name : "error " + std::to_string(code), words);
}

int Driver::version() const {
    int version = 0;
    check(calls_->version(&version), "cuDriverGetVersion");
    return version;
}

int Driver::devices() const {
    int count = 0;
    check(calls_->device_count(&count), "cuDeviceGetCount");
    return count;
}

DeviceInfo Driver::info(int device) const {
    int handle = 0;
    std::array<char, 256> name{};
    std::size_t bytes = 0;
    check(calls_->device_get(&handle, device), "cuDeviceGet");
    check(calls_->device_name(name.data(), name.size() - 1, handle), "cuDeviceGetName");
    check(calls_->device_memory(&bytes, handle), "cuDeviceTotalMem");
    return {name.data(), bytes};
}

bool Driver::has_batches() const noexcept {
    return calls_->batch != nullptr || calls_->batch_v2 != nullptr;
}

// Makes the context current; leaves the thread's stack of contexts as it was.
class Context::Current {
  public:
    explicit Current(const Context& context) : driver_(*context.driver_) {
        driver_.check(driver_.calls_->push(context.handle_), "cuCtxPushCurrent");
    }
    ~Current() {
        ContextHandle popped = nullptr;
        driver_.calls_->pop(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const Driver::Calls* operator->() const noexcept { return driver_.calls_.get(); }

  private:
    const Driver& driver_;
};

Context::Context(std::shared_ptr<Driver> driver, int device) : driver_(std::move(driver)) {
    driver_->check(driver_->calls_->device_get(&device_, device), "cuDeviceGet");
    driver_->check(driver_->calls_->retain(&handle_, device_), "cuDevicePrimaryCtxRetain");
}

Context::~Context() {
    driver_->calls_->release(device_);
}

MemoryInfo Context::memory() const {
    const Current now(*this);
    MemoryInfo info{};
    driver_->check(now->memory_info(&info.free_bytes, &info.total_bytes), "cuMemGetInfo");
    return info;
}

DevicePointer Context::allocate(std::size_t bytes) const {
    const Current now(*this);
    DevicePointer memory = 0;
    driver_->check(now->allocate(&memory, bytes), "cuMemAlloc");
    return memory;
}

void Context::free(DevicePointer memory) const noexcept try {
    const Current now(*this);
    now->free(memory);
} catch (const DriverError&) {
}

void Context::lock(void* host, std::size_t bytes) const {
    const Current now(*this);
    driver_->check(now->lock(host, bytes, kPortable), "cuMemHostRegister");
}

void Context::unlock(void* host) const noexcept try {
    const Current now(*this);
    now->unlock(host);
} catch (const DriverError&) {
}

StreamHandle Context::make_stream() const {
    const Current now(*this);
    StreamHandle stream = nullptr;
    driver_->check(now->stream_create(&stream, kNonBlockingStream), "cuStreamCreate");
    return stream;
}

void Context::destroy_stream(StreamHandle stream) const noexcept try {
    const Current now(*this);
    now->stream_destroy(stream);
} catch (const DriverError&) {
}

void Context::synchronise(StreamHandle stream) const {
    const Current now(*this);
    driver_->check(now->stream_synchronise(stream), "cuStreamSynchronize");
}

EventHandle Context::make_event() const {
    const Current now(*this);
    EventHandle event = nullptr;
    driver_->check(now->event_create(&event, kEventWithoutTiming), "cuEventCreate");
    return event;
}

void Context::destroy_event(EventHandle event) const noexcept try {
    const Current now(*this);
    now->event_destroy(event);
} catch (const DriverError&) {
}

void Context::record(EventHandle event, StreamHandle stream) const {
    const Current now(*this);
    driver_->check(now->event_record(event, stream), "cuEventRecord");
}

void Context::wait(StreamHandle stream, EventHandle event) const {
    const Current now(*this);
    driver_->check(now->stream_wait(stream, event, 0), "cuStreamWaitEvent");
}

bool Context::done(EventHandle event) const {
    const Current now(*this);
    const int code = now->event_query(event);
    if (code == kNotReady) return false;
    driver_->check(code, "cuEventQuery");
    return true;
}

void Context::synchronise_event(EventHandle event) const {
    const Current now(*this);
    driver_->check(now->event_synchronise(event), "cuEventSynchronize");
}

void Context::copy(const DeviceCopy& copy, StreamHandle stream) const {
    const Current now(*this);
    driver_->check(now->copy(copy.to, copy.from, copy.bytes, stream), "cuMemcpyHtoDAsync");
}

void Context::copy_batch(std::span<const DeviceCopy> copies, StreamHandle stream) const {
    const Current now(*this);
    std::vector<DevicePointer> to, from;
    std::vector<std::size_t> bytes;
    for (const DeviceCopy& copy : copies) {
        to.push_back(copy.to);
        from.push_back(reinterpret_cast<std::uintptr_t>(copy.from));
        bytes.push_back(copy.bytes);
    }
    CopyAttributes all{kSourceInStreamOrder, {}, {}, 0};
    std::size_t first = 0;
    std::size_t failed = 0;
    const int code = now->batch_v2 != nullptr
                         ? now->batch_v2(to.data(), from.data(), bytes.data(), copies.size(), &all,
                                         &first, 1, stream)
                         : now->batch(to.data(), from.data(), bytes.data(), copies.size(), &all,
                                      &first, 1, &failed, stream);
    driver_->check(code, "cuMemcpyBatchAsync");
}

}  // namespace moeinf
