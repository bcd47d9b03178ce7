// One task of decode attention, in vectors of kFloats floats. row_math_lanes.h has the row
// operations around it.
// decode_attention_lanes.cpp includes this once for each kind of processor. It defines:
//
//   MOEINF_LANES        the namespace
//   MOEINF_LANE_FLOATS  the number of floats in a vector
//   MOEINF_LANE_FUSED   a * b + c of vectors with one rounding, if the processor has it
//   MOEINF_LANE_SDOT    if the processor has NEON's dot product
//
// No include guard and no includes: included code must not be compiled for one processor only.
//
// Lanes are dimensions, both for scores and for values. A vector is widened when it is used, and
// serves kHeads heads. More heads widen it again, from the nearest cache.

namespace moeinf::attention::MOEINF_LANES {
namespace {

constexpr std::size_t kFloats = MOEINF_LANE_FLOATS;
constexpr std::size_t kHeads = 4;  // with two keys, or two vectors of columns: eight sums in flight
constexpr std::size_t kAheadBytes = 4096;

typedef float Vector __attribute__((vector_size(kFloats * 4)));
typedef std::int32_t Whole __attribute__((vector_size(kFloats * 4)));
typedef std::uint32_t Word __attribute__((vector_size(kFloats * 4)));
typedef float LooseVector __attribute__((vector_size(kFloats * 4), aligned(4), may_alias));
typedef std::uint16_t LooseHalf __attribute__((vector_size(kFloats * 2), aligned(2), may_alias));
typedef std::int8_t LooseBytes __attribute__((vector_size(kFloats), aligned(1), may_alias));
typedef std::uint16_t LooseScale __attribute__((may_alias));

static_assert(kTileKeys % kFloats == 0);
static_assert(kQ8Values % kFloats == 0);

// Returns a * b + c, with one rounding where the processor has that instruction. No compiler fuses
// by itself (-ffp-contract=off), so all of them give the same bits.
inline Vector fused(Vector a, Vector b, Vector c) noexcept {
#ifdef MOEINF_LANE_FUSED
    return (Vector)MOEINF_LANE_FUSED(a, b, c);
#else
    return a * b + c;
#endif
}

inline Vector fused(float a, Vector b, Vector c) noexcept {
    return fused(a - Vector{}, b, c);
}

inline float fused(float a, float b, float c) noexcept {
#ifdef MOEINF_LANE_FUSED
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline Vector load(const float* at) noexcept {
    return *reinterpret_cast<const LooseVector*>(at);
}

inline Vector load(const std::uint16_t* at) noexcept {
    const LooseHalf half = *reinterpret_cast<const LooseHalf*>(at);
    return (Vector)(__builtin_convertvector(half, Word) << 16);
}

inline Vector load_at(const float* row, std::size_t column) noexcept {
    return load(row + column);
}

inline Vector load_at(const std::uint16_t* row, std::size_t column) noexcept {
    return load(row + column);
}

inline float q8_scale(const Q8* block) noexcept {
    return widen(*reinterpret_cast<const LooseScale*>(block));
}

// A vector never crosses a block, because a block's size is a multiple of a vector's.
inline Vector load_at(const Q8* row, std::size_t column) noexcept {
    const Q8* block = row + column / kQ8Values * kQ8BlockBytes;
    const Q8* at = block + sizeof(LooseScale) + column % kQ8Values;
    const LooseBytes bytes = *reinterpret_cast<const LooseBytes*>(at);
    return __builtin_convertvector(__builtin_convertvector(bytes, Whole), Vector) *
           q8_scale(block);
}

inline void store(float* at, Vector x) noexcept {
    *reinterpret_cast<LooseVector*>(at) = x;
}

// Rounds to nearest, ties to even; a NaN stays NaN.
inline void store(std::uint16_t* at, Vector x) noexcept {
    const Word bits = (Word)x;
    const Word rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const Word kept = (bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded;
    *reinterpret_cast<LooseHalf*>(at) = __builtin_convertvector(kept, LooseHalf);
}

inline Vector round_to_half(Vector x) noexcept {
    std::uint16_t half[kFloats];
    store(half, x);
    return load(half);
}

inline float one_at(const float* row, std::size_t column) noexcept {
    return row[column];
}

inline float one_at(const std::uint16_t* row, std::size_t column) noexcept {
    return widen(row[column]);
}

inline float one_at(const Q8* row, std::size_t column) noexcept {
    const Q8* block = row + column / kQ8Values * kQ8BlockBytes;
    const Q8* at = block + sizeof(LooseScale) + column % kQ8Values;
    return static_cast<float>(static_cast<std::int8_t>(at->byte)) * q8_scale(block);
}

inline float sum_of(Vector x) noexcept {
    float sum = 0;
    for (std::size_t i = 0; i < kFloats; ++i) sum += x[i];
    return sum;
}

// Returns 2^x for x <= 0, with a relative error below 2e-7; 0 for x below -126.5.
inline Vector power_of_two(Vector x) noexcept {
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it removes the fraction bits
    x = x > -127.0f ? x : Vector{} - 127.0f;
    const Vector whole = (x + kRounder) - kRounder;
    const Vector t = x - whole;
    Vector y = Vector{} + 1.535336188319500e-4f;
    y = fused(y, t, Vector{} + 1.339887440266574e-3f);
    y = fused(y, t, Vector{} + 9.618437357674640e-3f);
    y = fused(y, t, Vector{} + 5.550332471162809e-2f);
    y = fused(y, t, Vector{} + 2.402264791363012e-1f);
    y = fused(y, t, Vector{} + 6.931472028550421e-1f);
    y = fused(y, t, Vector{} + 1.0f);
    return y * (Vector)((__builtin_convertvector(whole, Whole) + 127) << 23);
}

std::size_t packed_bytes(std::size_t heads, std::size_t key_width) {
    return heads * key_width * sizeof(float);
}

void pack(const void* q, std::size_t heads, std::size_t key_width, bool bf16, void* packed) {
    auto* to = static_cast<float*>(packed);
    for (std::size_t i = 0; i < heads * key_width; ++i)
        to[i] = bf16 ? widen(static_cast<const std::uint16_t*>(q)[i])
                     : static_cast<const float*>(q)[i];
}

struct Scores {
    alignas(64) float of[kMaxLanesHeads][kTileKeys];
};

template <std::size_t Heads, std::size_t Keys, class Item>
inline void score(const Task& task, const Item* keys, std::size_t head, std::size_t key,
                  Scores& scores) noexcept {
    const float* q = static_cast<const float*>(task.packed) + head * task.key_width;
    const Item* row = keys + key * task.key_stride;
    Vector sums[Heads][Keys] = {};
    std::size_t d = 0;
    for (; d + kFloats <= task.key_width; d += kFloats) {
        Vector k[Keys];
        for (std::size_t i = 0; i < Keys; ++i) {
            k[i] = load_at(row + i * task.key_stride, d);
            __builtin_prefetch(reinterpret_cast<const char*>(row + i * task.key_stride + d) +
                               kAheadBytes);
        }
        for (std::size_t h = 0; h < Heads; ++h) {
            const Vector x = load(q + h * task.key_width + d);
            for (std::size_t i = 0; i < Keys; ++i) sums[h][i] = fused(x, k[i], sums[h][i]);
        }
    }
    for (std::size_t h = 0; h < Heads; ++h)
        for (std::size_t i = 0; i < Keys; ++i) {
            float sum = sum_of(sums[h][i]);
            for (std::size_t rest = d; rest < task.key_width; ++rest)
                sum = fused(q[h * task.key_width + rest],
                            one_at(row + i * task.key_stride, rest), sum);
            scores.of[head + h][key + i] = sum * task.scale;
        }
}

template <std::size_t Heads, class Item>
inline void score_heads(const Task& task, const Item* keys, std::size_t head, std::size_t count,
                        Scores& scores) noexcept {
    std::size_t key = 0;
    for (; key + 2 <= count; key += 2) score<Heads, 2>(task, keys, head, key, scores);
    if (key < count) score<Heads, 1>(task, keys, head, key, scores);
}

template <std::size_t Heads, std::size_t Vectors, class Item>
inline void add_columns(const Task& task, const Item* values, std::size_t head, std::size_t column,
                        std::size_t count, const Scores& weights) noexcept {
    Vector sums[Heads][Vectors];
    float* at = task.partials + head * task.partial_stride + column;
    for (std::size_t h = 0; h < Heads; ++h)
        for (std::size_t c = 0; c < Vectors; ++c)
            sums[h][c] = load(at + h * task.partial_stride + c * kFloats);
    for (std::size_t key = 0; key < count; ++key) {
        const Item* row = values + key * task.value_stride;
        __builtin_prefetch(reinterpret_cast<const char*>(row + column) + kAheadBytes);
        Vector v[Vectors];
        for (std::size_t c = 0; c < Vectors; ++c) v[c] = load_at(row, column + c * kFloats);
        for (std::size_t h = 0; h < Heads; ++h)
            for (std::size_t c = 0; c < Vectors; ++c)
                sums[h][c] = fused(weights.of[head + h][key], v[c], sums[h][c]);
    }
    for (std::size_t h = 0; h < Heads; ++h)
        for (std::size_t c = 0; c < Vectors; ++c)
            store(at + h * task.partial_stride + c * kFloats, sums[h][c]);
}

template <std::size_t Heads, class Item>
inline void add_values(const Task& task, const Item* values, std::size_t head, std::size_t count,
                       const Scores& weights) noexcept {
    std::size_t column = 0;
    for (; column + 2 * kFloats <= task.value_width; column += 2 * kFloats)
        add_columns<Heads, 2>(task, values, head, column, count, weights);
    for (; column + kFloats <= task.value_width; column += kFloats)
        add_columns<Heads, 1>(task, values, head, column, count, weights);
    for (; column < task.value_width; ++column)
        for (std::size_t h = head; h < head + Heads; ++h) {
            float& sum = task.partials[h * task.partial_stride + column];
            for (std::size_t key = 0; key < count; ++key)
                sum = fused(weights.of[h][key],
                            one_at(values + key * task.value_stride, column), sum);
        }
}

// Turns scores into weights and adds them to `sum`. Raises `top` to the highest score, and scales
// `sum` and the value sums so far to the new `top`.
inline void weigh(const Task& task, std::size_t head, std::size_t count, Scores& scores, float& top,
                  float& sum) noexcept {
    float* of = scores.of[head];
    float highest = top;
    for (std::size_t key = 0; key < count; ++key) highest = of[key] > highest ? of[key] : highest;
    for (std::size_t key = count; key < kTileKeys; ++key) of[key] = kNoKey;
    if (highest != top) {
        const float factor = power_of_two(Vector{} + (top - highest))[0];
        float* row = task.partials + head * task.partial_stride;
        for (std::size_t column = 0; column < task.value_width; ++column) row[column] *= factor;
        sum *= factor;
        top = highest;
    }
    Vector sums = {};
    for (std::size_t key = 0; key < kTileKeys; key += kFloats) {
        const Vector weight = power_of_two(load(of + key) - top);
        store(of + key, weight);
        sums += weight;
    }
    sum += sum_of(sums);
}

#if MOEINF_LANE_FLOATS == 8 || defined(MOEINF_LANE_SDOT)
inline std::size_t blocks_of(std::size_t width) noexcept {
    return (width + kQ8Values - 1) / kQ8Values;
}

// Returns the block as 32 readable int8: `last` holds a copy of one that is shorter.
inline const std::uint8_t* whole_block(const Q8* block, std::size_t left,
                                       std::uint8_t* last) noexcept {
    const auto* at = reinterpret_cast<const std::uint8_t*>(block) + sizeof(LooseScale);
    if (left >= kQ8Values) return at;
    for (std::size_t i = 0; i < left; ++i) last[i] = at[i];
    return last;
}

#ifdef MOEINF_LANE_SDOT
#include "attention/decode_attention_q8_neon.h"
#else
#include "attention/decode_attention_q8.h"
#endif
#endif

template <class Item>
inline void run_items(const Task& task) noexcept {
    Scores scores;
    float tops[kMaxLanesHeads], sums[kMaxLanesHeads];
    for (std::size_t h = 0; h < task.heads; ++h) {
        tops[h] = kNoKey;
        sums[h] = 0;
        float* row = task.partials + h * task.partial_stride;
        for (std::size_t column = 0; column < task.value_width; ++column) row[column] = 0;
    }
    for (std::size_t first = 0; first < task.count; first += kTileKeys) {
        const std::size_t left = task.count - first;
        const std::size_t count = left < kTileKeys ? left : kTileKeys;
        const auto* keys = static_cast<const Item*>(task.keys) + first * task.key_stride;
        const auto* values = static_cast<const Item*>(task.values) + first * task.value_stride;
        std::size_t head = 0;
        for (; head + kHeads <= task.heads; head += kHeads)
            score_heads<kHeads>(task, keys, head, count, scores);
        for (; head < task.heads; ++head) score_heads<1>(task, keys, head, count, scores);
        for (head = 0; head < task.heads; ++head)
            weigh(task, head, count, scores, tops[head], sums[head]);
        for (head = 0; head + kHeads <= task.heads; head += kHeads)
            add_values<kHeads>(task, values, head, count, scores);
        for (; head < task.heads; ++head) add_values<1>(task, values, head, count, scores);
    }
    for (std::size_t h = 0; h < task.heads; ++h) {
        float* row = task.partials + h * task.partial_stride;
        row[task.value_width] = tops[h];
        row[task.value_width + 1] = sums[h];
    }
}

void run(const Task& task) noexcept {
    task.bf16 ? run_items<std::uint16_t>(task) : run_items<float>(task);
}

#if MOEINF_LANE_FLOATS <= 8  // wider processors take the form of 8
void run_q8(const Task& task) noexcept {
    run_items<Q8>(task);
}
#endif

#include "attention/row_math_lanes.h"

}  // namespace
}  // namespace moeinf::attention::MOEINF_LANES
