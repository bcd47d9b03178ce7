// Scores and value sums over rows in q8, for processors with AVX2 and FMA. decode_attention_lanes.h
// includes this once.
//
//   scores   a query is packed as int16 with one scale per head. Products with the 32 int8 of a
//            block are summed exactly: a lane has four of them, at most 4 * 32767 * 127 < 2^24.
//            Then they become a float, times the block's scale. Eight sums (heads x keys) are in
//            flight, and are folded into one vector together
//   values   a weight times a block's scale is computed for all keys of the tile before. Lanes are
//            columns; int8 becomes float
//
//   packed   | int16 [heads][blocks][32], zeros after the width | float scale [heads] |

constexpr std::size_t kSums = 8;

std::size_t packed_q8_bytes(std::size_t heads, std::size_t key_width) {
    return heads * (blocks_of(key_width) * kQ8Values * sizeof(std::int16_t) + sizeof(float));
}

void pack_q8(const void* q, std::size_t heads, std::size_t key_width, bool, void* packed) {
    const std::size_t padded = blocks_of(key_width) * kQ8Values;
    auto* to = static_cast<std::int16_t*>(packed);
    auto* scales = reinterpret_cast<float*>(to + heads * padded);
    for (std::size_t h = 0; h < heads; ++h, to += padded) {
        const auto* from = static_cast<const std::uint16_t*>(q) + h * key_width;
        std::uint16_t most = 0;  // bits of the largest size; those of NaN are above all others
        for (std::size_t i = 0; i < key_width; ++i) {
            const std::uint16_t size = from[i] & 0x7FFF;
            most = size > most ? size : most;
        }
        const float top = widen(most);
        const bool usual = top >= 0x1p-100f && top <= 0x1p120f;
        const float factor = usual ? 32767.0f / top : 0.0f;
        scales[h] = usual ? top / 32767.0f : top < 1.0f ? 0.0f : __builtin_nanf("");
        for (std::size_t i = 0; i < padded; ++i) {
            const float value = i < key_width ? widen(from[i]) * factor : 0.0f;
            to[i] = usual ? static_cast<std::int16_t>(__builtin_lrintf(value)) : 0;
        }
    }
}

inline __m256i sixteen(const std::uint8_t* at) noexcept {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// Lane i of the result is the sum of the lanes of sums[i].
inline __m256 folded(const __m256* sums) noexcept {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]),
                                    _mm256_hadd_ps(sums[2], sums[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]),
                                    _mm256_hadd_ps(sums[6], sums[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// Computes the scores of kSums / Heads keys from `key` on; those beyond `count` repeat the last.
template <std::size_t Heads>
inline void score_q8(const Task& task, const Q8* keys, std::size_t head, std::size_t key,
                     std::size_t count, Scores& scores) noexcept {
    constexpr std::size_t kKeys = kSums / Heads;
    const std::size_t blocks = blocks_of(task.key_width), padded = blocks * kQ8Values;
    const auto* all = static_cast<const std::int16_t*>(task.packed);
    const std::int16_t* q = all + head * padded;
    const auto* scales = reinterpret_cast<const float*>(all + task.heads * padded) + head;
    const Q8* row[kKeys];
    for (std::size_t i = 0; i < kKeys; ++i)
        row[i] = keys + (key + i < count ? key + i : count - 1) * task.key_stride;
    __m256 sums[kSums];
#pragma GCC unroll 8
    for (auto& sum : sums) sum = _mm256_setzero_ps();
    alignas(32) std::uint8_t last[kQ8Values] = {};
    for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t left = task.key_width - b * kQ8Values;
#pragma GCC unroll 8
        for (std::size_t i = 0; i < kKeys; ++i) {
            const Q8* block = row[i] + b * kQ8BlockBytes;
            const __m256 scale = _mm256_set1_ps(q8_scale(block));
            const std::uint8_t* values = whole_block(block, left, last);
            __builtin_prefetch(values + kAheadBytes);
            const __m256i lower = sixteen(values), upper = sixteen(values + 16);
#pragma GCC unroll 8
            for (std::size_t h = 0; h < Heads; ++h) {
                const auto* at =
                    reinterpret_cast<const __m256i*>(q + h * padded + b * kQ8Values);
                const __m256i products =
                    _mm256_add_epi32(_mm256_madd_epi16(lower, _mm256_loadu_si256(at)),
                                     _mm256_madd_epi16(upper, _mm256_loadu_si256(at + 1)));
                sums[h * kKeys + i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale,
                                                      sums[h * kKeys + i]);
            }
        }
    }
    alignas(32) float found[kSums];
    _mm256_store_ps(found, folded(sums));
    const std::size_t existing = count - key < kKeys ? count - key : kKeys;
    for (std::size_t h = 0; h < Heads; ++h)
        for (std::size_t i = 0; i < existing; ++i)
            scores.of[head + h][key + i] = found[h * kKeys + i] * (scales[h] * task.scale);
}

template <std::size_t Heads>
inline void score_heads(const Task& task, const Q8* keys, std::size_t head, std::size_t count,
                        Scores& scores) noexcept {
    for (std::size_t key = 0; key < count; key += kSums / Heads)
        score_q8<Heads>(task, keys, head, key, count, scores);
}

// Adds the values of Vectors * 8 columns of one block; `weights` [Heads][kTileKeys] have its scale.
template <std::size_t Heads, std::size_t Vectors>
inline void add_block(const Task& task, const Q8* at, std::size_t head, std::size_t column,
                      std::size_t count, const float (*weights)[kTileKeys]) noexcept {
    __m256 sums[Heads][Vectors];
    float* to = task.partials + head * task.partial_stride + column;
#pragma GCC unroll 8
    for (std::size_t h = 0; h < Heads; ++h)
#pragma GCC unroll 8
        for (std::size_t c = 0; c < Vectors; ++c)
            sums[h][c] = _mm256_loadu_ps(to + h * task.partial_stride + c * 8);
    for (std::size_t key = 0; key < count; ++key, at += task.value_stride) {
        __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes);
        __m256 v[Vectors];
#pragma GCC unroll 8
        for (std::size_t c = 0; c < Vectors; ++c)
            v[c] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(
                _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + c * 8))));
