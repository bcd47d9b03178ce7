// The fake's NVML, with the calls that the product makes. The library also has NVML's name
// (fake_cuda.py), so a load of NVML finds it. `nvml=processes` enables it. `nvml=device` reports no
// figures per process, as in a container. `said=` replaces the figure for this process. Memory of
// others (`others=`) belongs to process 1. Included by fake_libcuda.cpp alone.
#pragma once

#include <unistd.h>

#include "fake_streams.h"

namespace fake {

struct ProcessMemory {  // nvmlProcessInfo_t
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

// The caller holds the lock.
inline std::size_t held_by_us() {
    const State& s = state();
    std::size_t held = s.retained > 0 ? s.context_bytes : 0;
    for (const auto& [base, bytes] : s.allocated) held += bytes;
    return held;
}

}  // namespace fake

extern "C" {

int nvmlInitWithFlags(unsigned) {
    const fake::Lock lock(fake::state().mutex);
    return fake::state().nvml.empty() ? fake::kNvmlNotFound : fake::kOk;
}

int nvmlShutdown() { return fake::kOk; }

const char* nvmlErrorString(int) { return "a test's"; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
    *device = &fake::primary;
    return std::string(bus) == "0000:65:00.0" ? fake::kOk : fake::kNvmlNotFound;
}

int nvmlDeviceGetMemoryInfo(void*, unsigned long long* info) {  // total, free, used
    const fake::State& s = fake::state();
    const fake::Lock lock(fake::state().mutex);
    info[0] = s.memory_bytes;
    info[2] = s.others_bytes + fake::held_by_us();
    info[1] = info[0] - std::min<unsigned long long>(info[0], info[2]);
    return fake::kOk;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, fake::ProcessMemory* found) {
    const fake::State& s = fake::state();
    const fake::Lock lock(fake::state().mutex);
    if (s.nvml == "device") {
        *count = 0;
        return fake::kOk;
    }
    const unsigned room = *count;
    *count = 2;
    if (room < 2 || found == nullptr) return fake::kNvmlTooSmall;
    found[0] = {1, s.others_bytes, 0, 0};
    found[1] = {static_cast<unsigned>(getpid()), s.said < 0 ? fake::held_by_us() : s.said, 0, 0};
    return fake::kOk;
}

}  // extern "C"
