// The AVX512-BF16 path of decode attention: products of bfloat16 pairs, two per lane.
//
// H query heads (1, 2, 4, 8 or 16; padded with zero heads) share the 16 lanes of a register, with
// R = 16 / H lanes each:
//
//   scores   lane h·R + j sums the pairs j, j + R, j + 2R ... of q_h · k. A key is loaded as
//            broadcasts of R pairs. Sixteen keys give sixteen registers; log2(R) rounds of folding
//            turn R of them into one that holds R keys of every head: lane h·R + r is key r
//   softmax  in that layout; neighbouring lanes are neighbouring keys, so narrowing to bfloat16
//            gives the key pairs that the second product needs
//   values   lanes are columns. Two rows interleaved give pairs (v_s, v_s+1); a pair of weights of
//            one head is broadcast from memory
//
// In memory a value sum has its columns in interleaved order; the end of the task restores theirs.
#include "attention/decode_attention_paths.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define MOEINF_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define MOEINF_BF16_INLINE MOEINF_BF16 __attribute__((always_inline)) inline

namespace moeinf::attention {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kStepKeys = 16;  // keys whose scores are computed together
constexpr std::size_t kHalfKeys = 8;   // sums in flight at a time: enough to hide the latency
constexpr std::size_t kColumns = 32;   // columns of values at a time: one cache line
// Prefetched into the second-level cache: the rows are read side by side, so the hardware
// prefetcher does not follow them.
constexpr std::size_t kAheadBytes = 16384;

std::size_t lanes_heads(std::size_t heads) noexcept {
    std::size_t lanes = 1;
    while (lanes < heads) lanes *= 2;
    return lanes;
}

std::size_t packed_bytes(std::size_t heads, std::size_t key_width) {
    return lanes_heads(heads) * key_width * sizeof(std::uint16_t) + 64;
}

// Writes [key_width / 2R][16 lanes] pairs, in the order of the lanes above.
void pack(const void* q, std::size_t heads, std::size_t key_width, bool, void* packed) {
    const std::size_t all = lanes_heads(heads), r = kLanes / all, pairs = key_width / 2;
    auto* to = static_cast<std::uint32_t*>(packed);
    for (std::size_t unit = 0; unit < pairs / r; ++unit)
        for (std::size_t h = 0; h < all; ++h)
            for (std::size_t j = 0; j < r; ++j, ++to) {
                *to = 0;
                if (h < heads)
                    std::memcpy(to, static_cast<const std::uint16_t*>(q) + h * key_width +
                                        2 * (unit * r + j), sizeof *to);
            }
}

template <std::size_t R>
MOEINF_BF16_INLINE __m512bh broadcast(const std::uint16_t* at) {
    if constexpr (R == 1) {
        int pair;
        std::memcpy(&pair, at, sizeof pair);
        return (__m512bh)_mm512_set1_epi32(pair);
    } else if constexpr (R == 2) {
        long long pairs;
        std::memcpy(&pairs, at, sizeof pairs);
        return (__m512bh)_mm512_set1_epi64(pairs);
    } else if constexpr (R == 4) {
        return (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)at));
    } else if constexpr (R == 8) {
        return (__m512bh)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)at));
    } else {
        return (__m512bh)_mm512_loadu_si512(at);
    }
}

// Exchanges every lane with the lane `Distance` away.
template <std::size_t Distance>
MOEINF_BF16_INLINE __m512 exchange(__m512 x) {
    if constexpr (Distance == 1) return _mm512_permute_ps(x, 0xB1);
    if constexpr (Distance == 2) return _mm512_permute_ps(x, 0x4E);
    if constexpr (Distance == 4) return _mm512_shuffle_f32x4(x, x, 0xB1);
    return _mm512_shuffle_f32x4(x, x, 0x4E);
}

template <std::size_t Distance>
constexpr __mmask16 upper_lanes() {
    return Distance == 1 ? 0xAAAA : Distance == 2 ? 0xCCCC : Distance == 4 ? 0xF0F0 : 0xFF00;
}

// Sums over the R lanes of each head, for R registers: lane h·R + r of x[0] gets head h's sum of
// x[r].
template <std::size_t R, std::size_t Distance = 1>
MOEINF_BF16_INLINE void fold(__m512* x) {
    if constexpr (Distance < R) {
        constexpr __mmask16 upper = upper_lanes<Distance>();
        for (std::size_t i = 0; i < R / Distance / 2; ++i) {
            const __m512 a = x[2 * i], b = x[2 * i + 1];
            const __m512 kept = _mm512_mask_blend_ps(upper, a, b);
            const __m512 other = _mm512_mask_blend_ps(upper, b, a);
            x[i] = _mm512_add_ps(kept, exchange<Distance>(other));
        }
        fold<R, Distance * 2>(x);
    }
}