#pragma GCC unroll 8
        for (std::size_t h = 0; h < Heads; ++h) {
            const __m256 weight = _mm256_broadcast_ss(&weights[h][key]);
#pragma GCC unroll 8
            for (std::size_t c = 0; c < Vectors; ++c)
                sums[h][c] = _mm256_fmadd_ps(weight, v[c], sums[h][c]);
        }
    }
#pragma GCC unroll 8
    for (std::size_t h = 0; h < Heads; ++h)
#pragma GCC unroll 8
        for (std::size_t c = 0; c < Vectors; ++c)
            _mm256_storeu_ps(to + h * task.partial_stride + c * 8, sums[h][c]);
}

template <std::size_t Heads>
inline void add_values(const Task& task, const Q8* values, std::size_t head, std::size_t count,
                       const Scores& of) noexcept {
    constexpr std::size_t kVectors = Heads == 1 ? 4 : 2;
    alignas(32) float scales[kTileKeys], weights[Heads][kTileKeys];
    for (std::size_t first = 0; first < task.value_width; first += kQ8Values) {
        const Q8* block = values + first / kQ8Values * kQ8BlockBytes;
        for (std::size_t key = 0; key < count; ++key)
            scales[key] = q8_scale(block + key * task.value_stride);
        for (std::size_t h = 0; h < Heads; ++h)
            for (std::size_t key = 0; key < count; ++key)
                weights[h][key] = of.of[head + h][key] * scales[key];
        const std::size_t left = task.value_width - first;
        const std::size_t columns = left < kQ8Values ? left : kQ8Values;
        const Q8* at = block + sizeof(LooseScale);
        std::size_t column = 0;
        for (; column + kVectors * 8 <= columns; column += kVectors * 8)
            add_block<Heads, kVectors>(task, at + column, head, first + column, count, weights);
        for (; column + 8 <= columns; column += 8)
            add_block<Heads, 1>(task, at + column, head, first + column, count, weights);
        for (; column < columns; ++column)
            for (std::size_t h = 0; h < Heads; ++h) {
                float& sum = task.partials[(head + h) * task.partial_stride + first + column];
                for (std::size_t key = 0; key < count; ++key) {
                    const auto code =
                        static_cast<std::int8_t>(at[key * task.value_stride + column].byte);
                    sum = fused(weights[h][key], static_cast<float>(code), sum);
                }
            }
    }
}
