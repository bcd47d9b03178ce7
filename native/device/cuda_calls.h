// The used part of the CUDA driver's binary interface: one list of calls, and their types.
// tests/native/test_cuda_header.py compares all of it with NVIDIA's cuda.h.
#pragma once

#include <cstddef>

#include "device/cuda_driver.h"

namespace moeinf::cuda {

// Values fixed by the binary interface.
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kOutOfMemory = 2;
inline constexpr int kNotReady = 600;
inline constexpr int kNotSupported = 801;
inline constexpr unsigned kNonBlockingStream = 1;
// A thread that waits for an event sleeps. A spinning wait would take a core from the CPU kernels.
inline constexpr unsigned kSleepingEvent = 1 | 2;  // without timing
inline constexpr unsigned kPortable = 1;  // page-locked for every context
inline constexpr int kSourceInStreamOrder = 1;

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

// X(member, the library's name, types of the arguments); each returns a CUresult. Every driver
// since CUDA 4 exports the names with _v2, for 64-bit sizes.
#define MOEINF_CUDA_CALLS(X)                                                                   \
    X(init, cuInit, unsigned)                                                                  \
    X(version, cuDriverGetVersion, int*)                                                       \
    X(error_name, cuGetErrorName, int, const char**)                                           \
    X(error_words, cuGetErrorString, int, const char**)                                        \
    X(device_count, cuDeviceGetCount, int*)                                                    \
    X(device_get, cuDeviceGet, int*, int)                                                      \
    X(device_name, cuDeviceGetName, char*, int, int)                                           \
    X(device_memory, cuDeviceTotalMem_v2, std::size_t*, int)                                   \
    X(device_bus, cuDeviceGetPCIBusId, char*, int, int)                                        \
    X(retain, cuDevicePrimaryCtxRetain, ContextHandle*, int)                                   \
    X(release, cuDevicePrimaryCtxRelease_v2, int)                                              \
    X(push, cuCtxPushCurrent_v2, ContextHandle)                                                \
    X(pop, cuCtxPopCurrent_v2, ContextHandle*)                                                 \
    X(memory_info, cuMemGetInfo_v2, std::size_t*, std::size_t*)                                \
    X(allocate, cuMemAlloc_v2, DevicePointer*, std::size_t)                                    \
    X(free, cuMemFree_v2, DevicePointer)                                                       \
    X(lock, cuMemHostRegister_v2, void*, std::size_t, unsigned)                                \
    X(unlock, cuMemHostUnregister, void*)                                                      \
    X(stream_create, cuStreamCreate, StreamHandle*, unsigned)                                  \
    X(stream_destroy, cuStreamDestroy_v2, StreamHandle)                                        \
    X(stream_synchronise, cuStreamSynchronize, StreamHandle)                                   \
    X(stream_wait, cuStreamWaitEvent, StreamHandle, EventHandle, unsigned)                     \
    X(event_create, cuEventCreate, EventHandle*, unsigned)                                     \
    X(event_destroy, cuEventDestroy_v2, EventHandle)                                           \
    X(event_record, cuEventRecord, EventHandle, StreamHandle)                                  \
    X(event_query, cuEventQuery, EventHandle)                                                  \
    X(event_synchronise, cuEventSynchronize, EventHandle)                                      \
    X(copy, cuMemcpyHtoDAsync_v2, DevicePointer, const void*, std::size_t, StreamHandle)

// Drivers of CUDA 12.8 have the first, with the index of the entry that failed. Drivers of CUDA 13
// have the second, and older drivers neither.
#define MOEINF_CUDA_BATCH(X)                                                                   \
    X(batch, cuMemcpyBatchAsync, DevicePointer*, DevicePointer*, std::size_t*, std::size_t,    \
      CopyAttributes*, std::size_t*, std::size_t, std::size_t*, StreamHandle)
#define MOEINF_CUDA_BATCH_V2(X)                                                                \
    X(batch_v2, cuMemcpyBatchAsync_v2, DevicePointer*, DevicePointer*, std::size_t*,           \
      std::size_t, CopyAttributes*, std::size_t*, std::size_t, StreamHandle)

struct Calls {
    void* library = nullptr;
#define MOEINF_MEMBER(member, name, ...) int (*member)(__VA_ARGS__) = nullptr;
    MOEINF_CUDA_CALLS(MOEINF_MEMBER)
    MOEINF_CUDA_BATCH(MOEINF_MEMBER)
    MOEINF_CUDA_BATCH_V2(MOEINF_MEMBER)
#undef MOEINF_MEMBER
};

}  // namespace moeinf::cuda
