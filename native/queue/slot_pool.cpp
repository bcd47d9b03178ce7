// Maps, aligns and unmaps the arena.
#include "queue/slot_pool.h"

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <system_error>

#include "platform/memory.h"

namespace moeinf {
namespace {

// Maps exactly `bytes`, aligned to kHugePageBytes: maps kHugePageBytes more, then trims both ends.
// Returns null with errno set when the system refuses.
std::byte* map_aligned(const ArenaCalls& calls, std::size_t bytes) {
    const std::size_t wide = bytes + kHugePageBytes;
    void* const raw = calls.map(wide);
    if (raw == nullptr) return nullptr;
    const auto start = reinterpret_cast<std::uintptr_t>(raw);
    const std::size_t head = (kHugePageBytes - start % kHugePageBytes) % kHugePageBytes;
    auto* const base = static_cast<std::byte*>(raw) + head;
    if (head != 0) calls.unmap(raw, head);
    calls.unmap(base + bytes, wide - head - bytes);
    return base;
}

}  // namespace

SlotPool::SlotPool(std::size_t slots, std::size_t slot_bytes, ArenaCalls calls)
    : calls_{calls.map ? calls.map : platform::map_memory,
             calls.unmap ? calls.unmap : platform::unmap_memory},
      slots_(slots),
      slot_bytes_(0) {
    if (slots == 0 || slot_bytes == 0)
        throw std::invalid_argument("a slot pool needs at least one slot of at least one byte");
    const std::string shape =
        std::to_string(slots) + " slots of " + std::to_string(slot_bytes) + " bytes";
    std::size_t bytes = 0;
    std::size_t wide = 0;
    if (slot_bytes > kMaxRoundable ||
        __builtin_mul_overflow(slots, round_up_to_page(slot_bytes), &bytes) ||
        __builtin_add_overflow(bytes, kHugePageBytes, &wide) || wide > PTRDIFF_MAX)
        throw ArenaError("cannot allocate " + shape + ": more bytes than a process can address");
    slot_bytes_ = round_up_to_page(slot_bytes);
    base_ = map_aligned(calls_, bytes);
    if (base_ == nullptr) {
        const int code = errno;
        throw ArenaError("cannot allocate " + std::to_string(bytes) + " bytes (" + shape +
                         "): " + std::generic_category().message(code));
    }
    if (bytes >= kHugeAdviceBytes) platform::advise_huge_pages(base_, bytes, true);
}

void SlotPool::release(std::size_t slot) {
    if (slot >= slots_) throw std::out_of_range("the pool has no such slot");
    platform::give_back(base_ + slot * slot_bytes_, slot_bytes_);
}

void SlotPool::release_all() {
    platform::give_back(base_, bytes());
}

SlotPool::~SlotPool() {
    calls_.unmap(base_, bytes());
}

}  // namespace moeinf