template <std::size_t R, std::size_t Distance = 1>
MOEINF_BF16_INLINE __m512 max_of_head(__m512 x) {
    if constexpr (Distance < R)
        return max_of_head<R, Distance * 2>(_mm512_max_ps(x, exchange<Distance>(x)));
    return x;
}

template <std::size_t R, std::size_t Distance = 1>
MOEINF_BF16_INLINE __m512 sum_of_head(__m512 x) {
    if constexpr (Distance < R)
        return sum_of_head<R, Distance * 2>(_mm512_add_ps(x, exchange<Distance>(x)));
    return x;
}

// Returns 2^x for x <= 0, with a relative error below 2e-7; 0 for x far below -126.
MOEINF_BF16_INLINE __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 t = _mm512_sub_ps(x, whole);  // [-0.5, 0.5]
    __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(1.339887440266574e-3f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(9.618437357674640e-3f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(5.550332471162809e-2f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(2.402264791363012e-1f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(6.931472028550421e-1f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

// Writes the scores of kStepKeys keys starting at `keys`, of which `count` exist, to H registers.
template <std::size_t H>
MOEINF_BF16_INLINE void score_step(const Task& task, const std::uint16_t* keys, std::size_t count,
                                   __m512* scores) {
    constexpr std::size_t R = kLanes / H;
    constexpr std::size_t kUnitsPerLine = kLanes / R;
    const auto* q = static_cast<const std::uint16_t*>(task.packed);
    const std::size_t units = task.key_width / (2 * R);
    __m512 sums[kStepKeys];
    for (std::size_t half = 0; half < kStepKeys; half += kHalfKeys) {
        const std::uint16_t* row[kHalfKeys];
        for (std::size_t i = 0; i < kHalfKeys; ++i)
            row[i] = keys + std::min(half + i, count - 1) * task.key_stride;
        __m512 sum[kHalfKeys];
        for (auto& s : sum) s = _mm512_setzero_ps();
        for (std::size_t unit = 0; unit < units; ++unit) {
            const auto qs = (__m512bh)_mm512_load_si512(q + unit * 2 * kLanes);
            if (unit % kUnitsPerLine == 0)
                for (std::size_t i = 0; i < kHalfKeys; ++i)
                    _mm_prefetch((const char*)(row[i] + unit * 2 * R) + kAheadBytes, _MM_HINT_T1);
#pragma GCC unroll 8
            for (std::size_t i = 0; i < kHalfKeys; ++i)
                sum[i] = _mm512_dpbf16_ps(sum[i], qs, broadcast<R>(row[i] + unit * 2 * R));
        }
#pragma GCC unroll 8
        for (std::size_t i = 0; i < kHalfKeys; ++i) sums[half + i] = sum[i];
    }
#pragma GCC unroll 16
    for (std::size_t g = 0; g < H; ++g) {
        fold<R>(sums + g * R);
        scores[g] = _mm512_mul_ps(sums[g * R], _mm512_set1_ps(task.scale));
    }
}

// Returns the lanes of register g of a step whose keys are below `count`.
template <std::size_t R>
MOEINF_BF16_INLINE __mmask16 existing(std::size_t g, std::size_t count) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i key = _mm512_add_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(R - 1)),
                                         _mm512_set1_epi32(static_cast<int>(g * R)));
    return _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32(static_cast<int>(count)));
}

template <std::size_t H>
struct Tile {
    static constexpr std::size_t kR = kLanes / H;
    static constexpr std::size_t kRegisters = kTileKeys / kR;
    static constexpr std::size_t kPairs = kTileKeys / 2;
    alignas(64) float scores[kRegisters * kLanes];
    // Pairs [register][H][R / 2] for R > 1, and [pair][H] for R = 1; see place().
    alignas(64) std::uint32_t weights[kPairs * H];

    static std::size_t place(std::size_t head, std::size_t pair) noexcept {
        if constexpr (kR == 1) return pair * H + head;
        constexpr std::size_t kHalf = kR == 1 ? 1 : kR / 2;
        return pair / kHalf * (H * kHalf) + head * kHalf + pair % kHalf;
    }
};

// Rounds the weights to bfloat16 pairs and returns the sum of the rounded weights, per lane.
template <std::size_t H>
MOEINF_BF16_INLINE __m512 weigh(Tile<H>& tile, std::size_t registers, __m512 top) {
    __m512 sum = _mm512_setzero_ps();
    const auto rounded = [&](std::size_t g) MOEINF_BF16 {
        const __m512 s = _mm512_load_ps(tile.scores + g * kLanes);
        return _mm512_cvtepu16_epi32(
            (__m256i)_mm512_cvtneps_pbh(power_of_two(_mm512_sub_ps(s, top))));
    };
    if constexpr (Tile<H>::kR == 1) {
        for (std::size_t g = 0; g < registers; g += 2) {
            const __m512i even = rounded(g);
            const __m512i odd = _mm512_slli_epi32(rounded(g + 1), 16);
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(even, 16)));
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(odd));
            _mm512_store_si512(tile.weights + g / 2 * H, _mm512_or_si512(even, odd));
        }
    } else {
        for (std::size_t g = 0; g < registers; ++g) {
            const __m512i w = rounded(g);
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)));
            _mm256_store_si256((__m256i*)(tile.weights + g * kLanes / 2), _mm512_cvtepi32_epi16(w));
        }
    }
    return sum;
}

