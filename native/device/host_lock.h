// Page-locks a slot pool, slice after slice, so that the device's copy engine reads it directly.
// The caller decides when to stop.
//
//   pool   |<- slice 0 ->|<- slice 1 ->| ... |<- the last, shorter ->|
//          |s0|s1|..|s k-1|s k|..                                     a slice is whole slots:
//          |<------- locked_slots() ------->|                         a copy may not cross two
//
// Why slices: registering 63 GiB in one call blocks for seconds, and it is all or nothing. A thread
// locks slices of some 256 MiB during the load. When it stops (out of memory, refused by the
// system) the rest stays pageable: slower to copy, but correct.
//
// Why whole pages: the system locks pages. A page shared by two slices would be locked twice, which
// the driver may refuse. Pages are larger than kPageBytes on some machines.
//
// Locking touches the pages: a locked slice is resident even before it holds experts.
//
// Threads: one thread calls lock_next; any thread may call locked_slots, which only grows.
// Shutdown: the copies that read the pool end before the last reference to the HostLock is released
// (DeviceSlots holds one, and ends its copies first). Then every slice is unlocked, then the pool
// may be destroyed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <numeric>

#include "device/cuda_driver.h"
#include "queue/slot_pool.h"

namespace moeinf {

// Returns the slots of a slice of about slice_bytes: at least one, and each slice starts on a page.
constexpr std::size_t slots_of_slice(std::size_t slice_bytes, std::size_t slot_bytes,
                                     std::size_t page_bytes) {
    const std::size_t step = page_bytes / std::gcd(page_bytes, slot_bytes);
    return std::max(step, slice_bytes / slot_bytes / step * step);
}
static_assert(slots_of_slice(12 << 10, 4 << 10, 4 << 10) == 3);
static_assert(slots_of_slice(1, 4 << 10, 4 << 10) == 1);
static_assert(slots_of_slice(1 << 20, 20 << 10, 64 << 10) == 48);
static_assert(slots_of_slice(1 << 10, 20 << 10, 64 << 10) == 16);

class HostLock {
  public:
    HostLock(std::shared_ptr<Context> context, std::shared_ptr<SlotPool> pool,
             std::size_t slice_bytes);
    ~HostLock();
    HostLock(const HostLock&) = delete;
    HostLock& operator=(const HostLock&) = delete;

    // Returns the bytes that the next lock_next would lock; 0 when all are locked.
    std::size_t next_bytes() const noexcept;
    // Locks one more slice. Throws DriverError; locked slices stay locked.
    void lock_next();
    // Returns the number of page-locked slots: those from slot 0 on.
    std::size_t locked_slots() const noexcept { return locked_.load(std::memory_order_acquire); }

    const SlotPool& pool() const noexcept { return *pool_; }

  private:
    std::shared_ptr<Context> context_;
    std::shared_ptr<SlotPool> pool_;
    std::size_t slice_slots_;
    std::atomic<std::size_t> locked_{0};
};

}  // namespace moeinf
