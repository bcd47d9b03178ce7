// CRC-32C: three interleaved streams of the crc32 instruction, or slicing by 8; chooses the path.
//
// Why three streams: the instruction takes 8 bytes with a latency of 3 cycles and a throughput of
// 1 per cycle. So one dependent chain runs at a third of the speed. A block of 3n bytes is cut into
// A, B and C, n bytes each, whose registers advance side by side:
//
//   |<---- A: n ---->|<---- B: n ---->|<---- C: n ---->|
//    starts at crc    starts at 0      starts at 0
//
// The register is linear over GF(2). So reading n more bytes is "append n zero bytes" xor the
// register of those n bytes started at 0. Appending zeros is a 32 x 32 bit matrix, held as four
// tables of 256 words:
//
//   crc(ABC) = shift(shift(crc(A)) ^ crc(B)) ^ crc(C)
#include "queue/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "platform/cpu.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define MOEINF_CRC_HARDWARE 1
#define MOEINF_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define MOEINF_CRC_HARDWARE 1
#define MOEINF_CRC_TARGET
#endif

namespace moeinf {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded lowest byte first");

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // x^32 + ... + 1, bit-reflected

using Table = std::array<std::uint32_t, 256>;

constexpr std::uint32_t advance_one_byte(std::uint32_t state) {
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) ? kPolynomial : 0);
    return state;
}

// kSlices[k][b]: the contribution of byte b when k more bytes follow it.
constexpr std::array<Table, 8> kSlices = [] {
    std::array<Table, 8> slices{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t state = byte;
        for (auto& slice : slices) slice[byte] = state = advance_one_byte(state);
    }
    return slices;
}();
static_assert(kSlices[0][128] == kPolynomial);

std::uint64_t load_word(const unsigned char* at) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

#ifdef MOEINF_CRC_HARDWARE

using Matrix = std::array<std::uint32_t, 32>;  // column i is the image of the register 1 << i
using Shift = std::array<Table, 4>;            // [k][b] is the image of the register b << 8k

constexpr std::uint32_t image_of(const Matrix& matrix, std::uint32_t state) {
    std::uint32_t image = 0;
    for (int i = 0; i < 32; ++i) image ^= ((state >> i) & 1) ? matrix[i] : 0;
    return image;
}

// Makes the shift that appends `bytes` zero bytes to a register. `bytes` is a power of two, so
// repeated squaring of the matrix reaches it.
constexpr Shift make_shift(std::size_t bytes) {
    Matrix matrix{};
    for (int i = 0; i < 32; ++i) matrix[i] = advance_one_byte(std::uint32_t{1} << i);
    for (; bytes > 1; bytes /= 2) {
        Matrix squared{};
        for (int i = 0; i < 32; ++i) squared[i] = image_of(matrix, matrix[i]);
        matrix = squared;
    }
    Shift shift{};
    for (int k = 0; k < 4; ++k)
        for (std::uint32_t byte = 0; byte < 256; ++byte)
            shift[k][byte] = image_of(matrix, byte << (8 * k));
    return shift;
}

// Long blocks hide the cost of joining (two shifts, ~20 cycles); short blocks leave a small rest.
constexpr std::size_t kLongBytes = 8192;
constexpr std::size_t kShortBytes = 256;
static_assert(std::has_single_bit(kLongBytes) && std::has_single_bit(kShortBytes), "make_shift");
static_assert(kLongBytes % 8 == 0 && kShortBytes % 8 == 0, "streams are whole words");
constexpr Shift kLongShift = make_shift(kLongBytes);
constexpr Shift kShortShift = make_shift(kShortBytes);

std::uint32_t apply(const Shift& shift, std::uint32_t state) {
    return shift[0][state & 255] ^ shift[1][(state >> 8) & 255] ^ shift[2][(state >> 16) & 255] ^
           shift[3][state >> 24];
}

#if defined(__x86_64__)
MOEINF_CRC_TARGET inline std::uint64_t step_word(std::uint64_t state, std::uint64_t word) {
    return _mm_crc32_u64(state, word);
}
MOEINF_CRC_TARGET inline std::uint32_t step_byte(std::uint32_t state, unsigned char byte) {
    return _mm_crc32_u8(state, byte);
}
bool has_instruction() {
    return platform::cpu().sse42;
}
#else
inline std::uint64_t step_word(std::uint64_t state, std::uint64_t word) {
    return __crc32cd(static_cast<std::uint32_t>(state), word);
}
inline std::uint32_t step_byte(std::uint32_t state, unsigned char byte) {
    return __crc32cb(state, byte);
}
bool has_instruction() {
    return true;
}  // __ARM_FEATURE_CRC32 promises it
#endif

// Consumes whole blocks of three streams of `stream` bytes from the front of [at, end).
MOEINF_CRC_TARGET std::uint64_t run_streams(std::uint64_t state, const unsigned char*& at,
                                            const unsigned char* end, std::size_t stream,
                                            const Shift& shift) {
    for (; static_cast<std::size_t>(end - at) >= 3 * stream; at += 3 * stream) {
        std::uint64_t a = state, b = 0, c = 0;
        const unsigned char* const a_end = at + stream;
        for (const unsigned char* p = at; p != a_end; p += 8) {
            a = step_word(a, load_word(p));
            b = step_word(b, load_word(p + stream));
            c = step_word(c, load_word(p + 2 * stream));
        }
        const auto ab = apply(shift, static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
        state = apply(shift, ab) ^ static_cast<std::uint32_t>(c);
    }
    return state;
}

MOEINF_CRC_TARGET std::uint32_t crc32c_hardware(const void* data, std::size_t bytes,
                                                std::uint32_t crc) noexcept {
    const auto* at = static_cast<const unsigned char*>(data);
    const auto* const end = at + bytes;
    std::uint64_t state = ~crc;
    state = run_streams(state, at, end, kLongBytes, kLongShift);
    state = run_streams(state, at, end, kShortBytes, kShortShift);
    for (; end - at >= 8; at += 8) state = step_word(state, load_word(at));
    auto narrow = static_cast<std::uint32_t>(state);
    for (; at != end; ++at) narrow = step_byte(narrow, *at);
    return ~narrow;
}

#endif  // MOEINF_CRC_HARDWARE

std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc) noexcept {
    const auto* at = static_cast<const unsigned char*>(data);
    const auto* const end = at + bytes;
    std::uint32_t state = ~crc;
    for (; end - at >= 8; at += 8) {
        std::uint64_t word = load_word(at) ^ state;
        state = 0;
        for (int k = 7; k >= 0; --k, word >>= 8) state ^= kSlices[k][word & 255];
    }
    for (; at != end; ++at) state = (state >> 8) ^ kSlices[0][(state ^ *at) & 255];
    return ~state;
}

struct Paths {
    std::array<CrcPath, 2> list{};
    std::size_t count = 0;

    Paths() noexcept {
#ifdef MOEINF_CRC_HARDWARE
        if (has_instruction()) list[count++] = {"instruction", crc32c_hardware};
#endif
        list[count++] = {"portable", crc32c_portable};
    }
};

}  // namespace

std::span<const CrcPath> crc32c_paths() noexcept {
    static const Paths paths;
    return {paths.list.data(), paths.count};
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc) noexcept {
    return crc32c_paths().front().function(data, bytes, crc);
}

}  // namespace moeinf
