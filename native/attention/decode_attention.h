// Attention of one query row per request over its KV cache, at the speed of memory.
//
// One request, G key heads, P = heads / G query heads that share each of them:
//
//   keys     [G][capacity][key_width]     by strides: head, then token
//   values   [G][capacity][value_width]   the same. MLA's values are the first value_width columns
//                                         of its keys, and come from memory with them
//   q, out   [heads][key_width], [heads][value_width]; query head h uses key head h / P
//
// The keys that a row sees are cut into blocks of block_keys(seen), which depends only on the
// number of keys. A task is one (request, key head, block) for all P heads at once, so that a key
// is fetched from memory once. In a task, tiles of kTileKeys keys stay in the nearest cache while
// their values are summed. A task writes one partial per query head, in float32:
//
//   | value sum [value_width] | max | sum |
//
//   out = sum of 2^(max - MAX) * value sum / sum of 2^(max - MAX) * sum, over the blocks in order
//
// Scores are multiplied by log2(e), so that every exponential is a power of two. A row's bits
// depend only on its query and its cache. They do not depend on the number of threads, the thread
// of a task, or the other requests of the call.
//
// Paths, chosen once at run time; they agree within rounding, not bit for bit:
//
//   avx512bf16   bfloat16 caches whose widths are multiples of 32, not q8. Products of bfloat16
//                pairs are exact and added in float32. A weight 2^(s - max) is rounded to bfloat16,
//                and the divisor is the sum of the rounded weights
//   avx512, avx2, portable   one body in vectors of 16, 8 or 4 floats (decode_attention_lanes.h);
//                keys and values are widened, everything is float32. Caches in q8 have a form of
//                avx2 (decode_attention_q8.h), which wider processors take, too
//   neon         of aarch64 with the dot product: the body in vectors of 4, with portable's bits.
//                Caches in q8 have their own form (decode_attention_q8_neon.h)
//
// Scratch: at most kMaxBlocks partials per request and head, kept by the calling thread for reuse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace moeinf {

inline constexpr std::size_t kTileKeys = 128;
inline constexpr std::size_t kMinBlockKeys = 256;
inline constexpr std::size_t kMaxBlocks = 16;
inline constexpr std::size_t kMaxLanesHeads = 16;  // query heads that a path works on at once

enum class AttentionPath { kPortable, kNeon, kAvx2, kAvx512, kAvx512Bf16 };

// Returns the fastest path that this processor supports.
AttentionPath best_attention_path() noexcept;
const char* name_of(AttentionPath path) noexcept;

struct AttentionShape {
    std::size_t heads;
    std::size_t kv_heads;  // divides heads
    std::size_t key_width;
    std::size_t value_width;
    float scale;          // of the products, before the softmax
    bool bf16;           // q, out and the cache are bfloat16; else float32
    std::size_t window;  // keys seen, the newest included; 0: all
    const float* sinks = nullptr;  // [heads]: a logit added only to the divisor (gpt-oss)
    bool q8 = false;  // with bf16: the cache has rows of kv_q8.h, and strides count bytes
};

// One request's keys and values of one layer. Strides count items: values, or bytes in q8.
struct CachedRows {
    const void* keys;
    const void* values;
    std::size_t key_head_stride;
    std::size_t key_row_stride;
    std::size_t value_head_stride;
    std::size_t value_row_stride;
    std::size_t count;  // tokens in the cache, the newest included; at least 1
};

std::size_t block_keys(std::size_t seen) noexcept;

// Computes out [requests][heads][value_width] from q [requests][heads][key_width], both contiguous,
// in bfloat16 or float32. Runs on compute_pool(). Lowers `path` to one that the processor and the
// shape allow. Throws std::bad_alloc.
void decode_attention(const AttentionShape& shape, std::span<const CachedRows> requests,
                      const void* q, void* out, AttentionPath path = best_attention_path());

}  // namespace moeinf
