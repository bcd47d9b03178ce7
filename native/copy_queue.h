// The ticket queue: reads of experts into slots, most urgent first, each ending exactly once.
// Does not know of files (Reader), time (Clock), threads (Sync), Python or experts.
//
// The life of a ticket; each arrow is one critical section of mutex_:
//
//   submit ──▶ QUEUED ──a reader takes it──▶ RUNNING ──read, checksum right──▶ DONE
//                 │                             └──read failed, or wrong twice──▶ FAILED
//                 └──cancel(), close()──▶ CANCELLED
//
//   delivered: wait() returned or raised it, or collect() handed it out. An ended ticket is kept
//   until then and forgotten after, once: several threads may wait on a ticket at the same time,
//   but one that comes after the delivery gets std::invalid_argument.
//
// Who writes what (all under mutex_):
//
//   Record   source slot priority      submit; priority also raise_priority while QUEUED
//            state                     submit, the reader that took it, cancel, close
//            failure, ended_as         whoever ends it, once
//            waiters, delivered        threads in wait()
//   queue_   { priority, ticket } of every QUEUED record and of no other: begin() is read next
//   owner_   slot -> its QUEUED or RUNNING ticket, or 0: what refuses a second live ticket
//   sources_ grows only, and a deque never moves its elements: readers use them unlocked
//
// Order. queue_ sorts by priority, larger first, then by ticket, older first: FIFO among equals,
// and demand (kDemand, the largest double) is taken before any speculation however early that came.
// A read that runs is never interrupted: demand waits for at most one of them to end.
//
// Bytes. A reader fills the slot unlocked, then ends the ticket under mutex_; a waiter sees the end
// under mutex_. So the bytes happen-before wait() returns, and before the slot's next ticket can be
// submitted, since owner_[slot] is cleared in the same critical section.
//
// Ending cannot fail: it allocates nothing (the cancelled and closed failures are made at birth),
// and a reader thread catches everything, so no ticket is lost and no reader thread dies.
//
// Shutdown. close() sets closing_ and ends every queued ticket in one critical section; readers
// leave when they next look (a running read ends normally first); the first close() joins them,
// later ones wait for that. A waiter waits only for tickets that are ended by close() or by a
// reader that close() joins, so it wakes. Readers never wait for a waiter, nor for Python.
// The destructor closes and then lets the blocked callers out; it must not race with new calls.
// Arena, Reader and Clock are borrowed and must outlive the queue.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "failure.h"
#include "pages.h"

namespace moeinf {

using Ticket = std::uint64_t;  // 1, 2, ... in the order of submission; 0 is no ticket
using SourceId = std::size_t;  // 0, 1, ... in the order of add_source

inline constexpr double kDemand = std::numeric_limits<double>::infinity();
static_assert(std::numeric_limits<double>::is_iec559, "kDemand must order above every finite");

inline constexpr double kPollSeconds = 0.1;  // how often a blocked caller looks at its KeepWaiting
inline constexpr int kMaxReaders = 64;

struct Source {
    std::string path;
    std::uint64_t offset;                 // a multiple of kPageBytes
    std::size_t bytes;                    // at most a slot
    std::optional<std::uint32_t> crc32c;  // nullopt: not checked
};

struct Arena {
    std::byte* base;
    std::size_t slots;
    std::size_t slot_bytes;
};

struct Counters {
    std::uint64_t submitted = 0;  // always queued + running + done + errors + cancelled
    std::uint64_t queued = 0;
    std::uint64_t running = 0;
    std::uint64_t done = 0;
    std::uint64_t errors = 0;
    std::uint64_t cancelled = 0;
    std::uint64_t undelivered = 0;  // ended, and neither waited for nor collected
    std::uint64_t waiting = 0;      // threads inside wait, wait_many or drain
    std::uint64_t reads = 0;        // that delivered all their bytes; a reread counts again
    std::uint64_t bytes_read = 0;   // of those reads
    double read_seconds = 0;        // inside all reads, summed over the reader threads
};

// What the queue needs from a Reader; several threads call it at once, each with its own slot.
template <class R>
concept SlotReader = requires(R& reader, const Source& source, std::byte* slot) {
    reader.read(source, slot);  // fills slot[0, bytes) or throws; beyond that is unspecified
    { reader.checksum(source, slot) } -> std::same_as<std::uint32_t>;  // of slot[0, bytes)
    reader.forget(source);  // the bytes were wrong: whatever is cached of them is doubted
};

// Sync: Mutex, Lock (unique_lock-like), Condition (wait, notify_one, notify_all), Thread (joinable)
// and start(callable) -> Thread, wait_for(Condition, Lock, seconds). Clock: seconds() -> double.
template <class Sync, class Clock, SlotReader Reader>
class CopyQueueCore {
    using Lock = typename Sync::Lock;

