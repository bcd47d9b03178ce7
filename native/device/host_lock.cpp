// Registers and unregisters slices.
#include "device/host_lock.h"

#include <algorithm>

#include "platform/memory.h"

namespace moeinf {

HostLock::HostLock(std::shared_ptr<Context> context, std::shared_ptr<SlotPool> pool,
                   std::size_t slice_bytes)
    : context_(std::move(context)),
      pool_(std::move(pool)),
      slice_slots_(slots_of_slice(slice_bytes, pool_->slot_bytes(),
                                  platform::page_bytes())) {}

HostLock::~HostLock() {
    for (std::size_t first = 0; first < locked_slots(); first += slice_slots_)
        context_->unlock(pool_->base() + first * pool_->slot_bytes());
}

std::size_t HostLock::next_bytes() const noexcept {
    return std::min(slice_slots_, pool_->slots() - locked_slots()) * pool_->slot_bytes();
}

void HostLock::lock_next() {
    const std::size_t bytes = next_bytes();
    if (bytes == 0) return;
    const std::size_t first = locked_slots();
    context_->lock(pool_->base() + first * pool_->slot_bytes(), bytes);
    locked_.store(first + bytes / pool_->slot_bytes(), std::memory_order_release);
}

}  // namespace moeinf
