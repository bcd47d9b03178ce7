// Queues copies, and the waits between copies and their readers.
#include "device/device_slots.h"

#include <algorithm>
#include <string>

namespace moeinf {

struct DeviceSlots::Mark {
    std::shared_ptr<std::vector<EventHandle>> home;
    EventHandle event = nullptr;
    bool done = false;  // the event was seen to have completed
    ~Mark() { home->push_back(event); }  // has room for all events: cannot throw
};

DeviceSlots::DeviceSlots(std::shared_ptr<Context> context, std::shared_ptr<HostLock> host,
                         std::size_t slots, StreamHandle compute,
                         std::size_t least_batched_bytes)
    : context_(std::move(context)),
      host_(std::move(host)),
      compute_(compute),
      least_batched_bytes_(least_batched_bytes),
      batches_(context_->driver().has_batches()),
      free_(std::make_shared<std::vector<EventHandle>>()),
      state_(slots) {
    if (slots == 0) throw std::invalid_argument("a device tier needs at least one slot");
    std::size_t bytes = 0;
    if (__builtin_mul_overflow(slots, slot_bytes(), &bytes))
        throw std::invalid_argument("more bytes than a device can address");
    base_ = context_->allocate(bytes);
    try {
        stream_ = context_->make_stream();
    } catch (...) {
        context_->free(base_, bytes);
        throw;
    }
}

DeviceSlots::~DeviceSlots() {
    const std::size_t bytes = slots() * slot_bytes();
    for (const StreamHandle stream : {stream_, compute_}) {
        try {
            context_->synchronise(stream);
        } catch (const DriverError&) {  // a device that has failed does not access memory
        }
    }
    state_.clear();
    flying_.clear();
    for (const EventHandle event : *free_) context_->destroy_event(event);
    context_->destroy_stream(stream_);
    context_->free(base_, bytes);
}

DeviceSlots::MarkPtr DeviceSlots::mark(StreamHandle stream) {
    if (free_->empty()) {
        free_->reserve(events_ + 1);
        free_->push_back(context_->make_event());
        ++events_;
    }
    MarkPtr mark = std::make_shared<Mark>();
    mark->home = free_;
    mark->event = free_->back();
    free_->pop_back();
    context_->record(mark->event, stream);
    return mark;
}

void DeviceSlots::wait_for(StreamHandle stream, std::span<const MarkPtr> marks) const {
    const Mark* before = nullptr;  // slots of a batch share a mark, and are mostly adjacent
    for (const MarkPtr& mark : marks) {
        if (mark.get() == before) continue;
        context_->wait(stream, mark->event);
        before = mark.get();
    }
}

void DeviceSlots::check_slots(std::span<const std::size_t> slots) const {
    for (const std::size_t slot : slots)
        if (slot >= state_.size())
            throw std::invalid_argument("there is no device slot " + std::to_string(slot));
}

void DeviceSlots::queue_locked(std::span<const DeviceCopy> copies) {
    if (batches_ && copies.size() > 1 && copies[0].bytes >= least_batched_bytes_) {
        try {
            context_->copy_batch(copies, stream_);
            return;
        } catch (const DriverError& error) {  // some drivers have the call only for other devices
            if (!error.unsupported()) throw;
            batches_ = false;
        }
    }
    for (const DeviceCopy& copy : copies) context_->copy(copy, stream_);
}

Batch DeviceSlots::copy(std::span<const std::size_t> from, std::span<const std::size_t> to,
                        std::size_t bytes) {
    const SlotPool& pool = host_->pool();
    if (from.empty() || from.size() != to.size() || bytes == 0 || bytes > slot_bytes())
        throw std::invalid_argument("a batch copies into as many slots as it reads, at least one");
    check_slots(to);
    const std::size_t locked_slots = host_->locked_slots();
    std::vector<DeviceCopy> locked, pageable;
    std::vector<MarkPtr> readers;
    for (std::size_t i = 0; i < from.size(); ++i) {
        if (from[i] >= pool.slots())
            throw std::invalid_argument("there is no host slot " + std::to_string(from[i]));
        (from[i] < locked_slots ? locked : pageable)
            .push_back({base_ + to[i] * slot_bytes(), pool.base() + from[i] * slot_bytes(), bytes});
        if (const MarkPtr& read = state_[to[i]].read) readers.push_back(read);
    }
    MarkPtr arrived;
    try {
        wait_for(stream_, readers);
        queue_locked(locked);
        for (const DeviceCopy& copy : pageable) context_->copy(copy, stream_);
        arrived = mark(stream_);
        flying_.emplace_back(last_ + 1, arrived);
    } catch (...) {
        try {
            context_->synchronise(stream_);
        } catch (const DriverError&) {  // report the first error
        }
        throw;
    }
    for (const std::size_t slot : to) state_[slot] = {arrived, nullptr};
    return ++last_;
}

bool DeviceSlots::done(Batch batch) {
    while (!flying_.empty() && flying_.front().first <= batch) {  // one stream: they end in order
        if (!context_->done(flying_.front().second->event)) return false;
        flying_.pop_front();
    }
    return true;
}

void DeviceSlots::wait(Batch batch) {
    while (!flying_.empty() && flying_.front().first <= batch) {
        context_->synchronise_event(flying_.front().second->event);
        flying_.pop_front();
    }
}

void DeviceSlots::begin_read(std::span<const std::size_t> slots) {
    check_slots(slots);
    std::vector<MarkPtr> arriving;
    for (const std::size_t slot : slots) {
        MarkPtr& arrived = state_[slot].arrived;
        if (!arrived) continue;
        if (std::find(arriving.begin(), arriving.end(), arrived) != arriving.end()) continue;
        if (!arrived->done) arrived->done = context_->done(arrived->event);
        if (arrived->done) {
            arrived.reset();
        } else {
            arriving.push_back(arrived);
        }
    }
    wait_for(compute_, arriving);
}

void DeviceSlots::end_read(std::span<const std::size_t> slots) {
    check_slots(slots);
    if (slots.empty()) return;
    const MarkPtr read = mark(compute_);
    for (const std::size_t slot : slots) state_[slot].read = read;
}

}  // namespace moeinf
