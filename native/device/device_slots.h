// The arena of equal slots in device memory, and the copies that fill them.
// A Residency and a policy decide which expert gets a slot.
//
//   host pool (HostLock)         copy stream                         device arena
//   |s0|s1|..| -- one batch per layer, in the order of asking --> |d0|d1|..|  base() + d · slot_bytes
//
// The life of one slot. The host never waits here; the two streams wait for each other:
//
//   copy stream      wait(read mark of d) · copy s -> d · record(arrived mark)
//   compute stream                            wait(arrived mark) · kernels · record(read mark)
//
//   copy()         the copy into a slot waits for the end of the slot's last reader
//   begin_read()   kernels queued after this call wait for the bytes of these slots
//   end_read()     called after the kernels are queued: later copies may overwrite the slots
//
// A mark is an event, shared by the slots of a batch. A stream that waits for an event waits for
// its last recording before the wait. So a mark may be recorded again once no slot refers to it.
//
// Sources: copy() returns before the host slots are read. They must not change until done(batch)
// returns true or wait(batch) returns. The driver reads or stages slots that are not page-locked
// before copy() returns; the rule holds for them too.
//
// Errors: when copy() throws, no copy of it is in flight, the batch does not exist and the bytes of
// its device slots are unspecified. After done or wait throws, the device is unusable: every later
// call fails too.
//
// One thread. Shutdown: the destructor waits until both streams have finished with the arena, and
// frees it. Only then it releases the HostLock, and with it the pool.
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

// A batched call with smaller copies blocks until they are done, so single calls are better.
inline constexpr std::size_t kLeastBatchedBytes = std::size_t{256} << 10;

class DeviceSlots {
  public:
    // compute: the stream of the kernels, null for the default one; it must outlive this.
    // Throws std::invalid_argument (no slots, too many bytes), DriverError (out_of_memory() when
    // the arena does not fit).
    DeviceSlots(std::shared_ptr<Context> context, std::shared_ptr<HostLock> host, std::size_t slots,
                StreamHandle compute, std::size_t least_batched_bytes = kLeastBatchedBytes);
    ~DeviceSlots();
    DeviceSlots(const DeviceSlots&) = delete;
    DeviceSlots& operator=(const DeviceSlots&) = delete;

    DevicePointer base() const noexcept { return base_; }
    std::size_t slots() const noexcept { return state_.size(); }
    std::size_t slot_bytes() const noexcept { return host_->pool().slot_bytes(); }

    // Queues copies of `bytes` each, from[i] -> to[i]; the `to` are distinct. Throws
    // std::invalid_argument (a slot out of range, lengths that differ, an empty batch, bytes that
    // are 0 or more than a slot), DriverError.
    Batch copy(std::span<const std::size_t> from, std::span<const std::size_t> to,
               std::size_t bytes);
    bool done(Batch batch);
    void wait(Batch batch);

    void begin_read(std::span<const std::size_t> slots);
    void end_read(std::span<const std::size_t> slots);
    // Waits for all work queued to the compute stream.
    void finish() const { context_->synchronise(compute_); }

  private:
    struct Mark;  // an event that returns to free_ when its last holder releases it
    using MarkPtr = std::shared_ptr<Mark>;
    struct Slot {
        MarkPtr arrived;  // null: its bytes have arrived
        MarkPtr read;     // null: no kernel has read it since its last copy
    };

    MarkPtr mark(StreamHandle stream);
    void wait_for(StreamHandle stream, std::span<const MarkPtr> marks) const;
    void check_slots(std::span<const std::size_t> slots) const;
    void queue_locked(std::span<const DeviceCopy> copies);

    std::shared_ptr<Context> context_;
    std::shared_ptr<HostLock> host_;
    StreamHandle compute_;
    std::size_t least_batched_bytes_;
    bool batches_;  // true until the driver refuses a batch
    StreamHandle stream_ = nullptr;
    DevicePointer base_ = 0;
    std::shared_ptr<std::vector<EventHandle>> free_;
    std::size_t events_ = 0;  // the number created; each is in free_ or in one mark
    std::vector<Slot> state_;
    std::deque<std::pair<Batch, MarkPtr>> flying_;  // in flight, ascending; ends at the front first
    Batch last_ = 0;
};

}  // namespace moeinf
