// Reader threads: start, serve, watch and join. copy_queue.h argues why the code is correct.
// Does not know of files, time, threads, Python or experts.
#pragma once

#include "queue/copy_queue.h"

#define MOEINF_QUEUE                                                            \
    template <class Sync, class Clock, SlotReader Reader, SlotCopier Copier, class Allocator>
#define MOEINF_CORE CopyQueueCore<Sync, Clock, Reader, Copier, Allocator>

namespace moeinf {

MOEINF_QUEUE MOEINF_CORE::CopyQueueCore(QueueShape shape, Reader& reader, Copier& copier,
                                        Clock& clock, const Allocator& allocator)
    : shape_(shape),
      reader_(reader),
      copier_(copier),
      clock_(clock),
      allocator_(allocator),
      cancelled_(make_failure({Failure::Kind::kCancelled, 0, {}, "the ticket was cancelled"})),
      closed_(make_failure(
          {Failure::Kind::kCancelled, 0, {}, "the queue was closed before the read"})),
      unknown_(make_failure({Failure::Kind::kInternal, 0, {}, "a reader thread failed"})),
      hangs_(make_failure({Failure::Kind::kIo, ETIMEDOUT, {}, "a read does not end"})),
      sources_(allocator),
      records_(allocator),
      queue_(allocator),
      slots_(shape.slots, Slot{}, allocator),
      running_(allocator) {
    if (shape.readers < 1 || shape.readers > kMaxReaders)
        throw std::invalid_argument("readers must be from 1 to " + std::to_string(kMaxReaders));
    if (!(shape.hang_seconds > 0)) throw std::invalid_argument("hang_seconds must be above 0");
    if (shape.busy < 1) throw std::invalid_argument("busy must be above 0");
    if (shape.piece_bytes == 0 || shape.piece_bytes % kPageBytes != 0)
        throw std::invalid_argument("piece_bytes must be a multiple of " +
                                    std::to_string(kPageBytes) + " above 0");
    const auto readers = static_cast<std::size_t>(shape.readers);
    running_.resize(readers);
    readers_.reserve(readers);
    try {
        for (Running& running : running_) {
            {
                const Lock lock(mutex_);
                ++serving_;
            }
            readers_.push_back(Sync::start([this, &running] { serve(running); }));
        }
    } catch (...) {
        {
            const Lock lock(mutex_);
            --serving_;  // for the thread that did not start
        }
        close();
        throw;
    }
}

MOEINF_QUEUE MOEINF_CORE::~CopyQueueCore() {
    close();
    {
        Lock lock(mutex_);
        while (serving_ != 0 || counters_.waiting != 0) changed_.wait(lock);
    }
    close();  // joins the readers that hung before
}

// Returns how many more reads of that priority may begin now.
MOEINF_QUEUE std::size_t MOEINF_CORE::takeable(double priority) const {
    if (paused_) return 0;
    const int live = shape_.readers - static_cast<int>(counters_.hung);
    const int ahead = std::min(shape_.busy, speculative_limit(std::max(1, live)));
    const int most = priority == kDemand ? live : demand_comes_first() ? 0 : ahead;
    return static_cast<std::size_t>(std::max(0, most - static_cast<int>(counters_.running)));
}

MOEINF_QUEUE bool MOEINF_CORE::can_take() const {
    return !queue_.empty() && takeable(queue_.begin()->priority) > 0;
}

// Returns whether a demand is queued or runs; hung ones do not count.
MOEINF_QUEUE bool MOEINF_CORE::demand_comes_first() const {
    if (!queue_.empty() && queue_.begin()->priority == kDemand) return true;
    return std::any_of(running_.begin(), running_.end(), [](const Running& running) {
        return running.ticket != 0 && running.priority == kDemand && !running.hung;
    });
}

// Returns whether a read stops between two pieces. While paused or closing it ends instead.
MOEINF_QUEUE bool MOEINF_CORE::yields(const Running& running) const {
    return running.priority != kDemand && !paused_ && !closing_ && demand_comes_first();
}

// The body of a reader thread; `running` is its own, written under mutex_.
MOEINF_QUEUE void MOEINF_CORE::serve(Running& running) {
    Lock lock(mutex_);
    for (;;) {
        while (!closing_ && !can_take()) work_.wait(lock);
        if (closing_) break;  // close() has already ended all queued tickets
        auto taken = queue_.extract(queue_.begin());  // kept: to yield must not allocate
        const Ticket ticket = taken.value().ticket;
        Record& record = records_.find(ticket)->second;
        record.state = State::kRunning;
        running = {.ticket = ticket,
                   .source = record.source,
                   .priority = record.priority,
                   .since = clock_.seconds()};
        ++counters_.running;
        // No wake-up is sent when the last demand ends: its reader takes speculation and wakes the
        // next reader, and so on.
        if (record.priority != kDemand && can_take()) work_.notify_one();
        const std::size_t slot = record.slot;
        const Source& source = sources_[running.source];
        slots_[slot].holds = kNothing;

        Transfer transferred{.read_bytes = record.read_bytes};
        do {
            const std::size_t most =
                running.priority == kDemand ? source.bytes : shape_.piece_bytes;
            lock.unlock();
            transfer(source, slot, most, transferred);
            lock.lock();
        } while (!transferred.ended && !running.hung && !yields(running));

        counters_.reads += transferred.reads;
        counters_.bytes_read += transferred.reads * source.bytes;
        counters_.read_seconds += transferred.seconds;
        counters_.whole_calls += transferred.whole_calls;
        counters_.whole_seconds += transferred.whole_seconds;
        counters_.piece_calls += transferred.piece_calls;
        counters_.piece_seconds += transferred.piece_seconds;
        if (transferred.ended && !transferred.failure) slots_[slot].holds = running.source;
        if (running.hung) {  // watch() has ended the ticket; its record may be gone
            --counters_.hung;
            slots_[slot].owner = 0;
            changed_.notify_all();
        } else if (!transferred.ended) {
            --counters_.running;
            ++counters_.yields;
            record.state = State::kQueued;
            record.read_bytes = transferred.read_bytes;
            taken.value().priority = record.priority;
            queue_.insert(std::move(taken));
        } else {
            --counters_.running;
            const State state = transferred.failure ? State::kFailed : State::kDone;
            end(record, state, std::move(transferred.failure));
        }
        running = {};
    }
    --serving_;
    changed_.notify_all();  // under mutex_: close() cannot free the condition during this call
}

// Ends the tickets of hung reads; when all readers hang, ends the queued tickets too.
MOEINF_QUEUE void MOEINF_CORE::watch() noexcept {
    const double now = clock_.seconds(), sure = std::min(kSureSeconds, shape_.hang_seconds);
    const Running* oldest = nullptr;
    for (Running& running : running_) {
        if (running.ticket == 0 || now - running.since < shape_.hang_seconds) continue;
        if (oldest == nullptr || running.since < oldest->since) oldest = &running;
        if (running.overdue == 0) running.overdue = now;
        if (running.hung || now - running.overdue < sure) continue;
        Record& record = records_.find(running.ticket)->second;
        end(record, State::kFailed, hang_failure(running, now, "the read has not ended"));
        slots_[record.slot].owner = running.ticket;  // until its thread returns
        running.hung = true;
        --counters_.running;
        ++counters_.hung;
        work_.notify_all();  // the limit on speculation is lower, but one fewer read runs
    }
    if (oldest == nullptr || counters_.hung < serving_ || queue_.empty()) return;
    const FailurePtr failure = hang_failure(*oldest, now, "not read: every reader waits, longest");
    for (const Place& place : queue_)
        end(records_.find(place.ticket)->second, State::kFailed, failure);
    queue_.clear();
}

MOEINF_QUEUE FailurePtr MOEINF_CORE::hang_failure(const Running& running, double now,
                                                  const char* what) noexcept {
    try {
        char text[96];
        std::snprintf(text, sizeof text, "%s for %.1f s", what, now - running.since);
        return make_failure({Failure::Kind::kIo, ETIMEDOUT, sources_[running.source].path, text});
    } catch (...) {
        return hangs_;
    }
}

MOEINF_QUEUE void MOEINF_CORE::pause() {
    const Lock lock(mutex_);
    paused_ = true;
}

MOEINF_QUEUE void MOEINF_CORE::resume() {
    const Lock lock(mutex_);
    paused_ = false;
    work_.notify_all();
}

MOEINF_QUEUE bool MOEINF_CORE::close() {
    Lock lock(mutex_);
    if (!closing_) {
        closing_ = true;
        for (const Place& place : queue_)
            end(records_.find(place.ticket)->second, State::kCancelled, closed_);
        queue_.clear();
        work_.notify_all();
    }
    for (;;) {
        watch();
        if (serving_ == counters_.hung) break;
        Sync::wait_for(changed_, lock, kPollSeconds);
    }
    if (serving_ != 0) return false;
    if (!std::exchange(joining_, true)) {
        lock.unlock();
        for (auto& reader : readers_) reader.join();
        lock.lock();
        joined_ = true;
        changed_.notify_all();
    }
    while (!joined_) changed_.wait(lock);
    return true;
}

}  // namespace moeinf

#undef MOEINF_CORE
#undef MOEINF_QUEUE
