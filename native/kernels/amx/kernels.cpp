// The products of many rows of activations, with AMX.
//
// A tile register has up to 16 rows of 64 bytes. TDPBSSD computes C[t][r] += Σ_k A[t][k] · B[k][r]:
//
//   A    the codes of a group, int8: a row per row of activations (RowSet)
//   B    code − zero of the group of 16 rows of weights, int8: a row per word (tiles.h)
//   C    the dot products, exact in int32
//
// So C has what the path avx512 computes with vpdpbusd. The steps after it are the same, in the same
// order, and so are the bits. Formats with half groups multiply each half by itself.
#include "kernels/kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/avx512/unpack.h"
#include "kernels/rows.h"
#include "platform/cpu.h"

#define MOEINF_AMX                                                                      \
    __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512vnni,f16c,fma")))

namespace moeinf {
namespace {

// The operand of LDTILECFG (Intel's Software Developer's Manual, volume 1, table 18-2).
struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14]{};
    std::uint16_t row_bytes[16]{};
    std::uint8_t rows[16]{};

    constexpr TileConfig(int lanes, bool halves) {
        const auto columns = static_cast<std::uint16_t>(halves ? kGroup / 2 : kGroup);
        for (int c = 0; c < 4; ++c) shape(c, lanes, 64);
        for (int a = 4; a < 6; ++a) shape(a, lanes, columns);
        for (int b = 6; b < 8; ++b) shape(b, columns / 4, 64);
    }

  private:
    constexpr void shape(int tile, int count, std::uint16_t bytes) {
        rows[tile] = static_cast<std::uint8_t>(count);
        row_bytes[tile] = bytes;
    }
};

using Dots = std::int32_t[kSetRows][kBlockRows];  // by row of activations and of weights

// Writes code − zero of a group, 8 words of 64 bytes.
template <Format format>
MOEINF_AVX512 MOEINF_INLINE void unpack_words(const std::byte* tile, std::size_t g,
                                              std::byte* out) {
    constexpr int kZero = has_minima(format) ? 0 : zero_of(format);
    __m512i codes[8];
    if constexpr (format == Format::kQ8) {
#pragma GCC unroll 8
        for (std::size_t v = 0; v < 8; ++v) codes[v] = codes_at(tile + 512 * g + 64 * v);
    } else if constexpr (is_interleaved(format)) {
#pragma GCC unroll 8
        for (std::size_t v = 0; v < 8; ++v) codes[v] = group_codes<format>(tile, g, v);
    } else {
        unpack<format>(tile + code_bytes(format) * g, codes);
    }
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(kZero));
#pragma GCC unroll 8
    for (std::size_t v = 0; v < 8; ++v)
        _mm512_store_si512(out + 64 * v, kZero == 0 ? codes[v] : _mm512_sub_epi8(codes[v], zero));
}

// Writes the dot products of a group, or of half of it, with registers c, a and b. GCC takes their
// numbers as text.
#define MOEINF_TILE_DOTS(c, a, b, codes, words, out) \
    _tile_loadd(a, codes, kGroup);                   \
    _tile_loadd(b, words, 64);                       \
    _tile_zero(c);                                   \
    _tile_dpbssd(c, a, b);                           \
    _tile_stored(c, out, 64)

// Multiplies a group with its rows. Odd groups have other registers, so that two are in flight.
template <Format format>
MOEINF_AMX MOEINF_INLINE void multiply(const std::byte* words, const RowSet& x, Dots* dots,
                                       bool odd) {
    const std::byte* const more = words + 4 * 64;  // of the second half group
    const std::int8_t* const codes = x.codes[0] + kGroup / 2;
    if (odd) {
        MOEINF_TILE_DOTS(2, 5, 7, x.codes, words, dots[0]);
        if constexpr (has_half_groups(format)) {
            MOEINF_TILE_DOTS(3, 5, 7, codes, more, dots[1]);
        }
    } else {
        MOEINF_TILE_DOTS(0, 4, 6, x.codes, words, dots[0]);
        if constexpr (has_half_groups(format)) {
            MOEINF_TILE_DOTS(1, 4, 6, codes, more, dots[1]);
        }
    }
}

// Adds group g of the rows to their sums.
template <Format format, int lanes>
MOEINF_AVX512 MOEINF_INLINE void add(const Dots* dots, const float (*scales)[kBlockRows],
                                     const RowSet& x, __m512* sums) {
    const __m512 one = _mm512_load_ps(scales[0]);
#pragma GCC unroll 16
    for (int t = 0; t < lanes; ++t) {
        const __m512 first = _mm512_cvtepi32_ps(_mm512_load_si512(dots[0][t]));
        const __m512 scale = _mm512_set1_ps(x.scales[t]);
        if constexpr (has_minima(format)) {
            const __m512 least =
                _mm512_mul_ps(_mm512_set1_ps(x.levels[t]), _mm512_load_ps(scales[1]));
            sums[t] = _mm512_fmadd_ps(_mm512_fmadd_ps(first, one, least), scale, sums[t]);
        } else if constexpr (has_half_groups(format)) {
            const __m512 second = _mm512_cvtepi32_ps(_mm512_load_si512(dots[1][t]));
            const __m512 product = _mm512_fmadd_ps(second, _mm512_load_ps(scales[1]),
                                                   _mm512_mul_ps(first, one));
            sums[t] = _mm512_fmadd_ps(product, scale, sums[t]);
        } else {
            sums[t] = _mm512_fmadd_ps(first, _mm512_mul_ps(one, scale), sums[t]);
        }
    }
}

