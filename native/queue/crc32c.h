// CRC-32C (Castagnoli) of a buffer, at memory speed where the processor has instructions for it.
// Does not know what the bytes are.
//
// The check is the reflected polynomial 0x82F63B78 with the register inverted before and after
// (RFC 3720 appendix B.4), so crc32c("123456789") == 0xE3069283.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace moeinf {

// Continues `crc`, the check of everything before `data`: crc32c(b, m, crc32c(a, n)) is the check
// of a then b, and 0 begins. Chooses the hardware path at run time, once per process.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0) noexcept;

// The ways to compute it that this processor has, fastest first; crc32c() takes the first. The table
// ("portable") always ends the list. Public so that tests and benchmarks compare them.
struct CrcPath {
    const char* name;  // "instruction" or "portable"
    std::uint32_t (*function)(const void* data, std::size_t bytes, std::uint32_t crc) noexcept;
};
std::span<const CrcPath> crc32c_paths() noexcept;

}  // namespace moeinf
