// The arena of equal slots in device memory, and the copies that fill them.
// Does not know experts, or which of them deserves a slot: that is a Residency and a policy.
//
//   host pool (HostLock)         copy stream                         device arena
//   |s0|s1|..| -- one batch per layer, in the order of asking --> |d0|d1|..|  base() + d · slot_bytes
//
// One slot's life. Nothing here waits on the host; the two streams wait for each other:
//
//   copy stream      wait(read mark of d) · copy s -> d · record(arrived mark)
//   compute stream                            wait(arrived mark) · kernels · record(read mark)
//
//   copy()         a slot that is overwritten waits for the end of its last reader
//   begin_read()   kernels queued afterwards wait for the bytes of these slots
//   end_read()     after the kernels were queued: from here on the slots may be overwritten
//
// A mark is an event, shared by the slots of a batch. A stream that waits for an event waits for
// what was recorded when it was asked to, so a mark may be recorded anew once no slot names it.
//
// Sources: copy() returns while the host slots are still to be read. They must stay as they are
// until done(batch), or wait(batch), says so. From the part of the pool that is not page-locked the
// driver has read, or staged, everything by the time copy() returns; the rule is kept all the same.
//
// Errors: when copy() throws, none of its copies is under way any more, the batch does not exist
// and the bytes of its device slots are unspecified. An error that done or wait throws is the
// device's end: every later call fails, too.
//
// One thread. Shutdown: the destructor lets both streams end what touches the arena, frees it, and
// only then lets go of the HostLock, so of the pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "device/cuda_driver.h"
#include "device/host_lock.h"

namespace moeinf {

using Batch = std::uint64_t;  // ascending from 1

// A batched call with a smaller entry is carried out before it returns: then one by one is better.
inline constexpr std::size_t kLeastBatchedBytes = std::size_t{256} << 10;

class DeviceSlots {
  public:
    // compute: the stream of the kernels, null for the default one; it must outlive this.
    // Throws DriverError: out_of_memory() when the arena does not fit.
    DeviceSlots(std::shared_ptr<Context> context, std::shared_ptr<HostLock> host, std::size_t slots,
                StreamHandle compute, std::size_t least_batched_bytes = kLeastBatchedBytes);
    ~DeviceSlots();
    DeviceSlots(const DeviceSlots&) = delete;
    DeviceSlots& operator=(const DeviceSlots&) = delete;

    DevicePointer base() const noexcept { return base_; }
    std::size_t slots() const noexcept { return state_.size(); }
    std::size_t slot_bytes() const noexcept { return host_->pool().slot_bytes(); }

    // Queues copies of `bytes` each, from[i] -> to[i]; the `to` are distinct. Throws
    // std::invalid_argument for slots that are none, DriverError.
    Batch copy(std::span<const std::size_t> from, std::span<const std::size_t> to,
               std::size_t bytes);
    bool done(Batch batch);
    void wait(Batch batch);

    void begin_read(std::span<const std::size_t> slots);
    void end_read(std::span<const std::size_t> slots);
    // Waits for everything that was queued to the compute stream.
    void finish() const { context_->synchronise(compute_); }

  private:
    struct Mark;  // an event that goes back to free_ with its last holder
    using MarkPtr = std::shared_ptr<Mark>;
    struct Slot {
        MarkPtr arrived;  // null: its bytes are known to be there
        MarkPtr read;     // null: nothing has read it since it was written
    };

    MarkPtr mark(StreamHandle stream);
    void wait_for(StreamHandle stream, std::span<const MarkPtr> marks) const;
    void check_slots(std::span<const std::size_t> slots) const;
    void queue_locked(std::span<const DeviceCopy> copies);

    std::shared_ptr<Context> context_;
    std::shared_ptr<HostLock> host_;
    StreamHandle compute_;
    std::size_t least_batched_bytes_;
    bool batches_;  // until the driver refuses one
    StreamHandle stream_ = nullptr;
    DevicePointer base_ = 0;
    std::shared_ptr<std::vector<EventHandle>> free_;
    std::size_t events_ = 0;  // ever made; each is in free_ or in one mark
    std::vector<Slot> state_;
    std::deque<std::pair<Batch, MarkPtr>> flying_;  // ascending; ended ones leave at the front
    Batch last_ = 0;
};

}  // namespace moeinf
