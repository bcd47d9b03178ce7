// Scores and value sums over rows in q8, for processors with NEON's dot product (SDOT).
// decode_attention_lanes.h includes this once.
//
//   scores   a query is packed as int16 with one scale per head, in two signed bytes:
//            256 * high + low, both at most 127 in size. SDOT sums their products with the 32 int8
//            of a block, exactly: a lane has eight of them, at most 8 * 32639 * 127 < 2^31. Then
//            they become a float, times the block's scale
//   values   a weight times a block's scale is computed for all keys of the tile before. Lanes are
//            columns; int8 becomes float
//
//   packed   | int8 [heads][blocks][high 32 | low 32], zeros after the width |
//            | float scale [heads] |

constexpr std::size_t kSums = 8;
constexpr std::size_t kPackedBlock = 2 * kQ8Values;
constexpr float kMostQuery = 127 * 256 + 127;

std::size_t packed_q8_bytes(std::size_t heads, std::size_t key_width) {
    return heads * (blocks_of(key_width) * kPackedBlock + sizeof(float));
}

void pack_q8(const void* q, std::size_t heads, std::size_t key_width, bool, void* packed) {
    const std::size_t padded = blocks_of(key_width) * kQ8Values;
    auto* to = static_cast<std::int8_t*>(packed);
    auto* scales = reinterpret_cast<float*>(to + 2 * heads * padded);
    for (std::size_t h = 0; h < heads; ++h) {
        const auto* from = static_cast<const std::uint16_t*>(q) + h * key_width;
        std::uint16_t most = 0;  // bits of the largest size; those of NaN are above all others
        for (std::size_t i = 0; i < key_width; ++i) {
            const std::uint16_t size = from[i] & 0x7FFF;
            most = size > most ? size : most;
        }
        const float top = widen(most);
        const bool usual = top >= 0x1p-100f && top <= 0x1p120f;
        const float factor = usual ? kMostQuery / top : 0.0f;
        scales[h] = usual ? top / kMostQuery : top < 1.0f ? 0.0f : __builtin_nanf("");
        for (std::size_t i = 0; i < padded; ++i) {
            const float value = usual && i < key_width ? widen(from[i]) * factor : 0.0f;
            const auto whole = static_cast<int>(__builtin_lrintf(value));
            const auto low = static_cast<std::int8_t>(whole & 0xFF);
            std::int8_t* const at = to + i / kQ8Values * kPackedBlock + i % kQ8Values;
            at[0] = static_cast<std::int8_t>((whole - low) / 256);
            at[kQ8Values] = low;
        }
        to += 2 * padded;
    }
}

// Returns the products of a block, in four sums: `q` points to its packed query.
inline Vector block_dot(const std::int8_t* q, int8x16_t first, int8x16_t second) noexcept {
    int32x4_t high = vdotq_s32(vdupq_n_s32(0), first, vld1q_s8(q));
    int32x4_t low = vdotq_s32(vdupq_n_s32(0), first, vld1q_s8(q + kQ8Values));
    high = vdotq_s32(high, second, vld1q_s8(q + 16));
    low = vdotq_s32(low, second, vld1q_s8(q + kQ8Values + 16));
    return (Vector)vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high, 8), low));
}

// Computes the scores of kSums / Heads keys from `key` on; those beyond `count` repeat the last.
template <std::size_t Heads>
inline void score_q8(const Task& task, const Q8* keys, std::size_t head, std::size_t key,
                     std::size_t count, Scores& scores) noexcept {
    constexpr std::size_t kKeys = kSums / Heads;
    const std::size_t blocks = blocks_of(task.key_width), stride = blocks * kPackedBlock;
    const auto* all = static_cast<const std::int8_t*>(task.packed);
    const std::int8_t* q = all + head * stride;
    const auto* scales = reinterpret_cast<const float*>(all + task.heads * stride) + head;
    const Q8* row[kKeys];
    for (std::size_t i = 0; i < kKeys; ++i)
        row[i] = keys + (key + i < count ? key + i : count - 1) * task.key_stride;
    Vector sums[Heads][kKeys] = {};
    std::uint8_t last[kQ8Values] = {};
    for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t left = task.key_width - b * kQ8Values;
#pragma GCC unroll 8
        for (std::size_t i = 0; i < kKeys; ++i) {
            const Q8* block = row[i] + b * kQ8BlockBytes;
            const std::uint8_t* values = whole_block(block, left, last);
            __builtin_prefetch(values + kAheadBytes);
            const int8x16_t first = vreinterpretq_s8_u8(vld1q_u8(values));
            const int8x16_t second = vreinterpretq_s8_u8(vld1q_u8(values + 16));
            const float scale = q8_scale(block);
#pragma GCC unroll 8
            for (std::size_t h = 0; h < Heads; ++h)
                sums[h][i] =
                    fused(scale, block_dot(q + h * stride + b * kPackedBlock, first, second),
                          sums[h][i]);
        }
    }
    const std::size_t existing = count - key < kKeys ? count - key : kKeys;
    for (std::size_t h = 0; h < Heads; ++h)
        for (std::size_t i = 0; i < existing; ++i)
            scores.of[head + h][key + i] = sum_of(sums[h][i]) * (scales[h] * task.scale);
}

template <std::size_t Heads>
inline void score_heads(const Task& task, const Q8* keys, std::size_t head, std::size_t count,
                        Scores& scores) noexcept {
    for (std::size_t key = 0; key < count; key += kSums / Heads)
        score_q8<Heads>(task, keys, head, key, count, scores);
}

struct Codes {  // a byte of a row in q8, without the block's scale
    std::int8_t byte;
};

inline Vector load_at(const Codes* row, std::size_t column) noexcept {
    const LooseBytes bytes = *reinterpret_cast<const LooseBytes*>(row + column);
    return __builtin_convertvector(__builtin_convertvector(bytes, Whole), Vector);
}

template <std::size_t Heads>
inline void add_values(const Task& task, const Q8* values, std::size_t head, std::size_t count,
                       const Scores& of) noexcept {
    Scores weights;  // of heads 0 … Heads − 1, times the block's scale
    Task here = task;
    for (std::size_t first = 0; first < task.value_width; first += kQ8Values) {
        const Q8* block = values + first / kQ8Values * kQ8BlockBytes;
        for (std::size_t key = 0; key < count; ++key) {
            const float scale = q8_scale(block + key * task.value_stride);
            for (std::size_t h = 0; h < Heads; ++h)
                weights.of[h][key] = of.of[head + h][key] * scale;
        }
        const std::size_t left = task.value_width - first;
        const std::size_t columns = left < kQ8Values ? left : kQ8Values;
        here.partials = task.partials + head * task.partial_stride + first;
        const auto* at = reinterpret_cast<const Codes*>(block + sizeof(LooseScale));
        std::size_t column = 0;
        for (; column + 2 * kFloats <= columns; column += 2 * kFloats)
            add_columns<Heads, 2>(here, at, 0, column, count, weights);
        for (; column + kFloats <= columns; column += kFloats)
            add_columns<Heads, 1>(here, at, 0, column, count, weights);
        for (; column < columns; ++column)
            for (std::size_t h = 0; h < Heads; ++h) {
                float& sum = here.partials[h * task.partial_stride + column];
                for (std::size_t key = 0; key < count; ++key) {
                    const std::int8_t code = at[key * task.value_stride + column].byte;
                    sum = fused(weights.of[h][key], static_cast<float>(code), sum);
                }
            }
    }
}
