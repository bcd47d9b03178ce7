// CRC-32C (Castagnoli) of a buffer, at memory speed where the processor has an instruction for it.
//
// The check uses the reflected polynomial 0x82F63B78, with the register inverted before and after
// (RFC 3720 appendix B.4). So crc32c("123456789") == 0xE3069283.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace moeinf {

// Continues `crc`, the check of all bytes before `data`; start with 0. crc32c(b, m, crc32c(a, n))
// is the check of a then b. Chooses the fastest path at run time, once per process.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0) noexcept;

// The implementations that this processor supports, fastest first; crc32c() uses the first. The
// table ("portable") is always last. Public so that tests and benchmarks can compare them.
struct CrcPath {
    const char* name;  // "instruction" or "portable"
    std::uint32_t (*function)(const void* data, std::size_t bytes, std::uint32_t crc) noexcept;
};
std::span<const CrcPath> crc32c_paths() noexcept;

}  // namespace moeinf
