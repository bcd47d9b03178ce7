// Loads libcuda, checks every result, and passes arguments on.
#include "device/cuda_driver.h"

#include <algorithm>
#include <array>
#include <vector>

#include "device/cuda_calls.h"
#include "platform/library.h"

namespace moeinf {
using namespace cuda;

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

Driver::Driver(const std::string& library) : calls_(std::make_unique<Calls>()) {
    Calls& c = *calls_;
    std::string why;
    c.library = platform::open_library(library, why);
    if (c.library == nullptr) throw NoDriver(why);
    const auto find = [&c]<class Function>(Function& function, const char* name) {
        function = reinterpret_cast<Function>(platform::find_symbol(c.library, name));
        return function != nullptr;
    };
#define MOEINF_FIND(member, name, ...) find(c.member, #name)
#define MOEINF_NEED(member, name, ...) \
    if (!find(c.member, #name)) throw NoDriver("libcuda has no " #name);
    MOEINF_CUDA_CALLS(MOEINF_NEED)
    if (!MOEINF_CUDA_BATCH_V2(MOEINF_FIND)) MOEINF_CUDA_BATCH(MOEINF_FIND);
#undef MOEINF_FIND
#undef MOEINF_NEED
    check(c.init(0), "cuInit");
}

// Does not close the library: its own threads, and torch, may use it until the process ends.
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
    std::array<char, 32> bus{};  // "0000:65:00.0"
    std::size_t bytes = 0;
    check(calls_->device_get(&handle, device), "cuDeviceGet");
    check(calls_->device_name(name.data(), name.size() - 1, handle), "cuDeviceGetName");
    check(calls_->device_memory(&bytes, handle), "cuDeviceTotalMem");
    const int code = calls_->device_bus(bus.data(), bus.size() - 1, handle);
    return {name.data(), bytes, code == kSuccess ? bus.data() : ""};
}

bool Driver::has_batches() const noexcept {
    return calls_->batch != nullptr || calls_->batch_v2 != nullptr;
}

// Makes the context current; restores the thread's context stack when destroyed.
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
    const Calls* operator->() const noexcept { return driver_.calls_.get(); }

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
    allocated_ += bytes;
    return memory;
}

void Context::free(DevicePointer memory, std::size_t bytes) const noexcept try {
    const Current now(*this);
    now->free(memory);
    allocated_ -= bytes;
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
    driver_->check(now->event_create(&event, kSleepingEvent), "cuEventCreate");
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
