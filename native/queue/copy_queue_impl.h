// Tickets: submit, raise, cancel, wait, and the transfer of one ticket. copy_queue.h argues why the
// code is correct. Does not know of files, time, threads, Python or experts.
#pragma once

#include "queue/copy_queue.h"

#define MOEINF_QUEUE                                                            \
    template <class Sync, class Clock, SlotReader Reader, SlotCopier Copier, class Allocator>
#define MOEINF_CORE CopyQueueCore<Sync, Clock, Reader, Copier, Allocator>

namespace moeinf {

MOEINF_QUEUE void MOEINF_CORE::check(const Source& source) const {
    constexpr std::uint64_t kMaxOffset = std::numeric_limits<std::int64_t>::max();
    if (source.offset % kPageBytes != 0)
        throw std::invalid_argument("offset " + std::to_string(source.offset) +
                                    " is not a multiple of " + std::to_string(kPageBytes));
    if (source.bytes == 0 || source.bytes > shape_.slot_bytes)
        throw std::invalid_argument(std::to_string(source.bytes) + " bytes do not fit a slot of " +
                                    std::to_string(shape_.slot_bytes));
    if (source.offset > kMaxOffset - shape_.slot_bytes)
        throw std::invalid_argument("offset " + std::to_string(source.offset) + " is too large");
}

MOEINF_QUEUE SourceId MOEINF_CORE::add_source(Source source) {
    check(source);
    const Lock lock(mutex_);
    sources_.push_back(std::move(source));
    return sources_.size() - 1;
}

MOEINF_QUEUE void MOEINF_CORE::replace_sources(std::span<const SourceId> ids,
                                               std::span<const Source> sources) {
    if (ids.size() != sources.size())
        throw std::invalid_argument(std::to_string(sources.size()) + " sources for " +
                                    std::to_string(ids.size()) + " ids");
    std::vector<Source, Of<Source>> made(sources.begin(), sources.end(), allocator_);
    for (const Source& source : made) check(source);
    const Lock lock(mutex_);
    const auto named = [&](SourceId id) {
        return std::find(ids.begin(), ids.end(), id) != ids.end();
    };
    const auto refuse = [](SourceId id, Ticket ticket) {
        throw std::logic_error("source " + std::to_string(id) + " belongs to live ticket " +
                               std::to_string(ticket));
    };
    for (const SourceId id : ids)
        if (id >= sources_.size()) throw std::out_of_range("no source " + std::to_string(id));
    for (const Place& place : queue_)
        if (const Record& record = records_.find(place.ticket)->second; named(record.source))
            refuse(record.source, place.ticket);
    for (const Running& running : running_)  // hung ones too: their threads read the source
        if (running.ticket != 0 && named(running.source)) refuse(running.source, running.ticket);
    for (Slot& slot : slots_)
        if (slot.holds != kNothing && named(slot.holds)) slot.holds = kNothing;
    for (std::size_t i = 0; i < ids.size(); ++i) std::swap(sources_[ids[i]], made[i]);
}

MOEINF_QUEUE void MOEINF_CORE::check(SourceId source,
                                                            std::size_t slot) const {
    if (source >= sources_.size())
        throw std::out_of_range("no source " + std::to_string(source) + ": there are " +
                                std::to_string(sources_.size()));
    if (slot >= shape_.slots)
        throw std::out_of_range("no slot " + std::to_string(slot) + ": there are " +
                                std::to_string(shape_.slots));
    if (const Ticket owner = slots_[slot].owner; owner != 0) {
        const auto found = records_.find(owner);
        const bool hangs = found == records_.end() || found->second.ended();
        throw std::logic_error("slot " + std::to_string(slot) + " belongs to " +
                               (hangs ? "hung" : "live") + " ticket " + std::to_string(owner));
    }
}

MOEINF_QUEUE Ticket MOEINF_CORE::submit(SourceId source, std::size_t slot, double priority) {
    {
        const Lock lock(mutex_);
        if (!closing_ && source < sources_.size() && slot < shape_.slots &&
            slots_[slot].holds == source && slots_[slot].owner == 0 && !std::isnan(priority)) {
            ++counters_.resident;
            return kResident;
        }
    }
    return submit({&source, 1}, {&slot, 1}, priority).front();
}

MOEINF_QUEUE auto MOEINF_CORE::submit(std::span<const SourceId> sources,
                                      std::span<const std::size_t> slots, double priority)
    -> Tickets {
    if (sources.size() != slots.size())
        throw std::invalid_argument(std::to_string(sources.size()) + " sources for " +
                                    std::to_string(slots.size()) + " slots");
    if (std::isnan(priority)) throw std::invalid_argument("a priority must be a number");
    std::vector<std::size_t, Of<std::size_t>> unique(slots.begin(), slots.end(), allocator_);
    std::sort(unique.begin(), unique.end());
    if (std::adjacent_find(unique.begin(), unique.end()) != unique.end())
        throw std::logic_error("a slot is named twice in one submission");
    Lock lock(mutex_);
    if (closing_) throw std::logic_error("the queue is closed");
    // Everything that can throw works on local containers; merging nodes and writing slots_ cannot.
    Records records(allocator_);
    Places places(allocator_);
    Tickets tickets(slots.size(), kResident, allocator_);
    Ticket next = next_ticket_;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        check(sources[i], slots[i]);
        if (slots_[slots[i]].holds == sources[i]) continue;
        tickets[i] = next++;
        records.emplace(
            tickets[i],
            Record{.source = sources[i], .slot = slots[i], .priority = priority, .failure = {}});
        places.insert({priority, tickets[i]});
    }
    records_.merge(records);
    queue_.merge(places);
    for (std::size_t i = 0; i < slots.size(); ++i) slots_[slots[i]].owner = tickets[i];
    const std::uint64_t added = next - next_ticket_;
    counters_.submitted += added;
    counters_.resident += slots.size() - added;
    next_ticket_ = next;
    // Wake only the readers that can take work, after unlocking the mutex. On few cores each
    // useless wake-up takes processor time from the threads that compute.
    std::size_t wake = std::min(static_cast<std::size_t>(added), takeable(priority));
    lock.unlock();
    for (; wake > 0; --wake) work_.notify_one();
    return tickets;
}

