// Cuts decode attention into tasks, and combines their partials.
#include "attention/decode_attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/decode_attention_paths.h"
#include "kernels/kernels.h"
#include "platform/cpu.h"
#include "threads/scratch.h"
#include "threads/thread_pool.h"

namespace moeinf {
namespace {

using attention::Path;
using attention::Task;

constexpr float kLog2E = 1.4426950408889634f;
constexpr std::size_t kLine = 64;
constexpr std::size_t kWorthSharing = 1 << 15;  // floats to combine: about ten microseconds

thread_local Scratch scratch;

std::size_t round_up(std::size_t value, std::size_t step) {
    return (value + step - 1) / step * step;
}

AttentionPath lowered(AttentionPath path, const AttentionShape& shape) {
    path = std::min(path, best_attention_path());
    const bool pairs =
        shape.bf16 && !shape.q8 && shape.key_width % 32 == 0 && shape.value_width % 32 == 0;
    return path == AttentionPath::kAvx512Bf16 && !pairs ? AttentionPath::kAvx512 : path;
}

const Path& implementation(AttentionPath path, bool q8) {
    switch (path) {
#if defined(__x86_64__)
        case AttentionPath::kAvx512Bf16: return attention::kAvx512Bf16Path;
        case AttentionPath::kAvx512: return q8 ? attention::kAvx2Q8Path : attention::kAvx512Path;
        case AttentionPath::kAvx2: return q8 ? attention::kAvx2Q8Path : attention::kAvx2Path;
#elif defined(__aarch64__)
        case AttentionPath::kNeon: return q8 ? attention::kNeonQ8Path : attention::kNeonPath;
#endif
        default: return q8 ? attention::kPortableQ8Path : attention::kPortablePath;
    }
}

// The query heads of one key head in groups of kMaxLanesHeads; the last group may have fewer. A
// group's partials are padded to a power of two, because the bfloat16 path writes that many.
struct Groups {
    std::size_t sharing;  // P

    std::size_t count() const { return (sharing + kMaxLanesHeads - 1) / kMaxLanesHeads; }
    std::size_t heads(std::size_t group) const {
        return std::min(kMaxLanesHeads, sharing - group * kMaxLanesHeads);
    }
    std::size_t rows() const {
        const std::size_t last = heads(count() - 1);
        return (count() - 1) * kMaxLanesHeads + std::bit_ceil(last);
    }
};

struct Request {
    std::size_t first_task;
    std::size_t skipped;  // tokens before the window
    std::size_t seen, block, blocks;
};

class Call {
  public:
    Call(const AttentionShape& shape, std::span<const CachedRows> rows, const void* q, void* out,
         AttentionPath path)
        : shape_(shape), rows_(rows), q_(static_cast<const std::byte*>(q)),
          out_(static_cast<std::byte*>(out)), path_(implementation(lowered(path, shape), shape.q8)),
          groups_{shape.heads / shape.kv_heads}, item_(shape.bf16 ? 2 : 4),
          cached_(shape.q8 ? sizeof(Q8) : item_),
          partial_stride_(round_up(shape.value_width + 2, kLine / sizeof(float))),
          task_floats_(groups_.rows() * partial_stride_),
          group_bytes_(round_up(path_.packed_bytes(std::min(groups_.sharing, kMaxLanesHeads),
                                                   shape.key_width), kLine)) {
        requests_.reserve(rows.size());
        for (const CachedRows& row : rows) {
            const std::size_t seen = shape.window ? std::min(shape.window, row.count) : row.count;
            const std::size_t block = block_keys(seen), blocks = (seen + block - 1) / block;
            requests_.push_back({tasks_, row.count - seen, seen, block, blocks});
            tasks_ += blocks * shape.kv_heads;
        }
    }

    void run() {
        const std::size_t packed = rows_.size() * shape_.kv_heads * groups_.count() * group_bytes_;
        packed_ = scratch.take(packed + tasks_ * task_floats_ * sizeof(float));
        partials_ = reinterpret_cast<float*>(packed_ + packed);
        ThreadPool& pool = compute_pool();
        for (std::size_t i = 0; i < rows_.size() * shape_.kv_heads; ++i) pack(i);
        pool.parallel_for(tasks_, [this](std::size_t task) { compute(task); });
        const std::size_t combined = rows_.size() * shape_.heads;
        if (tasks_ * task_floats_ >= kWorthSharing)
            pool.parallel_for(combined, [this](std::size_t i) { combine(i); });
        else
            for (std::size_t i = 0; i < combined; ++i) combine(i);
    }

  private:
    std::byte* packed_at(std::size_t row_head, std::size_t group) const {
        return packed_ + (row_head * groups_.count() + group) * group_bytes_;
    }

    void pack(std::size_t row_head) const {
        const std::byte* q = q_ + row_head * groups_.sharing * shape_.key_width * item_;
        for (std::size_t group = 0; group < groups_.count(); ++group)
            path_.pack(q + group * kMaxLanesHeads * shape_.key_width * item_, groups_.heads(group),
                       shape_.key_width, shape_.bf16, packed_at(row_head, group));
    }

