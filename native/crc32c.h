// CRC-32C (Castagnoli) of a buffer, at memory speed where the processor has the instruction.
// Does not know what the bytes are.
//
// The check is the reflected polynomial 0x82F63B78 with the register inverted before and after
// (RFC 3720 appendix B.4), so crc32c("123456789") == 0xE3069283.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeinf {

// Continues `crc`, the check of everything before `data`: crc32c(b, m, crc32c(a, n)) is the check
// of a then b, and 0 begins. Chooses the hardware path at run time, once per process.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0) noexcept;

// The table path (slicing by 8), which every processor can run. Public only so that tests compare.
std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc = 0) noexcept;

// True when crc32c() runs the processor's instruction.
bool crc32c_is_hardware() noexcept;

}  // namespace moeinf