// Returns null when the ticket has been delivered and forgotten.
MOEINF_QUEUE auto MOEINF_CORE::find(Ticket ticket) -> Record* {
    if (ticket >= next_ticket_)
        throw std::invalid_argument("ticket " + std::to_string(ticket) + " was never issued");
    const auto found = records_.find(ticket);
    return found == records_.end() ? nullptr : &found->second;
}

MOEINF_QUEUE auto MOEINF_CORE::find_waitable(Ticket ticket) -> Record& {
    Record* const record = find(ticket);
    if (record == nullptr)
        throw std::invalid_argument("ticket " + std::to_string(ticket) +
                                    " has already been waited for or collected");
    return *record;
}

MOEINF_QUEUE void MOEINF_CORE::raise_priority(Ticket ticket,
                                                                     double priority) {
    if (std::isnan(priority)) throw std::invalid_argument("a priority must be a number");
    const Lock lock(mutex_);
    Record* const record = find(ticket);
    if (record == nullptr || record->ended() || priority <= record->priority) return;
    if (record->state == State::kRunning) {
        record->priority = priority;
        for (Running& running : running_)
            if (running.ticket == ticket) running.priority = priority;
        return;
    }
    auto node = queue_.extract(Place{record->priority, ticket});
    node.value().priority = record->priority = priority;
    queue_.insert(std::move(node));
    if (priority == kDemand) work_.notify_one();  // a reader may be free for demand alone
}

