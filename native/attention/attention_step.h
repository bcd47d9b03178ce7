// An attention layer between its projections and its output, for one token per request.
// Norms, rope, the new row of the cache and attention; for MLA also the absorbed products. All
// values are bfloat16, computed in float32 and rounded where the torch version in models/ rounds.
// So both versions differ only by the order of their sums.
//
//   gqa_step   q, k, v -> norm -> clip -> rotate -> k, v into the cache -> attend
//   mla_step   q = [nope | rope] per head, latent = [kv_lora | rope];
//              latent: norm, rotate (2i with 2i + 1), into the cache
//              q:      nope · W_uk -> kv_lora, rope rotated; attend; result · W_uv -> value
//
// The caches of a call belong to different requests, or to successive tokens of one in order: all
// new rows are written before the first is read. No other thread uses them during the call.
// Row r of every input belongs to requests[r], whose count includes the new token. The bits of a
// result depend only on its row and cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/decode_attention.h"

namespace moeinf {

// x / sqrt(mean(x²) + eps) over groups of `width` columns, rounded, times weight [width]; with
// `wide` in place of weight, times that [width] before the one rounding. Without both the row is
// copied unchanged.
struct RowNorm {
    const std::uint16_t* weight;
    std::size_t width;
    float eps;
    const float* wide = nullptr;
};

struct Angles {  // [requests][pairs] each
    const float* cos;
    const float* sin;
    std::size_t pairs;  // of columns that rotate; the columns after them do not
};

enum class Rotation {
    kHalf,   // i with i + pairs
    kPairs,  // 2i with 2i + 1
    kNone,   // the angles are not read
};

struct GqaStep {
    AttentionShape shape;  // bf16 or q8, key_width even
    RowNorm q_norm, k_norm;
    float clip;  // limits q, k and v to ± clip; 0: no limit
    Rotation rotation = Rotation::kHalf;
    bool norms_last = false;  // the norms come after the rotation
};

struct MlaStep {
    AttentionShape shape;  // bf16 or q8, one key head, key_width = kv_lora + rope, value_width = kv_lora
    std::size_t nope, value;
    RowNorm latent_norm;
    const std::uint16_t* kv_b;  // [heads][nope + value][kv_lora]: W_uk, then W_uv
};

// Computes one step with q [R][heads · W], k [R][kv_heads · W], v [R][kv_heads · V] and out
// [R][heads · V]. Throws std::bad_alloc.
void gqa_step(const GqaStep& step, std::span<const CachedRows> requests, const std::uint16_t* q,
              const std::uint16_t* k, const std::uint16_t* v, Angles angles, std::uint16_t* out);

// Computes one step with q [R][heads · (nope + rope)], latent [R][kv_lora + rope], out
// [R][heads · value]; angles.pairs is rope / 2. Throws std::bad_alloc.
void mla_step(const MlaStep& step, std::span<const CachedRows> requests, const std::uint16_t* q,
              const std::uint16_t* latent, Angles angles, std::uint16_t* out);

// Normalises x [rows][width] into out; may be in place.
void rms_norm(const RowNorm& norm, const std::uint16_t* x, std::size_t rows, std::uint16_t* out);

}  // namespace moeinf
