// Runs the steps in order and writes the cache's new row.
#include "attention/attention_step.h"

#include <algorithm>
#include <cstring>

#include "attention/decode_attention_paths.h"
#include "attention/kv_q8.h"
#include "threads/scratch.h"
#include "threads/thread_pool.h"

namespace moeinf {
namespace {

void norm_row(const RowNorm& norm, const std::uint16_t* x, std::size_t width, std::uint16_t* out) {
    const attention::RowMath& math = attention::row_math();
    if (norm.wide)
        for (std::size_t at = 0; at < width; at += norm.width)
            math.wide_norm(norm.wide, norm.width, norm.eps, x + at, out + at);
    else if (norm.weight)
        for (std::size_t at = 0; at < width; at += norm.width)
            math.norm(norm.weight, norm.width, norm.eps, x + at, out + at);
    else if (out != x)
        std::memcpy(out, x, width * sizeof *x);
}

void clip_row(float clip, std::size_t width, std::uint16_t* x) {
    if (clip == 0) return;
    const float bound = widen(narrow(clip));
    for (std::size_t i = 0; i < width; ++i) {
        const float value = widen(x[i]);
        if (value > bound || value < -bound) x[i] = narrow(value > 0 ? bound : -bound);
    }
}

// Rotates the pairs (2i, 2i + 1) by the angles cos, sin [width / 2].
void rotate_pairs(const std::uint16_t* x, const float* cos, const float* sin, std::size_t width,
                  std::uint16_t* out) {
    for (std::size_t i = 0; i < width / 2; ++i) {
        const float a = widen(x[2 * i]), b = widen(x[2 * i + 1]);
        out[2 * i] = narrow(a * cos[i] - b * sin[i]);
        out[2 * i + 1] = narrow(a * sin[i] + b * cos[i]);
    }
}

// Writes the newest row of a head, at `offset` items of a plane of the cache.
void write_row(const AttentionShape& shape, const void* plane, std::size_t offset,
               const std::uint16_t* row, std::size_t width) {
    void* at = const_cast<void*>(plane);
    if (shape.q8)
        quantise_row(row, width, static_cast<Q8*>(at) + offset);
    else
        std::memcpy(static_cast<std::uint16_t*>(at) + offset, row, width * sizeof *row);
}

void write_key(const AttentionShape& shape, const CachedRows& cache, std::size_t head,
               const std::uint16_t* row) {
    const std::size_t newest = (cache.count - 1) * cache.key_row_stride;
    write_row(shape, cache.keys, head * cache.key_head_stride + newest, row, shape.key_width);
}

void write_value(const AttentionShape& shape, const CachedRows& cache, std::size_t head,
                 const std::uint16_t* row) {
    const std::size_t newest = (cache.count - 1) * cache.value_row_stride;
    write_row(shape, cache.values, head * cache.value_head_stride + newest, row,
              shape.value_width);
}

// Norms, clips and rotates the heads of a row of queries or keys.
void make_heads(const GqaStep& step, const RowNorm& norm, const std::uint16_t* from,
                std::size_t columns, Angles angles, std::uint16_t* out) {
    const RowNorm none{nullptr, columns, 0};
    norm_row(step.norms_last ? none : norm, from, columns, out);
    clip_row(step.clip, columns, out);
    for (std::size_t at = 0; at < columns; at += step.shape.key_width) {
        if (step.rotation == Rotation::kHalf)
            attention::row_math().rotate_half(out + at, angles.cos, angles.sin, 2 * angles.pairs,
                                              out + at);
        else if (step.rotation == Rotation::kPairs)
            rotate_pairs(out + at, angles.cos, angles.sin, 2 * angles.pairs, out + at);
    }
    if (step.norms_last) norm_row(norm, out, columns, out);
}

std::uint16_t* scratch(std::size_t items) {
    thread_local Scratch held;
    return reinterpret_cast<std::uint16_t*>(held.take(items * sizeof(std::uint16_t)));
}

}  // namespace

void rms_norm(const RowNorm& norm, const std::uint16_t* x, std::size_t rows, std::uint16_t* out) {
    norm_row(norm, x, rows * norm.width, out);
}

void gqa_step(const GqaStep& step, std::span<const CachedRows> requests, const std::uint16_t* q,
              const std::uint16_t* k, const std::uint16_t* v, Angles angles, std::uint16_t* out) {
    const AttentionShape& shape = step.shape;
    const std::size_t width = shape.key_width, value = shape.value_width;
    const std::size_t wide = shape.heads * width, keys = shape.kv_heads * width;
    const std::size_t values = shape.kv_heads * value;
    std::uint16_t* queries = scratch(requests.size() * wide + std::max(keys, values));
    std::uint16_t* row = queries + requests.size() * wide;
    for (std::size_t r = 0; r < requests.size(); ++r) {
        const Angles mine{angles.cos + r * angles.pairs, angles.sin + r * angles.pairs,
                          angles.pairs};
        make_heads(step, step.q_norm, q + r * wide, wide, mine, queries + r * wide);
        make_heads(step, step.k_norm, k + r * keys, keys, mine, row);
        for (std::size_t g = 0; g < shape.kv_heads; ++g)
            write_key(shape, requests[r], g, row + g * width);
        std::memcpy(row, v + r * values, values * sizeof *row);
        clip_row(step.clip, values, row);
        for (std::size_t g = 0; g < shape.kv_heads; ++g)
            write_value(shape, requests[r], g, row + g * value);
    }
    decode_attention(shape, requests, queries, out);
}

void mla_step(const MlaStep& step, std::span<const CachedRows> requests, const std::uint16_t* q,
              const std::uint16_t* latent, Angles angles, std::uint16_t* out) {
    const AttentionShape& shape = step.shape;
    const std::size_t lora = shape.value_width, width = shape.key_width, rope = width - lora;
    const std::size_t heads = shape.heads, items = requests.size() * heads;
    const std::size_t per_head = (step.nope + step.value) * lora, q_width = step.nope + rope;
    std::uint16_t* queries = scratch(items * (width + lora) + width);
    std::uint16_t* mixed = queries + items * width;
    std::uint16_t* row = mixed + items * lora;
    const attention::RowMath& math = attention::row_math();
    for (std::size_t r = 0; r < requests.size(); ++r) {
        norm_row(step.latent_norm, latent + r * width, lora, row);
        rotate_pairs(latent + r * width + lora, angles.cos + r * rope / 2,
                     angles.sin + r * rope / 2, rope, row + lora);
        write_key(shape, requests[r], 0, row);
    }
    ThreadPool& pool = compute_pool();
    pool.parallel_for(items, [&](std::size_t i) {
        const std::size_t r = i / heads, h = i % heads;
        const std::uint16_t* from = q + i * q_width;
        math.sum(step.kv_b + h * per_head, step.nope, lora, from, queries + i * width);
        rotate_pairs(from + step.nope, angles.cos + r * rope / 2, angles.sin + r * rope / 2, rope,
                     queries + i * width + lora);
    });
    decode_attention(shape, requests, queries, mixed);
    pool.parallel_for(items, [&](std::size_t i) {
        const std::size_t h = i % heads;
        math.dot(step.kv_b + h * per_head + step.nope * lora, step.value, lora,
                     mixed + i * lora, out + i * step.value);
    });
}

}  // namespace moeinf
