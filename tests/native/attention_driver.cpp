// Decode attention on fixed inputs: one line "name crc32c" per shape and type of cache, after a
// check against float64. Caches in q8 are compared with the values that their rows stand for.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "attention/decode_attention.h"
#include "attention/kv_q8.h"
#include "check.h"
#include "kernels/bf16.h"
#include "queue/crc32c.h"

namespace {

using namespace moeinf;

enum class Cache { kF32, kBf16, kQ8 };
constexpr const char* kNames[] = {"f32", "bf16", "q8"};
constexpr std::size_t kCounts[] = {1, 15, 65, 129, 300};  // no multiples of a tile or a vector

struct Shape {
    const char* name;
    std::size_t heads, kv_heads, key_width, value_width;
    bool latent;  // the values are the first columns of the keys
    std::size_t window;
};
constexpr Shape kShapes[] = {
    {"olmoe", 4, 4, 128, 128, false, 0},   {"qwen3", 16, 2, 128, 128, false, 0},
    {"mla", 16, 1, 576, 512, true, 0},     {"mla, 19 heads", 19, 1, 96, 64, true, 0},
    {"odd", 6, 2, 37, 21, false, 0},       {"no pairs", 5, 1, 80, 80, false, 0},
    {"window", 4, 2, 64, 64, false, 130},
};

// xorshift: the same numbers on every machine.
float next_number() {
    static std::uint32_t state = 2463534242u;
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return static_cast<float>(static_cast<std::int32_t>(state)) / 2147483648.0f;
}

// Rows of a cache [kv_heads][count][width]: their bytes, and the values that they stand for.
struct Plane {
    std::size_t count, width, row_items;
    std::vector<std::byte> bytes;
    std::vector<double> values;

    Plane(std::size_t heads, std::size_t tokens, std::size_t columns, Cache cache)
        : count(tokens), width(columns),
          row_items(cache == Cache::kQ8 ? q8_row_bytes(columns) : columns) {
        const std::size_t row_bytes = row_items * item_bytes(cache);
        bytes.resize(heads * count * row_bytes);
        for (std::size_t row = 0; row < heads * count; ++row)
            write(bytes.data() + row * row_bytes, cache);
    }
    static std::size_t item_bytes(Cache cache) {
        return cache == Cache::kF32 ? 4 : cache == Cache::kBf16 ? 2 : 1;
    }
    void write(std::byte* to, Cache cache) {
        std::vector<std::uint16_t> halves(width);
        std::vector<float> numbers(width);
        for (std::size_t i = 0; i < width; ++i)
            halves[i] = narrow(numbers[i] = 1.7f * next_number());
        if (cache == Cache::kF32) {
            std::memcpy(to, numbers.data(), 4 * width);
        } else if (cache == Cache::kBf16) {
            std::memcpy(to, halves.data(), 2 * width);
            for (std::size_t i = 0; i < width; ++i) numbers[i] = widen(halves[i]);
        } else {
            quantise_row(halves.data(), width, reinterpret_cast<Q8*>(to));
            for (std::size_t i = 0; i < width; ++i) {
                const std::byte* block = to + i / kQ8Values * kQ8BlockBytes;
                std::uint16_t scale;
                std::memcpy(&scale, block, 2);
                numbers[i] = widen(scale) *
                             static_cast<std::int8_t>(block[2 + i % kQ8Values]);
            }
        }
        values.insert(values.end(), numbers.begin(), numbers.end());
    }
    const double* row(std::size_t head, std::size_t token) const {
        return values.data() + (head * count + token) * width;
    }
};

// Returns the outputs [heads][value_width] of one query, computed in float64.
std::vector<double> exact(const Shape& shape, const std::vector<float>& q, const Plane& keys,
                          const Plane& values, double scale) {
    std::vector<double> out(shape.heads * shape.value_width);
    for (std::size_t h = 0; h < shape.heads; ++h) {
        const std::size_t head = h / (shape.heads / shape.kv_heads);
        std::size_t first = 0;
        if (shape.window && keys.count > shape.window) first = keys.count - shape.window;
        std::vector<double> scores(keys.count);
        double top = -1e300, sum = 0;
        for (std::size_t k = first; k < keys.count; ++k) {
            const double* const row = keys.row(head, k);
            for (std::size_t i = 0; i < shape.key_width; ++i)
                scores[k] += row[i] * q[h * shape.key_width + i];
            top = std::max(top, scores[k] *= scale);
        }
        for (std::size_t k = first; k < keys.count; ++k)
            sum += scores[k] = std::exp(scores[k] - top);
        for (std::size_t k = first; k < keys.count; ++k)
            for (std::size_t i = 0; i < shape.value_width; ++i)
                out[h * shape.value_width + i] += scores[k] / sum * values.row(head, k)[i];
    }
    return out;
}

// The limits of tests/native/test_decode_attention.py.
void compare(const std::vector<float>& found, const std::vector<double>& wanted, Cache cache) {
    double squares = 0, ideal = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
        const double wrong = std::abs(found[i] - wanted[i]);
        const double rounded = widen(narrow(static_cast<float>(wanted[i]))) - wanted[i];
        squares += wrong * wrong;
        ideal += rounded * rounded;
        if (cache == Cache::kF32)
            CHECK(wrong < 3e-6);
        else
            CHECK(wrong <= std::abs(wanted[i]) / 256 + (cache == Cache::kQ8 ? 2e-4 : 4e-3));
    }
    if (cache != Cache::kF32) CHECK(squares < (cache == Cache::kQ8 ? 1.1 : 2.5) * ideal);
}