MOEINF_QUEUE bool MOEINF_CORE::cancel(Ticket ticket, bool half_read) {
    const Lock lock(mutex_);
    Record* const record = find(ticket);
    if (record == nullptr || record->state != State::kQueued) return false;
    if (record->read_bytes != 0 && !half_read) return false;
    queue_.erase(Place{record->priority, ticket});
    end(*record, State::kCancelled, cancelled_);
    return true;
}

MOEINF_QUEUE void MOEINF_CORE::invalidate(std::size_t slot) {
    const Lock lock(mutex_);
    if (slot >= shape_.slots) throw std::out_of_range("no slot " + std::to_string(slot));
    slots_[slot].holds = kNothing;
}

MOEINF_QUEUE bool MOEINF_CORE::can_submit(std::size_t slot) const {
    const Lock lock(mutex_);
    if (slot >= shape_.slots) throw std::out_of_range("no slot " + std::to_string(slot));
    return slots_[slot].owner == 0;
}

MOEINF_QUEUE void MOEINF_CORE::end(Record& record, State state,
                                                          FailurePtr failure) noexcept {
    record.state = state;
    record.failure = std::move(failure);
    record.ended_as = ++ended_count_;
    slots_[record.slot].owner = 0;
    ++counters_.undelivered;
    if (state == State::kDone) ++counters_.done;
    if (state == State::kFailed) ++counters_.errors;
    if (state == State::kCancelled) ++counters_.cancelled;
    changed_.notify_all();
}

MOEINF_QUEUE void MOEINF_CORE::forget(typename Records::iterator record) {
    records_.erase(record);
    --counters_.undelivered;
}

// Removes one waiter; the last one forgets a delivered record.
MOEINF_QUEUE void MOEINF_CORE::leave(Ticket ticket, bool delivered) {
    const auto found = records_.find(ticket);  // there: a record with waiters is never forgotten
    Record& record = found->second;
    record.delivered |= delivered;
    if (--record.waiters == 0 && record.delivered) forget(found);
}

// Sleeps until a ticket ends or the next poll is due; returns false when the caller should give up.
MOEINF_QUEUE template <class KeepWaiting>
bool MOEINF_CORE::block(Lock& lock, double& next_poll,
                                               KeepWaiting& keep_waiting) {
    Sync::wait_for(changed_, lock, kPollSeconds);
    if (clock_.seconds() < next_poll) return true;
    watch();
    lock.unlock();
    const bool keep = keep_waiting();
    lock.lock();
    next_poll = clock_.seconds() + kPollSeconds;
    return keep;
}

MOEINF_QUEUE template <class KeepWaiting>
bool MOEINF_CORE::wait(std::span<const Ticket> tickets,
                                              KeepWaiting&& keep_waiting) {
    FailurePtr failure;
    bool keep = true;
    {
        Lock lock(mutex_);
        for (const Ticket ticket : tickets)  // check all before changing any
            if (ticket != kResident) find_waitable(ticket);
        for (const Ticket ticket : tickets)
            if (ticket != kResident) ++find_waitable(ticket).waiters;
        ++counters_.waiting;
        double next_poll = clock_.seconds() + kPollSeconds;
        for (const Ticket ticket : tickets) {
            if (ticket == kResident) continue;
            const Record& record = find_waitable(ticket);
            while (keep && !record.ended()) keep = block(lock, next_poll, keep_waiting);
        }
        Ticket failed = 0;
        for (const Ticket ticket : tickets) {
            if (!keep || failure) break;
            if (ticket == kResident) continue;
            failure = find_waitable(ticket).failure;
            if (failure) failed = ticket;
        }
        for (const Ticket ticket : tickets)
            if (ticket != kResident) leave(ticket, keep && (!failure || ticket == failed));
        --counters_.waiting;
        if (closing_) changed_.notify_all();  // the destructor may wait for this thread to leave
    }
    if (failure) throw Failed(std::move(failure));
    return keep;
}

