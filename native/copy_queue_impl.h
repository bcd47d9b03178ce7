// The definitions of CopyQueueCore; copy_queue.h holds the arguments for why they are right.
// Does not know of files, time, threads, Python or experts.
#pragma once

#include "copy_queue.h"

#define MOEINF_QUEUE template <class Sync, class Clock, SlotReader Reader>

namespace moeinf {

MOEINF_QUEUE CopyQueueCore<Sync, Clock, Reader>::CopyQueueCore(Arena arena, int readers,
                                                               Reader& reader, Clock& clock)
    : arena_(arena),
      reader_(reader),
      clock_(clock),
      cancelled_(std::make_shared<const Failure>(
          Failure{Failure::Kind::kCancelled, 0, {}, "the ticket was cancelled"})),
      closed_(std::make_shared<const Failure>(
          Failure{Failure::Kind::kCancelled, 0, {}, "the queue was closed before the read"})),
      unknown_(std::make_shared<const Failure>(
          Failure{Failure::Kind::kInternal, 0, {}, "a reader thread failed"})),
      owner_(arena.slots, 0) {
    if (readers < 1 || readers > kMaxReaders)
        throw std::invalid_argument("readers must be from 1 to " + std::to_string(kMaxReaders));
    readers_.reserve(static_cast<std::size_t>(readers));
    try {
        for (int i = 0; i < readers; ++i) readers_.push_back(Sync::start([this] { serve(); }));
    } catch (...) {
        close();
        throw;
    }
}

MOEINF_QUEUE CopyQueueCore<Sync, Clock, Reader>::~CopyQueueCore() {
    close();
    Lock lock(mutex_);
    while (counters_.waiting != 0) changed_.wait(lock);
}

MOEINF_QUEUE SourceId CopyQueueCore<Sync, Clock, Reader>::add_source(Source source) {
    constexpr std::uint64_t kMaxOffset = std::numeric_limits<std::int64_t>::max();
    if (source.offset % kPageBytes != 0)
        throw std::invalid_argument("offset " + std::to_string(source.offset) +
                                    " is not a multiple of " + std::to_string(kPageBytes));
    if (source.bytes == 0 || source.bytes > arena_.slot_bytes)
        throw std::invalid_argument(std::to_string(source.bytes) + " bytes do not fit a slot of " +
                                    std::to_string(arena_.slot_bytes));
    if (source.offset > kMaxOffset - arena_.slot_bytes)
        throw std::invalid_argument("offset " + std::to_string(source.offset) + " is too large");
    const Lock lock(mutex_);
    sources_.push_back(std::move(source));
    return sources_.size() - 1;
}

MOEINF_QUEUE void CopyQueueCore<Sync, Clock, Reader>::check(SourceId source,
                                                            std::size_t slot) const {
    if (source >= sources_.size())
        throw std::out_of_range("no source " + std::to_string(source) + ": there are " +
                                std::to_string(sources_.size()));
    if (slot >= arena_.slots)
        throw std::out_of_range("no slot " + std::to_string(slot) + ": there are " +
                                std::to_string(arena_.slots));
    if (owner_[slot] != 0)
        throw std::logic_error("slot " + std::to_string(slot) + " belongs to live ticket " +
                               std::to_string(owner_[slot]));
}

MOEINF_QUEUE std::vector<Ticket> CopyQueueCore<Sync, Clock, Reader>::submit(
    std::span<const SourceId> sources, std::span<const std::size_t> slots, double priority) {
    if (sources.size() != slots.size())
        throw std::invalid_argument(std::to_string(sources.size()) + " sources for " +
                                    std::to_string(slots.size()) + " slots");
    if (std::isnan(priority)) throw std::invalid_argument("a priority must be a number");
    const Lock lock(mutex_);
    if (closing_) throw std::logic_error("the queue is closed");
    // Everything that can throw happens on the side; merging nodes and writing owner_ cannot.
    Records records;
    std::set<Place> places;
    std::vector<Ticket> tickets;
    tickets.reserve(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
        check(sources[i], slots[i]);
        const Ticket ticket = next_ticket_ + i;
        records.emplace(
            ticket,
            Record{.source = sources[i], .slot = slots[i], .priority = priority, .failure = {}});
        places.insert({priority, ticket});
        tickets.push_back(ticket);
    }
    std::vector<std::size_t> unique(slots.begin(), slots.end());
    std::sort(unique.begin(), unique.end());
    if (std::adjacent_find(unique.begin(), unique.end()) != unique.end())
        throw std::logic_error("a slot is named twice in one submission");

    records_.merge(records);
    queue_.merge(places);
    for (std::size_t i = 0; i < slots.size(); ++i) owner_[slots[i]] = tickets[i];
    next_ticket_ += slots.size();
    counters_.submitted += slots.size();
    if (slots.size() == 1)
        work_.notify_one();
    else
        work_.notify_all();
    return tickets;
}

// Null when the ticket has been delivered and forgotten.
MOEINF_QUEUE auto CopyQueueCore<Sync, Clock, Reader>::find(Ticket ticket) -> Record* {
    if (ticket == 0 || ticket >= next_ticket_)
        throw std::invalid_argument("ticket " + std::to_string(ticket) + " was never issued");
    const auto found = records_.find(ticket);
    return found == records_.end() ? nullptr : &found->second;
}

MOEINF_QUEUE auto CopyQueueCore<Sync, Clock, Reader>::find_waitable(Ticket ticket) -> Record& {
    Record* const record = find(ticket);
    if (record == nullptr)
        throw std::invalid_argument("ticket " + std::to_string(ticket) +
                                    " has already been waited for or collected");
    return *record;
}

MOEINF_QUEUE void CopyQueueCore<Sync, Clock, Reader>::raise_priority(Ticket ticket,
                                                                     double priority) {
    if (std::isnan(priority)) throw std::invalid_argument("a priority must be a number");
    const Lock lock(mutex_);
    Record* const record = find(ticket);
    if (record == nullptr || record->state != State::kQueued || priority <= record->priority)
        return;
    auto node = queue_.extract(Place{record->priority, ticket});
    node.value().priority = record->priority = priority;
    queue_.insert(std::move(node));
}

MOEINF_QUEUE bool CopyQueueCore<Sync, Clock, Reader>::cancel(Ticket ticket) {
    const Lock lock(mutex_);
    Record* const record = find(ticket);
    if (record == nullptr || record->state != State::kQueued) return false;
    queue_.erase(Place{record->priority, ticket});
    end(*record, State::kCancelled, cancelled_);
    return true;
}

MOEINF_QUEUE void CopyQueueCore<Sync, Clock, Reader>::end(Record& record, State state,
                                                          FailurePtr failure) noexcept {
    record.state = state;
    record.failure = std::move(failure);
    record.ended_as = ++ended_count_;
    owner_[record.slot] = 0;
    ++counters_.undelivered;
    if (state == State::kDone) ++counters_.done;
    if (state == State::kFailed) ++counters_.errors;
    if (state == State::kCancelled) ++counters_.cancelled;
    changed_.notify_all();
}

MOEINF_QUEUE void CopyQueueCore<Sync, Clock, Reader>::forget(typename Records::iterator record) {
    records_.erase(record);
    --counters_.undelivered;
}

// One waiter goes; the last of them takes a delivered record along.
MOEINF_QUEUE void CopyQueueCore<Sync, Clock, Reader>::leave(Ticket ticket, bool delivered) {
    const auto found = records_.find(ticket);  // there: a record with waiters is never forgotten
    Record& record = found->second;
    record.delivered |= delivered;
    if (--record.waiters == 0 && record.delivered) forget(found);
}

// Sleeps until something ends or it is time to ask; false when the caller should give up.
MOEINF_QUEUE template <class KeepWaiting>
bool CopyQueueCore<Sync, Clock, Reader>::block(Lock& lock, double& next_poll,
                                               KeepWaiting& keep_waiting) {
    Sync::wait_for(changed_, lock, kPollSeconds);
    if (clock_.seconds() < next_poll) return true;
    lock.unlock();
    const bool keep = keep_waiting();
    lock.lock();
    next_poll = clock_.seconds() + kPollSeconds;
    return keep;
}

MOEINF_QUEUE template <class KeepWaiting>
bool CopyQueueCore<Sync, Clock, Reader>::wait(std::span<const Ticket> tickets,
                                              KeepWaiting&& keep_waiting) {
    FailurePtr failure;
    bool keep = true;
    {
        Lock lock(mutex_);
        for (const Ticket ticket : tickets) find_waitable(ticket);  // all, before any is touched
        for (const Ticket ticket : tickets) ++find_waitable(ticket).waiters;
        ++counters_.waiting;
        double next_poll = clock_.seconds() + kPollSeconds;
        for (const Ticket ticket : tickets) {
            const Record& record = find_waitable(ticket);
            while (keep && !record.ended()) keep = block(lock, next_poll, keep_waiting);
        }
        Ticket failed = 0;
        for (const Ticket ticket : tickets) {
            if (!keep || failure) break;
            failure = find_waitable(ticket).failure;
            if (failure) failed = ticket;
        }
        for (const Ticket ticket : tickets) leave(ticket, keep && (!failure || ticket == failed));
        --counters_.waiting;
        if (closing_) changed_.notify_all();  // the destructor may be waiting for us to go
    }
    if (failure) throw Failed(std::move(failure));
    return keep;
}

MOEINF_QUEUE template <class KeepWaiting>
bool CopyQueueCore<Sync, Clock, Reader>::drain(KeepWaiting&& keep_waiting) {
    Lock lock(mutex_);
    ++counters_.waiting;
    bool keep = true;
    double next_poll = clock_.seconds() + kPollSeconds;
    while (keep && (!queue_.empty() || counters_.running != 0))
        keep = block(lock, next_poll, keep_waiting);
    --counters_.waiting;
    if (closing_) changed_.notify_all();
    return keep;
}

MOEINF_QUEUE auto CopyQueueCore<Sync, Clock, Reader>::collect() -> std::vector<Ended> {
    const Lock lock(mutex_);
    std::vector<typename Records::iterator> found;
    if (counters_.undelivered == 0) return {};
    for (auto at = records_.begin(); at != records_.end(); ++at)
        if (at->second.ended() && at->second.waiters == 0) found.push_back(at);
    std::sort(found.begin(), found.end(),
              [](auto a, auto b) { return a->second.ended_as < b->second.ended_as; });
    std::vector<Ended> ended;
    ended.reserve(found.size());
    for (const auto at : found) {
        ended.push_back({at->first, std::move(at->second.failure)});
        forget(at);
    }
    return ended;
}

MOEINF_QUEUE void CopyQueueCore<Sync, Clock, Reader>::pause() {
    const Lock lock(mutex_);
    paused_ = true;
}

MOEINF_QUEUE void CopyQueueCore<Sync, Clock, Reader>::resume() {
    const Lock lock(mutex_);
    paused_ = false;
    work_.notify_all();
}

MOEINF_QUEUE void CopyQueueCore<Sync, Clock, Reader>::close() {
    Lock lock(mutex_);
    if (closing_) {
        while (!joined_) changed_.wait(lock);
        return;
    }
    closing_ = true;
    for (const Place& place : queue_)
        end(records_.find(place.ticket)->second, State::kCancelled, closed_);
    queue_.clear();
    work_.notify_all();
    lock.unlock();
    for (auto& reader : readers_) reader.join();
    lock.lock();
    joined_ = true;
    changed_.notify_all();
}

MOEINF_QUEUE Counters CopyQueueCore<Sync, Clock, Reader>::counters() const {
    const Lock lock(mutex_);
    Counters counters = counters_;
    counters.queued = queue_.size();
    return counters;
}

// The body of a reader thread.
MOEINF_QUEUE void CopyQueueCore<Sync, Clock, Reader>::serve() {
    Lock lock(mutex_);
    for (;;) {
        while (!closing_ && (paused_ || queue_.empty())) work_.wait(lock);
        if (closing_) return;  // close() has already ended all that was queued
        Record& record = records_.find(queue_.begin()->ticket)->second;
        queue_.erase(queue_.begin());
        record.state = State::kRunning;
        ++counters_.running;
        const Source& source = sources_[record.source];
        std::byte* const slot = arena_.base + record.slot * arena_.slot_bytes;

        lock.unlock();
        Transfer transferred = transfer(source, slot);
        lock.lock();

        --counters_.running;
        counters_.reads += transferred.reads;
        counters_.bytes_read += transferred.reads * source.bytes;
        counters_.read_seconds += transferred.seconds;
        const State state = transferred.failure ? State::kFailed : State::kDone;
        end(record, state, std::move(transferred.failure));
    }
}

// Reads and checks; wrong bytes are read once more, since a cached page can be worse than the disk.
MOEINF_QUEUE auto CopyQueueCore<Sync, Clock, Reader>::transfer(const Source& source,
                                                               std::byte* slot) noexcept
    -> Transfer {
    Transfer result;
    const double nothing_runs = -1;
    double started = nothing_runs;
    try {
        std::uint32_t got = 0;
        for (int attempt = 0; attempt < 2; ++attempt) {
            if (attempt > 0) reader_.forget(source);
            started = clock_.seconds();
            reader_.read(source, slot);
            result.seconds += clock_.seconds() - std::exchange(started, nothing_runs);
            ++result.reads;
            if (!source.crc32c) return result;
            got = reader_.checksum(source, slot);
            if (got == *source.crc32c) return result;
        }
        char text[128];
        std::snprintf(text, sizeof text,
                      "checksum mismatch: expected crc32c 0x%08x, got 0x%08x of %zu bytes at %llu",
                      static_cast<unsigned>(*source.crc32c), static_cast<unsigned>(got),
                      source.bytes, static_cast<unsigned long long>(source.offset));
        result.failure = std::make_shared<const Failure>(
            Failure{Failure::Kind::kCorrupt, EBADMSG, source.path, text});
    } catch (const Failed& error) {
        result.failure = error.failure();
    } catch (const std::exception& error) {
        result.failure = internal_failure(error.what());
    } catch (...) {
        result.failure = unknown_;
    }
    if (started != nothing_runs) result.seconds += clock_.seconds() - started;
    return result;
}

MOEINF_QUEUE FailurePtr
CopyQueueCore<Sync, Clock, Reader>::internal_failure(const char* what) noexcept {
    try {
        return std::make_shared<const Failure>(Failure{
            Failure::Kind::kInternal, 0, {}, std::string("a reader thread failed: ") + what});
    } catch (...) {
        return unknown_;
    }
}

}  // namespace moeinf

#undef MOEINF_QUEUE
