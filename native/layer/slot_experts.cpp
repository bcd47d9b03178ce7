// Groups a layer's rows by expert.
#include "layer/slot_experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "threads/scratch.h"

namespace moeinf {
namespace {

thread_local Scratch rows_scratch;

struct Group {
    std::int64_t id;
    std::vector<std::int64_t> places;
};

}  // namespace

std::ptrdiff_t count_present(const SlotExperts& experts, const LayerRouting& routing) noexcept {
    const std::int32_t* const table = experts.table + routing.layer * experts.experts;
    std::ptrdiff_t events = 0;
    for (std::size_t i = 0; i < routing.rows * routing.top_k; ++i) {
        const std::int64_t id = routing.ids[i];
        if (id == -1) continue;
        if (id < 0 || id >= static_cast<std::int64_t>(experts.experts) || table[id] < 0) return -1;
        ++events;
    }
    return events;
}

void run_present(ThreadPool& pool, const Kernels& kernels, const SlotExperts& experts,
                 const LayerRouting& routing, const std::byte* x, std::byte* out, Dtype dtype) {
    const std::size_t count = routing.rows * routing.top_k, width = experts.shape.hidden;
    const std::size_t row_bytes = width * (dtype == Dtype::kF32 ? 4 : 2);
    std::byte* const rows = rows_scratch.take(count * row_bytes);
    std::vector<Group> groups;
    for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t id = routing.ids[i];
        if (id < 0) {
            std::memset(rows + i * row_bytes, 0, row_bytes);
            continue;
        }
        auto at = std::find_if(groups.begin(), groups.end(),
                               [&](const Group& group) { return group.id == id; });
        if (at == groups.end()) at = groups.insert(at, Group{id, {}});
        at->places.push_back(static_cast<std::int64_t>(i));
    }
    const std::int32_t* const table = experts.table + routing.layer * experts.experts;
    std::vector<ExpertRows> parts;
    for (const auto& [id, places] : groups) {
        const auto slot = static_cast<std::size_t>(table[id]);
        parts.push_back({experts.slots + slot * experts.slot_bytes, places});
    }
    expert_ffn(pool, kernels, experts.shape, parts, x, routing.top_k, rows, dtype);
    combine(rows, routing.weights, routing.rows, routing.top_k, width, out, dtype);
}

}  // namespace moeinf
