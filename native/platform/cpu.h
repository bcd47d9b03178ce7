// The features of the processor that the system allows: asked once.
//
// On x86-64 it does not use __builtin_cpu_supports: zig's runtime library answers it with no, always.
#pragma once

#if defined(__x86_64__)

#include <cpuid.h>

#include <cstdint>

namespace moeinf::platform {

struct CpuFeatures {
    bool intel = false;
    bool sse42 = false;
    bool avx2 = false, fma = false, f16c = false;
    bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false;
    bool avx512vnni = false, avx512bf16 = false, avx512vpopcntdq = false;
    bool amx_tile = false, amx_int8 = false;
};

// The registers that the system saves when it switches threads (XCR0).
inline std::uint64_t saved_registers() noexcept {
    std::uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return std::uint64_t{high} << 32 | low;
}

inline CpuFeatures ask_cpu() noexcept {
    CpuFeatures has;
    std::uint32_t a = 0, b = 0, c = 0, d = 0;
    __get_cpuid(0, &a, &b, &c, &d);
    has.intel = b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return has;
    has.sse42 = c >> 20 & 1;
    constexpr std::uint64_t kAvx = 0x6, kAvx512 = 0xE6, kAmx = 0x60000;
    const std::uint64_t saved = c >> 27 & 1 ? saved_registers() : 0;
    if ((saved & kAvx) != kAvx) return has;
    has.fma = c >> 12 & 1;
    has.f16c = c >> 29 & 1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has;
    const std::uint32_t more = a;  // the last subleaf
    has.avx2 = b >> 5 & 1;
    const bool wide = (saved & kAvx512) == kAvx512;
    has.avx512f = wide && (b >> 16 & 1);
    has.avx512dq = wide && (b >> 17 & 1);
    has.avx512bw = wide && (b >> 30 & 1);
    has.avx512vl = wide && (b >> 31 & 1);
    has.avx512vnni = wide && (c >> 11 & 1);
    has.avx512vpopcntdq = wide && (c >> 14 & 1);
    const bool tiles = (saved & kAmx) == kAmx;
    has.amx_tile = tiles && (d >> 24 & 1);
    has.amx_int8 = tiles && (d >> 25 & 1);
    if (more >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) has.avx512bf16 = wide && (a >> 5 & 1);
    return has;
}

inline const CpuFeatures& cpu() noexcept {
    static const CpuFeatures has = ask_cpu();
    return has;
}

}  // namespace moeinf::platform

#elif defined(__aarch64__)

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

#include <cstddef>

namespace moeinf::platform {

struct CpuFeatures {
    bool dot_product = false;  // SDOT
    bool i8mm = false;         // SMMLA; only with dot_product
};

#if defined(__APPLE__)
inline bool system_has(const char* name) noexcept {
    int found = 0;
    std::size_t bytes = sizeof found;
    return sysctlbyname(name, &found, &bytes, nullptr, 0) == 0 && found != 0;
}

inline CpuFeatures ask_cpu() noexcept {
    const bool dot_product = system_has("hw.optional.arm.FEAT_DotProd");
    return {dot_product, dot_product && system_has("hw.optional.arm.FEAT_I8MM")};
}
#elif defined(__linux__)
inline CpuFeatures ask_cpu() noexcept {
    constexpr unsigned long kI8mm = 1ul << 13;  // HWCAP2_I8MM, newer than manylinux's headers
    const bool dot_product = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    return {dot_product, dot_product && (getauxval(AT_HWCAP2) & kI8mm) != 0};
}
#else
inline CpuFeatures ask_cpu() noexcept {
    return {};
}
#endif

inline const CpuFeatures& cpu() noexcept {
    static const CpuFeatures has = ask_cpu();
    return has;
}

}  // namespace moeinf::platform

#endif
