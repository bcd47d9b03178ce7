// CRC-32C over GF(2) polynomials, sixteen 128-bit lanes at a time.
// Does not know what the bytes are.
//
// The bytes are a polynomial; its CRC is its remainder modulo P. A lane X with n more bits behind it
// counts X * x^n, and modulo P that is the same as (high of X) * (x^(n+64) mod P) + (low of X) *
// (x^n mod P), 96 bits that can be added to the lane n bits further on: X is folded into it.
//
//   memory    | lane 0 | lane 1 | ... | lane 15 | lane 0' | lane 1' | ...       256 bytes a step
//                  └───────── fold by 2048 bits ─────▲
//   end       lanes 0..15 --fold by 512, then by 128--> one lane --crc32 instruction--> register
//
// Bit order. CRC-32C is reflected: the first bit in memory, bit 0, is the highest power. Hence the
// *low* 64 bits of a lane are its high half. A constant is kept with x^0 at bit 63, and the product
// of two such words has x^0 at bit 126 instead of 127, which is a factor of x too many: constants
// are x^(n-1), not x^n. (Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ", Intel 2009.)
#include "queue/crc32c_fold.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#endif

namespace moeinf {

#if defined(__x86_64__)
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;

// a * b mod P, both reflected: bit 31 is x^0.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (int bit = 31; bit >= 0; --bit) {
        if ((a >> bit) & 1) product ^= b;
        b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
    }
    return product;
}

constexpr std::uint32_t power_of_x(unsigned exponent) {
    std::uint32_t power = 0x80000000, square = 0x40000000;
    for (; exponent != 0; exponent /= 2) {
        if (exponent % 2) power = multiply(power, square);
        square = multiply(square, square);
    }
    return power;
}
static_assert(power_of_x(32) == kPolynomial, "x^32 = P - x^32");

struct Fold {
    std::uint64_t first, second;  // for the low and the high 64 bits of a lane
};

constexpr Fold fold_by(unsigned bits) {
    return {std::uint64_t{power_of_x(bits + 64 - 1)} << 32,
            std::uint64_t{power_of_x(bits - 1)} << 32};
}

constexpr std::size_t kStepBytes = 256;
constexpr std::size_t kPrefetchBytes = 2048;  // ahead; 512 to 4096 measured alike
constexpr Fold kByStep = fold_by(8 * kStepBytes);
constexpr Fold kByRegister = fold_by(512);
constexpr Fold kByLane = fold_by(128);

#define MOEINF_FOLD __attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq,pclmul,sse4.2")))

MOEINF_FOLD inline __m128i constant(Fold fold) {
    return _mm_set_epi64x(static_cast<long long>(fold.second), static_cast<long long>(fold.first));
}

MOEINF_FOLD inline __m512i constant_for_all(Fold fold) {
    const auto first = static_cast<long long>(fold.first);
    const auto second = static_cast<long long>(fold.second);
    return _mm512_set4_epi64(second, first, second, first);
}

// Four lanes folded into the four of `next`: 0x96 is the exclusive or of all three.
MOEINF_FOLD inline __m512i fold(__m512i lanes, __m512i by, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00),
                                     _mm512_clmulepi64_epi128(lanes, by, 0x11), next, 0x96);
}

MOEINF_FOLD inline __m128i fold(__m128i lane, __m128i by, __m128i next) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(lane, by, 0x00),
                                       _mm_clmulepi64_si128(lane, by, 0x11)),
                         next);
}

}  // namespace

bool crc32c_can_fold() noexcept {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq") &&
           __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2");
}

MOEINF_FOLD std::uint32_t crc32c_fold(const void* data, std::size_t bytes,
                                      std::uint32_t crc) noexcept {
    const auto* at = static_cast<const unsigned char*>(data);
    std::uint64_t state = static_cast<std::uint32_t>(~crc);
    if (bytes >= 2 * kStepBytes) {
        __m512i x[4];
        for (int i = 0; i < 4; ++i) x[i] = _mm512_loadu_si512(at + 64 * i);
        const __m128i begun = _mm_cvtsi64_si128(static_cast<long long>(state));
        x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(begun));
        const __m512i by_step = constant_for_all(kByStep);
        for (at += kStepBytes, bytes -= kStepBytes; bytes >= kStepBytes;
             at += kStepBytes, bytes -= kStepBytes) {
            for (int i = 0; i < 4; ++i) {
                _mm_prefetch(reinterpret_cast<const char*>(at) + kPrefetchBytes + 64 * i,
                             _MM_HINT_T0);
                x[i] = fold(x[i], by_step, _mm512_loadu_si512(at + 64 * i));
            }
        }
        const __m512i by_register = constant_for_all(kByRegister);
        for (int i = 1; i < 4; ++i) x[i] = fold(x[i - 1], by_register, x[i]);
        const __m128i by_lane = constant(kByLane);
        __m128i lane = _mm512_extracti64x2_epi64(x[3], 0);
        lane = fold(lane, by_lane, _mm512_extracti64x2_epi64(x[3], 1));
        lane = fold(lane, by_lane, _mm512_extracti64x2_epi64(x[3], 2));
        lane = fold(lane, by_lane, _mm512_extracti64x2_epi64(x[3], 3));
        state = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_extract_epi64(lane, 0)));
        state = _mm_crc32_u64(state, static_cast<std::uint64_t>(_mm_extract_epi64(lane, 1)));
    }
    for (; bytes >= 8; at += 8, bytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, at, sizeof word);
        state = _mm_crc32_u64(state, word);
    }
    auto narrow = static_cast<std::uint32_t>(state);
    for (; bytes != 0; ++at, --bytes) narrow = _mm_crc32_u8(narrow, *at);
    return ~narrow;
}

#else

bool crc32c_can_fold() noexcept {
    return false;
}

std::uint32_t crc32c_fold(const void*, std::size_t, std::uint32_t) noexcept {
    return 0;
}

#endif

}  // namespace moeinf