// Writes the scales of all groups of a tile.
template <Format format>
MOEINF_AVX512 MOEINF_INLINE void scales_of(const std::byte* tile, float (*out)[2][kBlockRows]) {
    if constexpr (has_minima(format)) {
        scales_and_minima(tile, out);
    } else if constexpr (has_half_groups(format)) {
        half_scales<format>(tile, out);
    } else {
        for (std::size_t g = 0; g < kTileGroups; ++g) {
            const std::byte* const at =
                tile + kTileGroups * code_bytes(format) + scale_bytes(format) * kBlockRows * g;
            _mm512_store_ps(out[g][0], format == Format::kMxfp4 ? powers_at(at) : scales_at(at));
        }
    }
}

// Computes one block for a set of rows.
//
// Each group goes through three steps. They are kLag groups apart, since a step reads what the step
// before has stored, and such a load waits until the bytes are in the cache.
template <Format format, int lanes>
MOEINF_AMX void set_rows(const std::byte* block, std::size_t tiles, const RowSet* x,
                         float (*out)[kBlockRows]) {
    constexpr std::size_t kGroups = tile_columns(format) / kGroup, kLag = 2, kRing = 8;
    static_assert(kLag % 2 == 0 && kGroups % 2 == 0 && 2 * kLag < kRing);
    // Dots that are stored and dots that are loaded at the same time must not be multiples of 4 KiB
    // apart, where a load waits for a store.
    constexpr std::size_t kDots = has_half_groups(format) ? 3 : 1;
    static constexpr TileConfig config(lanes, has_half_groups(format));
    alignas(64) std::byte room[kRing][8 * 64];
    alignas(64) Dots dots[kRing][kDots];
    alignas(64) float scales[kRing][2][kBlockRows];
    __m512 sums[lanes];
#pragma GCC unroll 16
    for (int t = 0; t < lanes; ++t) sums[t] = _mm512_setzero_ps();
    _tile_loadconfig(&config);
    const std::byte* tile = block + factor_bytes(format);
    const std::size_t total = tiles * kGroups;
    for (std::size_t first = 0; first < total + 2 * kLag; first += kGroups) {
        const bool there = first < total;
        if (there) {
            prefetch<tile_bytes(format) / 64 * 64>(tile, 2 * tile_bytes(format));
            if constexpr (kGroups < kRing) scales_of<format>(tile, scales + first % kRing);
        }
#pragma GCC unroll 8
        for (std::size_t g = 0; g < kGroups; ++g) {
            const std::size_t n = first + g;
            if (there) unpack_words<format>(tile, g, room[n % kRing]);
            if (n >= kLag && n - kLag < total)
                multiply<format>(room[(n - kLag) % kRing], x[n - kLag], dots[(n - kLag) % kRing],
                                 g % 2);
            if (n >= 2 * kLag && n - 2 * kLag < total)
                add<format, lanes>(dots[(n - 2 * kLag) % kRing], scales[(n - 2 * kLag) % kRing],
                                   x[n - 2 * kLag], sums);
            if constexpr (kGroups == kRing)
                if (g == 2 * kLag - 1 && there) scales_of<format>(tile, scales);
        }
        tile += tile_bytes(format);
    }
    _tile_release();
#pragma GCC unroll 16
    for (int t = 0; t < lanes; ++t) {
        if constexpr (factor_bytes(format) > 0)
            sums[t] = _mm512_mul_ps(sums[t], _mm512_loadu_ps(block));
        _mm512_storeu_ps(out[t], sums[t]);
    }
}

template <Format format>
void set_loop(const std::byte* block, std::size_t tiles, const RowSet* x, std::size_t count,
              float (*out)[kBlockRows]) noexcept {
    if (count > 12)
        set_rows<format, 16>(block, tiles, x, out);
    else if (count > 8)
        set_rows<format, 12>(block, tiles, x, out);
    else if (count > 4)
        set_rows<format, 8>(block, tiles, x, out);
    else
        set_rows<format, 4>(block, tiles, x, out);
}

// Asks the kernel for the registers: Linux gives them to a process that wants them.
bool may_use_tiles() noexcept {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

}  // namespace

bool has_amx() noexcept {
    static const bool found = has_avx512() && platform::cpu().amx_tile &&
                              platform::cpu().amx_int8 && may_use_tiles();
    return found;
}

SetLoop amx_loop(Format format) noexcept {
    return set_loop_of(format, []<Format one>() -> SetLoop { return set_loop<one>; });
}

}  // namespace moeinf
#endif