// Adds weights * values for heads [first, first + Heads) and Chunks * kColumns columns.
template <std::size_t H, std::size_t Heads, std::size_t Chunks>
MOEINF_BF16_INLINE void add_columns(const Task& task, const Tile<H>& tile,
                                    const std::uint16_t* values, std::size_t count,
                                    std::size_t first, std::size_t column, bool fetch) {
    __m512 sum[Heads][Chunks][2];
#pragma GCC unroll 16
    for (std::size_t h = 0; h < Heads; ++h)
#pragma GCC unroll 4
        for (std::size_t c = 0; c < Chunks; ++c) {
            float* at = task.partials + (first + h) * task.partial_stride + column + c * kColumns;
            sum[h][c][0] = _mm512_loadu_ps(at);
            sum[h][c][1] = _mm512_loadu_ps(at + kLanes);
        }
    for (std::size_t pair = 0; 2 * pair < count; ++pair) {
        const std::uint16_t* even = values + 2 * pair * task.value_stride + column;
        const std::uint16_t* odd = 2 * pair + 1 < count ? even + task.value_stride : even;
        __m512bh v[Chunks][2];
#pragma GCC unroll 4
        for (std::size_t c = 0; c < Chunks; ++c) {
            const __m512i a = _mm512_loadu_si512(even + c * kColumns);
            const __m512i b = _mm512_loadu_si512(odd + c * kColumns);
            if (fetch) {
                _mm_prefetch((const char*)(even + c * kColumns) + kAheadBytes, _MM_HINT_T1);
                _mm_prefetch((const char*)(odd + c * kColumns) + kAheadBytes, _MM_HINT_T1);
            }
            v[c][0] = (__m512bh)_mm512_unpacklo_epi16(a, b);
            v[c][1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
        }
#pragma GCC unroll 16
        for (std::size_t h = 0; h < Heads; ++h) {
            const auto w = (__m512bh)_mm512_set1_epi32(
                static_cast<int>(tile.weights[Tile<H>::place(first + h, pair)]));
#pragma GCC unroll 4
            for (std::size_t c = 0; c < Chunks; ++c) {
                sum[h][c][0] = _mm512_dpbf16_ps(sum[h][c][0], w, v[c][0]);
                sum[h][c][1] = _mm512_dpbf16_ps(sum[h][c][1], w, v[c][1]);
            }
        }
    }
#pragma GCC unroll 16
    for (std::size_t h = 0; h < Heads; ++h)
#pragma GCC unroll 4
        for (std::size_t c = 0; c < Chunks; ++c) {
            float* at = task.partials + (first + h) * task.partial_stride + column + c * kColumns;
            _mm512_storeu_ps(at, sum[h][c][0]);
            _mm512_storeu_ps(at + kLanes, sum[h][c][1]);
        }
}

// Adds weights * values for all heads and columns. Sixteen sums are in flight, so fewer heads take
// more columns at a time.
template <std::size_t H>
MOEINF_BF16_INLINE void add_values(const Task& task, const Tile<H>& tile,
                                   const std::uint16_t* values, std::size_t count) {
    constexpr std::size_t kHeads = std::min<std::size_t>(H, 8);
    constexpr std::size_t kChunks = std::min<std::size_t>(4, 8 / kHeads);
    const bool fetch = task.keys != task.values;  // MLA's values were fetched with its keys
    std::size_t column = 0;
    for (; column + kChunks * kColumns <= task.value_width; column += kChunks * kColumns)
        for (std::size_t first = 0; first < H; first += kHeads)
            add_columns<H, kHeads, kChunks>(task, tile, values, count, first, column,
                                            fetch && first == 0);
    for (; column < task.value_width; column += kColumns)
        for (std::size_t first = 0; first < H; first += kHeads)
            add_columns<H, kHeads, 1>(task, tile, values, count, first, column,
                                      fetch && first == 0);
}

template <std::size_t H>
MOEINF_BF16 void scale_values(const Task& task, __m512 factor) {
    constexpr std::size_t R = kLanes / H;
    alignas(64) float factors[kLanes];
    _mm512_store_ps(factors, factor);
    for (std::size_t h = 0; h < H; ++h) {
        float* row = task.partials + h * task.partial_stride;
        const __m512 f = _mm512_set1_ps(factors[h * R]);
        for (std::size_t column = 0; column < task.value_width; column += kLanes)
            _mm512_storeu_ps(row + column, _mm512_mul_ps(_mm512_loadu_ps(row + column), f));
    }
}

// Restores the order of interleaved columns.
MOEINF_BF16 void order_columns(float* row, std::size_t width) {
    const __m512i first =
        _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second =
        _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (std::size_t column = 0; column < width; column += kColumns) {
        const __m512 lo = _mm512_loadu_ps(row + column);
        const __m512 hi = _mm512_loadu_ps(row + column + kLanes);
        _mm512_storeu_ps(row + column, _mm512_permutex2var_ps(lo, first, hi));
        _mm512_storeu_ps(row + column + kLanes, _mm512_permutex2var_ps(lo, second, hi));
    }
}

template <std::size_t H>
MOEINF_BF16 void run_heads(const Task& task) noexcept {
    constexpr std::size_t R = kLanes / H;
    Tile<H> tile;
    __m512 top = _mm512_set1_ps(kNoKey), sum = _mm512_setzero_ps();
    for (std::size_t h = 0; h < H; ++h)
        std::memset(task.partials + h * task.partial_stride, 0, task.value_width * sizeof(float));
    for (std::size_t first = 0; first < task.count; first += kTileKeys) {
        const std::size_t count = std::min(kTileKeys, task.count - first);
        const auto* keys =
            static_cast<const std::uint16_t*>(task.keys) + first * task.key_stride;
        __m512 highest = top;
        std::size_t registers = 0;
        for (std::size_t step = 0; step < count; step += kStepKeys) {
            __m512 scores[H];
            const std::size_t left = std::min(kStepKeys, count - step);
            score_step<H>(task, keys + step * task.key_stride, left, scores);
#pragma GCC unroll 16
            for (std::size_t g = 0; g < H; ++g) {
                if (left < kStepKeys)
                    scores[g] = _mm512_mask_blend_ps(existing<R>(g, left),
                                                     _mm512_set1_ps(kNoKey), scores[g]);
                highest = _mm512_max_ps(highest, scores[g]);
                _mm512_store_ps(tile.scores + (registers + g) * kLanes, scores[g]);
            }
            registers += H;
        }
        highest = max_of_head<R>(highest);
        if (_mm512_cmp_ps_mask(highest, top, _CMP_NEQ_UQ)) {
            const __m512 factor = power_of_two(_mm512_sub_ps(top, highest));
            sum = _mm512_mul_ps(sum, factor);
            if (first) scale_values<H>(task, factor);
            top = highest;
        }
        sum = _mm512_add_ps(sum, weigh<H>(tile, registers, top));
        const auto* values =
            static_cast<const std::uint16_t*>(task.values) + first * task.value_stride;
        add_values<H>(task, tile, values, count);
    }
    sum = sum_of_head<R>(sum);
    alignas(64) float tops[kLanes], sums[kLanes];
    _mm512_store_ps(tops, top);
    _mm512_store_ps(sums, sum);
    for (std::size_t h = 0; h < task.heads; ++h) {
        float* row = task.partials + h * task.partial_stride;
        order_columns(row, task.value_width);
        row[task.value_width] = tops[h * R];
        row[task.value_width + 1] = sums[h * R];
    }
}

void run(const Task& task) noexcept {
    switch (lanes_heads(task.heads)) {
        case 1: return run_heads<1>(task);
        case 2: return run_heads<2>(task);
        case 4: return run_heads<4>(task);
        case 8: return run_heads<8>(task);
        default: return run_heads<16>(task);
    }
}

}  // namespace

const Path kAvx512Bf16Path{packed_bytes, pack, run};

}  // namespace moeinf::attention

#endif