  public:
    // Throws std::invalid_argument, or what Sync::start throws (no thread is left behind).
    CopyQueueCore(Arena arena, int readers, Reader& reader, Clock& clock);
    ~CopyQueueCore();
    CopyQueueCore(const CopyQueueCore&) = delete;
    CopyQueueCore& operator=(const CopyQueueCore&) = delete;

    // Throws std::invalid_argument for an offset off the page or bytes that are 0 or over a slot.
    SourceId add_source(Source source);

    // All or none. Throws std::out_of_range (source, slot), std::invalid_argument (a priority that
    // is not a number), std::logic_error (a slot with a live ticket; a closed queue).
    std::vector<Ticket> submit(std::span<const SourceId> sources,
                               std::span<const std::size_t> slots, double priority);

    // Only upwards, and only while queued: otherwise nothing happens.
    void raise_priority(Ticket ticket, double priority);

    // True: was queued, is cancelled now. False: it runs (and will complete) or has ended.
    bool cancel(Ticket ticket);

    // Blocks until all have ended, then delivers them; if one failed, delivers and throws only the
    // first that did (in the order given) and leaves the others to collect() or another wait().
    // keep_waiting() is asked every kPollSeconds, unlocked, and must not throw; when it says false,
    // wait returns false and delivers nothing.
    template <class KeepWaiting>
    bool wait(std::span<const Ticket> tickets, KeepWaiting&& keep_waiting);

    struct Ended {
        Ticket ticket;
        FailurePtr failure;  // null: done
    };
    // Delivers what has ended and nobody waits for, in the order of ending. Never blocks.
    std::vector<Ended> collect();

    // Blocks until nothing is queued or running (or keep_waiting() says false: returns false).
    template <class KeepWaiting>
    bool drain(KeepWaiting&& keep_waiting);

    // While paused no reader takes a ticket; what runs ends. close() overrides it.
    void pause();
    void resume();

    void close();  // see Shutdown; idempotent, any thread but a reader

    Counters counters() const;

  private:
    enum class State : std::uint8_t { kQueued, kRunning, kDone, kFailed, kCancelled };
    struct Record {
        SourceId source;
        std::size_t slot;
        double priority;
        State state = State::kQueued;
        bool delivered = false;
        int waiters = 0;
        std::uint64_t ended_as = 0;  // 1, 2, ... in the order of ending
        FailurePtr failure;

        bool ended() const { return state >= State::kDone; }
    };
    static_assert(State::kQueued < State::kDone && State::kRunning < State::kDone &&
                      State::kDone < State::kFailed && State::kDone < State::kCancelled,
                  "ended() is one comparison");

    struct Place {
        double priority;
        Ticket ticket;
        bool operator<(const Place& other) const {
            if (priority != other.priority) return priority > other.priority;
            return ticket < other.ticket;
        }
    };
    struct Transfer {
        FailurePtr failure;
        std::uint64_t reads = 0;
        double seconds = 0;
    };
    using Records = std::map<Ticket, Record>;

    void serve();
    Transfer transfer(const Source& source, std::byte* slot) noexcept;
    FailurePtr internal_failure(const char* what) noexcept;
    void check(SourceId source, std::size_t slot) const;
    Record* find(Ticket ticket);
    Record& find_waitable(Ticket ticket);
    void end(Record& record, State state, FailurePtr failure) noexcept;
    void leave(Ticket ticket, bool delivered);
    void forget(typename Records::iterator record);
    template <class KeepWaiting>
    bool block(Lock& lock, double& next_poll, KeepWaiting& keep_waiting);

    const Arena arena_;
    Reader& reader_;
    Clock& clock_;
    const FailurePtr cancelled_;
    const FailurePtr closed_;
    const FailurePtr unknown_;

    mutable typename Sync::Mutex mutex_;
    typename Sync::Condition work_;     // readers: queue_ grew, resume, close
    typename Sync::Condition changed_;  // waiters: a ticket ended; closers: readers joined
    std::deque<Source> sources_;
    Records records_;
    std::set<Place> queue_;
    std::vector<Ticket> owner_;
    Ticket next_ticket_ = 1;
    std::uint64_t ended_count_ = 0;
    Counters counters_;
    bool paused_ = false;
    bool closing_ = false;
    bool joined_ = false;
    std::vector<typename Sync::Thread> readers_;  // last: started when all else exists
};

}  // namespace moeinf

#include "copy_queue_impl.h"