MOEINF_QUEUE template <class KeepWaiting>
bool MOEINF_CORE::drain(KeepWaiting&& keep_waiting) {
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

MOEINF_QUEUE auto MOEINF_CORE::collect() -> std::vector<Ended, Of<Ended>> {
    const Lock lock(mutex_);
    watch();
    using Found = typename Records::iterator;
    std::vector<Found, Of<Found>> found(allocator_);
    std::vector<Ended, Of<Ended>> ended(allocator_);
    if (counters_.undelivered == 0) return ended;
    for (auto at = records_.begin(); at != records_.end(); ++at)
        if (at->second.ended() && at->second.waiters == 0) found.push_back(at);
    std::sort(found.begin(), found.end(),
              [](auto a, auto b) { return a->second.ended_as < b->second.ended_as; });
    ended.reserve(found.size());
    for (const auto at : found) {
        ended.push_back({at->first, std::move(at->second.failure)});
        forget(at);
    }
    return ended;
}

MOEINF_QUEUE Counters MOEINF_CORE::counters() const {
    const Lock lock(mutex_);
    Counters counters = counters_;
    counters.queued = queue_.size();
    return counters;
}

// Reads up to `most` bytes more; with the last ones, checks. Wrong bytes are read once more, at
// once: the cached page may be bad and the disk good.
MOEINF_QUEUE void MOEINF_CORE::transfer(const Source& source, std::size_t slot, std::size_t most,
                                        Transfer& so_far) noexcept {
    const double nothing_runs = -1;
    double started = nothing_runs;
    so_far.ended = true;
    try {
        std::byte* const landing = copier_.landing(slot);
        std::size_t from = so_far.read_bytes;
        std::size_t bytes = std::min(source.bytes - from, most);
        std::uint32_t got = 0;
        for (int attempt = 0; attempt < 2; ++attempt) {
            if (attempt > 0) reader_.forget(source);
            started = clock_.seconds();
            reader_.read(source, from, bytes, landing);
            const double took = clock_.seconds() - std::exchange(started, nothing_runs);
            so_far.seconds += took;
            if (bytes == source.bytes) {
                ++so_far.whole_calls;
                so_far.whole_seconds += took;
            } else if (bytes == shape_.piece_bytes) {
                ++so_far.piece_calls;
                so_far.piece_seconds += took;
            }
            so_far.read_bytes = from + bytes;
            so_far.ended = so_far.read_bytes == source.bytes;
            if (!so_far.ended) return;
            ++so_far.reads;
            if (source.crc32c) got = reader_.checksum(source, landing);
            if (!source.crc32c || got == *source.crc32c) {
                copier_.copy(slot, source.bytes);
                return;
            }
            from = 0;
            bytes = source.bytes;
        }
        char text[128];
        std::snprintf(text, sizeof text,
                      "checksum mismatch: expected crc32c 0x%08x, got 0x%08x of %zu bytes at %llu",
                      static_cast<unsigned>(*source.crc32c), static_cast<unsigned>(got),
                      source.bytes, static_cast<unsigned long long>(source.offset));
        so_far.failure = make_failure({Failure::Kind::kCorrupt, EBADMSG, source.path, text});
    } catch (const Failed& error) {
        so_far.failure = error.failure();
    } catch (const std::exception& error) {
        so_far.failure = internal_failure(error.what());
    } catch (...) {
        so_far.failure = unknown_;
    }
    if (started != nothing_runs) so_far.seconds += clock_.seconds() - started;
}

MOEINF_QUEUE FailurePtr MOEINF_CORE::make_failure(Failure failure) const {
    return std::allocate_shared<const Failure>(Of<Failure>(allocator_), std::move(failure));
}

MOEINF_QUEUE FailurePtr MOEINF_CORE::internal_failure(const char* what) noexcept {
    try {
        return make_failure({Failure::Kind::kInternal,
                             0,
                             {},
                             std::string("a reader thread failed: ") + what});
    } catch (...) {
        return unknown_;
    }
}

}  // namespace moeinf

#undef MOEINF_CORE
#undef MOEINF_QUEUE
