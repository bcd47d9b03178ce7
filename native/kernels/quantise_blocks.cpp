// Searches scales and minima with GCC's vectors, one row per lane, and writes interleaved blocks.
#include "kernels/quantise_blocks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/expert_ffn.h"
#include "kernels/kernels.h"
#include "kernels/quantise.h"
#include "kernels/tile_values.h"

namespace moeinf {
namespace {

constexpr std::size_t kSuper = 256, kGroups = kSuper / kGroup, kHalf = 16;
constexpr float kRounder = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, ties to even
constexpr float kMost6 = 63.0f;          // of scales and minima of q4k and q5k

template <std::size_t lanes>
struct Wide {
    using Floats [[gnu::vector_size(lanes * 4)]] = float;
    using Ints [[gnu::vector_size(lanes * 4)]] = std::int32_t;
};

#define MOEINF_INLINE __attribute__((always_inline)) inline

// Codes are round((x − least) · (most + wider) / range + shift): clipped at both ends where wider
// is positive, by unequal shares.
struct Range {
    float wider, shift;
};
constexpr Range kRanges[] = {{0.0f, 0.0f},  {-1.0f, 0.5f}, {-0.5f, 0.25f}, {0.5f, -0.25f},
                             {1.0f, -0.5f}, {1.5f, -0.75f}, {2.0f, -1.0f}, {1.0f, 0.0f},
                             {1.0f, -1.0f}, {2.0f, 0.0f},  {2.0f, -2.0f},  {3.0f, -1.5f}};
constexpr float kSteps6[] = {-32.0f, -30.8f, -31.2f, -31.6f, -32.4f, -32.8f, -33.2f, 31.0f, 31.4f};

// The weights of a row block, 256 columns of 16 rows, and what becomes of them.
struct Block {
    float x[kSuper][kBlockRows];
    std::uint8_t codes[kSuper][kBlockRows];
    std::uint16_t d[kBlockRows], dmin[kBlockRows];
    std::uint8_t scales[2 * kGroups][kBlockRows];  // q6k: int8, of half groups
    std::uint8_t minima[kGroups][kBlockRows];
};

template <class Floats>
MOEINF_INLINE Floats rounded(const Floats& x, float least, float most) {
    Floats q = (x + kRounder) - kRounder;
    q = q > least ? q : Floats{} + least;  // also NaN
    return q < most ? q : Floats{} + most;
}

template <class Floats>
MOEINF_INLINE Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// Returns 1 / x, or 0 where x is 0 or not finite.
template <class Floats>
MOEINF_INLINE Floats inverse(const Floats& x) {
    const Floats found = 1.0f / (x != 0.0f ? x : Floats{} + 1.0f);
    const auto usable = x != 0.0f && x - x == 0.0f && found - found == 0.0f;
    return usable ? found : Floats{};
}

// Rounds values of rows first … to float16; returns what was kept.
template <std::size_t lanes>
MOEINF_INLINE typename Wide<lanes>::Floats keep_half(const typename Wide<lanes>::Floats& values,
                                                     std::uint16_t* halves) {
    typename Wide<lanes>::Floats kept{};
    for (std::size_t r = 0; r < lanes; ++r) {
        halves[r] = float_to_half(values[r]);
        kept[r] = half_to_float(halves[r]);
    }
    return kept;
}

template <std::size_t lanes>
MOEINF_INLINE void keep_bytes(const typename Wide<lanes>::Floats& values, std::uint8_t* bytes) {
    for (std::size_t r = 0; r < lanes; ++r)
        bytes[r] = static_cast<std::uint8_t>(static_cast<int>(values[r]));
}

// Finds the scale and minimum, neither negative, of the group of 32 weights at `x`.
template <std::size_t lanes, int most>
MOEINF_INLINE void fit(const typename Wide<lanes>::Floats* x, typename Wide<lanes>::Floats& scale,
                       typename Wide<lanes>::Floats& minimum) {
    using Floats = typename Wide<lanes>::Floats;
    constexpr float n = kGroup;
    Floats low{}, high = x[0], sum{};
    for (std::size_t k = 0; k < kGroup; ++k) {
        low = x[k] < low ? x[k] : low;
        high = x[k] > high ? x[k] : high;
        sum += x[k];
    }
    const Floats per_code = inverse<Floats>(high - low);
    Floats best{};
    scale = Floats{};
    minimum = sum < 0.0f ? sum * (-1.0f / n) : Floats{};
    best = minimum * minimum * n;
    for (const Range& range : kRanges) {
        const Floats factor = per_code * (most + range.wider);
        Floats l{}, ll{}, xl{};
        for (std::size_t k = 0; k < kGroup; ++k) {
            const Floats q = rounded((x[k] - low) * factor + range.shift, 0.0f, most);
            l += q;
            ll += q * q;
            xl += x[k] * q;
        }
        const Floats spread = n * ll - l * l;
        Floats s = (n * xl - sum * l) * inverse<Floats>(spread);
        Floats m = (s * l - sum) * (1.0f / n);
        const auto above = m < 0.0f;  // the least-squares minimum is no minimum
        s = above ? xl * inverse<Floats>(ll) : s;
        m = above ? Floats{} : m;
        // The squared error is Σ x² less this.
        const Floats gain = 2.0f * (s * xl - m * sum) - (s * s * ll - 2.0f * s * m * l + n * m * m);
        const auto better = gain > best && s > 0.0f;
        best = better ? gain : best;
        scale = better ? s : scale;
        minimum = better ? m : minimum;
    }
}

// Chooses the 6-bit scale and minimum of a group, in units of d and dmin, and its codes.
template <std::size_t lanes, int most>
MOEINF_INLINE void settle(const typename Wide<lanes>::Floats* x,
                          const typename Wide<lanes>::Floats& scale,
                          const typename Wide<lanes>::Floats& minimum,
                          const typename Wide<lanes>::Floats& d,
                          const typename Wide<lanes>::Floats& dmin, std::size_t group,
                          std::size_t first, Block& block) {
    using Floats = typename Wide<lanes>::Floats;
    constexpr float n = kGroup;
    const Floats per_minimum = inverse<Floats>(dmin);
    const Floats middle = rounded(scale * inverse<Floats>(d), 0.0f, kMost6);
    const Floats usual = rounded(minimum * per_minimum, 0.0f, kMost6);
    Floats best{}, s_best = middle, m_best = usual, sum{};
    for (std::size_t k = 0; k < kGroup; ++k) sum += x[k];
    for (const float step : {0.0f, -1.0f, 1.0f}) {
        const Floats s = rounded(middle + step, 0.0f, kMost6);
        const Floats unit = d * s, per_code = inverse<Floats>(unit), least = dmin * usual;
        Floats l{}, ll{}, xl{};
        for (std::size_t k = 0; k < kGroup; ++k) {
            const Floats q = rounded((x[k] + least) * per_code, 0.0f, most);
            l += q;
            ll += q * q;
            xl += x[k] * q;
        }
        const Floats fitted = (unit * l - sum) * (1.0f / n) * per_minimum;
        const Floats m = rounded(fitted, 0.0f, kMost6), kept = dmin * m;
        const Floats gain = 2.0f * (unit * xl - kept * sum) -
                            (unit * unit * ll - 2.0f * unit * kept * l + n * kept * kept);
        const auto better = gain > best;
        best = better ? gain : best;
        s_best = better ? s : s_best;
        m_best = better ? m : m_best;
    }
    const Floats per_code = inverse<Floats>(d * s_best), least = dmin * m_best;
    for (std::size_t k = 0; k < kGroup; ++k)
        keep_bytes<lanes>(rounded((x[k] + least) * per_code, 0.0f, most),
                          block.codes[group * kGroup + k] + first);
    keep_bytes<lanes>(s_best, block.scales[group] + first);
    keep_bytes<lanes>(m_best, block.minima[group] + first);
}

// Loads the weights of rows first …; returns NaN for a row with NaN or infinity, else 0. Such a row
// becomes zeros.
template <std::size_t lanes>
MOEINF_INLINE typename Wide<lanes>::Floats clean(const Block& block, std::size_t first,
                                                 typename Wide<lanes>::Floats* x) {
    using Floats = typename Wide<lanes>::Floats;
    Floats bad{};
    for (std::size_t k = 0; k < kSuper; ++k) {
        x[k] = load<Floats>(block.x[k] + first);
        bad += x[k] - x[k];
    }
    for (std::size_t k = 0; k < kSuper; ++k) x[k] = bad == 0.0f ? x[k] : Floats{};
    return bad;
}

template <std::size_t lanes, int most>
MOEINF_INLINE void search_minima(Block& block, std::size_t first) {
    using Floats = typename Wide<lanes>::Floats;
    Floats x[kSuper], scales[kGroups], minima[kGroups], largest{}, deepest{};
    const Floats bad = clean<lanes>(block, first, x);
    for (std::size_t g = 0; g < kGroups; ++g) {
        fit<lanes, most>(x + g * kGroup, scales[g], minima[g]);
        largest = scales[g] > largest ? scales[g] : largest;
        deepest = minima[g] > deepest ? minima[g] : deepest;
    }
    const Floats d = keep_half<lanes>(largest * (1.0f / kMost6), block.d + first);
    const Floats dmin = keep_half<lanes>(deepest * (1.0f / kMost6), block.dmin + first);
    for (std::size_t g = 0; g < kGroups; ++g)
        settle<lanes, most>(x + g * kGroup, scales[g], minima[g], d, dmin, g, first, block);
    for (std::size_t r = 0; r < lanes; ++r)
        if (bad[r] != 0.0f) block.d[first + r] = float_to_half(bad[r]);
}

template <std::size_t lanes>
MOEINF_INLINE void search_halves(Block& block, std::size_t first) {
    using Floats = typename Wide<lanes>::Floats;
    Floats x[kSuper], scales[2 * kGroups], largest{}, magnitude{};
    const Floats bad = clean<lanes>(block, first, x);
    for (std::size_t h = 0; h < 2 * kGroups; ++h) {
        const Floats* const half = x + h * kHalf;
        Floats peak{}, size{}, best{};
        for (std::size_t k = 0; k < kHalf; ++k) {
            const Floats much = half[k] < 0.0f ? -half[k] : half[k];
            peak = much > size ? half[k] : peak;
            size = much > size ? much : size;
        }
        const Floats per_code = inverse<Floats>(peak);
        scales[h] = Floats{};
        for (const float step : kSteps6) {
            Floats xq{}, qq{};
            for (std::size_t k = 0; k < kHalf; ++k) {
                const Floats q = rounded(half[k] * (per_code * step), -32.0f, 31.0f);
                xq += half[k] * q;
                qq += q * q;
            }
            const Floats scale = xq * inverse<Floats>(qq), score = xq * scale;
            scales[h] = score > best ? scale : scales[h];
            best = score > best ? score : best;
        }
        const Floats much = scales[h] < 0.0f ? -scales[h] : scales[h];
        largest = much > magnitude ? scales[h] : largest;
        magnitude = much > magnitude ? much : magnitude;
    }
    const Floats d = keep_half<lanes>(largest * (-1.0f / 128), block.d + first);
    const Floats per_scale = inverse<Floats>(d);
    for (std::size_t h = 0; h < 2 * kGroups; ++h) {
        const Floats scale = rounded(scales[h] * per_scale, -128.0f, 127.0f);
        const Floats per_code = inverse<Floats>(d * scale);
        keep_bytes<lanes>(scale, block.scales[h] + first);
        for (std::size_t k = 0; k < kHalf; ++k)
            keep_bytes<lanes>(rounded(x[h * kHalf + k] * per_code, -32.0f, 31.0f) + 32.0f,
                              block.codes[h * kHalf + k] + first);
    }
    for (std::size_t r = 0; r < lanes; ++r)
        if (bad[r] != 0.0f) block.d[first + r] = float_to_half(bad[r]);
}

// Writes the words of row r into `bytes`, as GGUF has them.
void pack_minima(const Block& block, std::size_t r, bool five, std::uint8_t* bytes) {
    std::memcpy(bytes, &block.d[r], 2);
    std::memcpy(bytes + 2, &block.dmin[r], 2);
    for (std::size_t j = 0; j < 4; ++j) {
        const unsigned s = block.scales[j][r], m = block.minima[j][r];
        const unsigned s4 = block.scales[4 + j][r], m4 = block.minima[4 + j][r];
        bytes[4 + j] = static_cast<std::uint8_t>(s | s4 >> 4 << 6);
        bytes[8 + j] = static_cast<std::uint8_t>(m | m4 >> 4 << 6);
        bytes[12 + j] = static_cast<std::uint8_t>((s4 & 15) | (m4 & 15) << 4);
    }
    std::uint8_t* low = bytes + 16;
    if (five) {
        for (std::size_t k = 0; k < kGroup; ++k) {
            unsigned high = 0;
            for (std::size_t g = 0; g < kGroups; ++g)
                high |= static_cast<unsigned>(block.codes[g * kGroup + k][r] >> 4) << g;
            *low++ = static_cast<std::uint8_t>(high);
        }
    }
    for (std::size_t j = 0; j < kGroups; j += 2)
        for (std::size_t k = 0; k < kGroup; ++k)
            *low++ = static_cast<std::uint8_t>((block.codes[j * kGroup + k][r] & 15) |
                                               (block.codes[(j + 1) * kGroup + k][r] & 15) << 4);
}

void pack_halves(const Block& block, std::size_t r, std::uint8_t* bytes) {
    for (std::size_t h = 0; h < 2; ++h)
        for (std::size_t k = 0; k < kGroup; ++k) {
            unsigned c[4];
            for (std::size_t i = 0; i < 4; ++i) c[i] = block.codes[(4 * h + i) * kGroup + k][r];
            bytes[64 * h + k] = static_cast<std::uint8_t>((c[0] & 15) | (c[2] & 15) << 4);
            bytes[64 * h + 32 + k] = static_cast<std::uint8_t>((c[1] & 15) | (c[3] & 15) << 4);
            bytes[128 + 32 * h + k] = static_cast<std::uint8_t>(
                c[0] >> 4 | c[1] >> 4 << 2 | c[2] >> 4 << 4 | c[3] >> 4 << 6);
        }
    for (std::size_t h = 0; h < 2 * kGroups; ++h) bytes[192 + h] = block.scales[h][r];
    std::memcpy(bytes + 208, &block.d[r], 2);
}

template <std::size_t lanes>
MOEINF_INLINE void search_block(Block& block, Format format) {
    for (std::size_t r = 0; r < kBlockRows; r += lanes) {
        if (format == Format::kQ4k) search_minima<lanes, 15>(block, r);
        if (format == Format::kQ5k) search_minima<lanes, 31>(block, r);
        if (format == Format::kQ6k) search_halves<lanes>(block, r);
    }
}

void search_baseline(Block& block, Format format) { search_block<4>(block, format); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) void search_avx2(Block& block, Format format) {
    search_block<8>(block, format);
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) void search_avx512(Block& block,
                                                                        Format format) {
    search_block<16>(block, format);
}
#endif

}  // namespace

void quantise_blocks(const std::byte* rows, Dtype dtype, std::size_t count, std::size_t columns,
                     Format format, std::byte* out) noexcept {
    auto* search = search_baseline;
#if defined(__x86_64__)
    if (&current_kernels() == &kAvx2Kernels) search = search_avx2;
    if (current_kernels().q8 == kAvx512Kernels.q8)  // path amx, too
        search = search_avx512;
#endif
    const std::size_t item = dtype == Dtype::kF32 ? 4 : 2;
    const std::size_t size = tile_bytes(format) / kBlockRows;
    for (std::size_t first = 0; first < columns; first += kSuper, out += tile_bytes(format)) {
        Block block{};
        const std::size_t there = std::min(kSuper, columns - first);
        for (std::size_t r = 0; r < count; ++r) {
            float values[kSuper];
            load_row(rows + (r * columns + first) * item, there, dtype, values);
            for (std::size_t k = 0; k < there; ++k) block.x[k][r] = values[k];
        }
        search(block, format);
        std::uint8_t packed[kBlockRows * (kQ6kTileBytes / kBlockRows)];
        for (std::size_t r = 0; r < kBlockRows; ++r) {
            if (format == Format::kQ6k)
                pack_halves(block, r, packed + r * size);
            else
                pack_minima(block, r, format == Format::kQ5k, packed + r * size);
        }
        interleave_rows(reinterpret_cast<const std::byte*>(packed), nullptr, kBlockRows, kSuper,
                        format, out);
    }
}

}  // namespace moeinf