void attend(const Shape& shape, Cache cache, AttentionPath path) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.key_width));
    const AttentionShape call{shape.heads, shape.kv_heads, shape.key_width, shape.value_width,
                              scale, cache != Cache::kF32, shape.window, nullptr,
                              cache == Cache::kQ8};
    std::uint32_t crc = 0;
    std::vector<float> all;
    std::vector<double> wanted;
    for (const std::size_t count : kCounts) {
        const Plane keys(shape.kv_heads, count, shape.key_width, cache);
        Plane values = keys;
        if (shape.latent) {
            for (std::size_t row = 0; row < shape.kv_heads * count; ++row)
                std::copy_n(keys.values.data() + row * keys.width, shape.value_width,
                            values.values.data() + row * shape.value_width);
            values.width = shape.value_width;
        } else {
            values = Plane(shape.kv_heads, count, shape.value_width, cache);
        }
        const void* const from = shape.latent ? keys.bytes.data() : values.bytes.data();
        std::vector<float> q(shape.heads * shape.key_width);
        std::vector<std::uint16_t> halves(q.size()), narrow_out(shape.heads * shape.value_width);
        std::vector<float> out(narrow_out.size());
        for (std::size_t i = 0; i < q.size(); ++i) {
            halves[i] = narrow(q[i] = 3.4f * next_number());
            if (call.bf16) q[i] = widen(halves[i]);
        }
        const CachedRows rows{keys.bytes.data(), from, count * keys.row_items, keys.row_items,
                              count * values.row_items, values.row_items, count};
        if (call.bf16) {
            decode_attention(call, {&rows, 1}, halves.data(), narrow_out.data(), path);
            for (std::size_t i = 0; i < out.size(); ++i) out[i] = widen(narrow_out[i]);
        } else {
            decode_attention(call, {&rows, 1}, q.data(), out.data(), path);
        }
        crc ^= crc32c(out.data(), 4 * out.size()) + static_cast<std::uint32_t>(count);
        const std::vector<double> right = exact(shape, q, keys, values, scale);
        all.insert(all.end(), out.begin(), out.end());
        wanted.insert(wanted.end(), right.begin(), right.end());
    }
    compare(all, wanted, cache);
    std::printf("%s %s %08x\n", kNames[static_cast<int>(cache)], shape.name, crc);
}

}  // namespace

// Argument: the path's name, or "" for the fastest one of this processor. Exits with 3 for a path
// that it does not have.
int main(int count, char** arguments) {
    const char* const name = count > 1 ? arguments[1] : "";
    const AttentionPath best = best_attention_path();
    AttentionPath path = best;
    if (*name) {
        path = AttentionPath::kPortable;
        while (path != best && std::strcmp(name, name_of(path)) != 0)
            path = static_cast<AttentionPath>(static_cast<int>(path) + 1);
        if (std::strcmp(name, name_of(path)) != 0) return 3;
        if (path == AttentionPath::kNeon && path != best) return 3;  // best is one of x86-64
    }
    for (const Cache cache : {Cache::kF32, Cache::kBf16, Cache::kQ8})
        for (const Shape& shape : kShapes) attend(shape, cache, path);
}