    void compute(std::size_t index) const {
        const auto after = std::upper_bound(
            requests_.begin(), requests_.end(), index,
            [](std::size_t task, const Request& request) { return task < request.first_task; });
        const auto r = static_cast<std::size_t>(after - requests_.begin()) - 1;
        const Request& request = requests_[r];
        const CachedRows& row = rows_[r];
        const std::size_t head = (index - request.first_task) / request.blocks;
        const std::size_t begin = (index - request.first_task) % request.blocks * request.block;
        const std::size_t token = request.skipped + begin;
        const auto* keys = static_cast<const std::byte*>(row.keys) +
                           (head * row.key_head_stride + token * row.key_row_stride) * cached_;
        const auto* values = static_cast<const std::byte*>(row.values) +
                             (head * row.value_head_stride + token * row.value_row_stride) * cached_;
        for (std::size_t group = 0; group < groups_.count(); ++group)
            path_.run({packed_at(r * shape_.kv_heads + head, group), keys, values,
                       row.key_row_stride, row.value_row_stride,
                       std::min(request.block, request.seen - begin), groups_.heads(group),
                       shape_.key_width, shape_.value_width, shape_.scale * kLog2E, shape_.bf16,
                       partials_ + index * task_floats_ + group * kMaxLanesHeads * partial_stride_,
                       partial_stride_});
    }

    // Sums the partials of one query head into that of the first block, and writes its output row.
    void combine(std::size_t index) const {
        const std::size_t width = shape_.value_width, head = index % shape_.heads;
        const Request& request = requests_[index / shape_.heads];
        const std::size_t task = request.first_task + head / groups_.sharing * request.blocks;
        float* sum = partials_ + task * task_floats_ + head % groups_.sharing * partial_stride_;
        const auto partial = [&](std::size_t block) { return sum + block * task_floats_; };
        float top = shape_.sinks ? shape_.sinks[head] * kLog2E : sum[width];
        for (std::size_t block = 0; block < request.blocks; ++block)
            top = std::max(top, partial(block)[width]);
        float divisor = shape_.sinks ? std::exp2(shape_.sinks[head] * kLog2E - top) : 0.0f;
        for (std::size_t block = 0; block < request.blocks; ++block) {
            const float* from = partial(block);
            const float factor = std::exp2(from[width] - top);
            divisor += factor * from[width + 1];
            if (block == 0)
                for (std::size_t i = 0; i < width; ++i) sum[i] *= factor;
            else
                for (std::size_t i = 0; i < width; ++i) sum[i] += factor * from[i];
        }
        if (shape_.bf16) {
            auto* to = reinterpret_cast<std::uint16_t*>(out_) + index * width;
            for (std::size_t i = 0; i < width; ++i) to[i] = narrow(sum[i] / divisor);
        } else {
            auto* to = reinterpret_cast<float*>(out_) + index * width;
            for (std::size_t i = 0; i < width; ++i) to[i] = sum[i] / divisor;
        }
    }

    const AttentionShape& shape_;
    std::span<const CachedRows> rows_;
    const std::byte* q_;
    std::byte* out_;
    const Path& path_;
    Groups groups_;
    std::size_t item_;    // bytes of a number of q and out
    std::size_t cached_;  // bytes of an item of the cache
    std::size_t partial_stride_;
    std::size_t task_floats_;
    std::size_t group_bytes_;
    std::vector<Request> requests_;
    std::size_t tasks_ = 0;
    std::byte* packed_ = nullptr;
    float* partials_ = nullptr;
};

}  // namespace

AttentionPath best_attention_path() noexcept {
#if defined(__x86_64__)
    static const AttentionPath best = [] {
        const bool wide = platform::cpu().avx512f && platform::cpu().avx512bw &&
                          platform::cpu().avx512dq && platform::cpu().avx512vl;
        if (wide && platform::cpu().avx512bf16) return AttentionPath::kAvx512Bf16;
        if (wide) return AttentionPath::kAvx512;
        if (platform::cpu().avx2 && platform::cpu().fma)
            return AttentionPath::kAvx2;
        return AttentionPath::kPortable;
    }();
    return best;
#elif defined(__aarch64__)
    static const bool found = platform::cpu().dot_product;
    return found ? AttentionPath::kNeon : AttentionPath::kPortable;
#else
    return AttentionPath::kPortable;
#endif
}

const char* name_of(AttentionPath path) noexcept {
    switch (path) {
        case AttentionPath::kAvx512Bf16: return "avx512bf16";
        case AttentionPath::kAvx512: return "avx512";
        case AttentionPath::kAvx2: return "avx2";
        case AttentionPath::kNeon: return "neon";
        default: return "portable";
    }
}

std::size_t block_keys(std::size_t seen) noexcept {
    constexpr std::size_t kStep = kMinBlockKeys * kMaxBlocks;
    return kMinBlockKeys * std::max<std::size_t>(1, (seen + kStep - 1) / kStep);
}

void decode_attention(const AttentionShape& shape, std::span<const CachedRows> requests,
                      const void* q, void* out, AttentionPath path) {
    Call(shape, requests, q, out, path).run();
}

}  // namespace moeinf
