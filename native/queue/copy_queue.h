// The ticket queue: reads experts into slots, most urgent first. Each ticket ends exactly once.
// Does not know of files (Reader), where slots lie (Copier), time (Clock), threads (Sync), memory
// (Allocator), Python or experts.
//
// The life of a ticket; each arrow is one critical section of mutex_:
//
//   submit ──▶ QUEUED ──a reader takes it──▶ RUNNING ──read, checksum right, copied──▶ DONE
//     │         │ ▲ └──speculation that yields to demand─┤
//     │         │ └── with the pieces it has read ───────┤
//     │           │                             ├──a step failed, or wrong twice──▶ FAILED
//     │           │                             └──no end for hang_seconds, and seen twice──▶
//     │           │                                    FAILED, slot kept
//     │           ├──cancel(), close()──▶ CANCELLED
//     │           └──every reader hangs──▶ FAILED
//     └─the slot holds that source already──▶ kResident: no record, nothing to wait for
//
//   delivered: wait() returned or raised it, or collect() handed it out. An ended ticket is kept
//   until it is delivered, then forgotten. Several threads may wait on a ticket at the same time.
//   A thread that waits after the delivery gets std::invalid_argument.
//
// Writers of each field (all under mutex_):
//
//   Record   source slot priority      submit; priority also raise_priority while QUEUED
//            state                     submit, the reader that took it, cancel, close, watch
//            failure, ended_as         the call that ends it, once
//            waiters, delivered        threads in wait()
//            read_bytes           the reader that yields; above 0 only in a half-read QUEUED one
//   queue_   { priority, ticket } of every QUEUED record and of no other: begin() is read next
//   running_ reader -> { its ticket, since when, ... }; ticket 0: it reads nothing. Its priority is
//            also raised by raise_priority
//   slots_   slot -> { owner: the ticket that may write it, or 0; holds: the source whose bytes
//            are in it, or kNothing }. holds is cleared when a read begins and set when it is
//            DONE; any other writer of a slot calls invalidate()
//   sources_ only grows, and a deque never moves its elements: readers use them unlocked. One is
//            replaced only while no ticket of it is queued or runs
//
// Order. queue_ sorts by priority, larger first, then by ticket, older first: FIFO among equals.
// Demand (kDemand, the largest double) is taken before any speculation, even earlier speculation.
// Running reads share the drive. So speculation runs only while no demand is queued or running, and
// at most as many at once as the lesser of two limits:
//   speculative_limit(readers)  keeps a quarter of the readers, at least one, for demand
//   QueueShape::busy            this many reads keep the drive busy. More would finish no sooner,
//                               but could no longer be overtaken or cancelled.
//
//   readers           1   2   4   8   16   32
//   for demand alone  0   1   1   2    4    8     with one reader demand waits for one piece
//
// Pieces. Demand is read in one call, speculation in calls of piece_bytes. Between two pieces a
// reader yields if demand is queued or runs: the ticket is QUEUED again, in its old place, with the
// bytes that it has. It goes on from there, perhaps in another reader. So a demand waits for one
// piece of each running speculation at most. Its slot's old bytes are gone, so cancel()
// spares a half-read ticket unless asked. raise_priority makes it demand, also while it runs: it then yields no more.
//
// The queue bounds the reads in flight instead of giving demand its own thread, because the drive
// has a queue too. The drive serves reads that it has accepted before a later demand, from
// whichever thread. Without speculation, demand has all the readers.
//
// Bytes. A reader fills the slot unlocked, then ends the ticket under mutex_; a waiter sees the end
// under mutex_. So the bytes happen-before wait() returns. They also happen-before the slot's next
// ticket is submitted, because the same critical section clears the owner. kResident is returned
// under mutex_ too, after the read that set `holds`.
//
// Ending cannot fail: it allocates nothing (the constructor makes the cancelled and closed
// failures). A reader thread catches every exception, so no ticket is lost and no thread dies.
//
// Hanging. Each thread that waits, drains or closes checks the running reads every kPollSeconds.
// A read that has not ended after hang_seconds is overdue. If it is still overdue at a look
// kSureSeconds after the first such look, its ticket ends as FAILED (ETIMEDOUT, its file, for how
// long). Two looks are needed because the clock runs on while the whole process is stopped, reads
// included (Ctrl-Z, a frozen container, a laptop that sleeps). A read that resumes has ended by the
// second look. A hung read's thread cannot be recalled from the kernel, which may still write. So
// the slot keeps its owner, and other tickets are refused, until the thread returns. Then the
// thread serves again. Meanwhile the bound on speculation is that of the remaining readers. While
// all readers hang, queued tickets fail too, because no reader is left to take them.
//
// Shutdown. close() sets closing_ and ends every queued ticket in one critical section. Readers
// leave when they next look (a running read ends normally first). close() returns when each reader
// has left or hangs. True: all are joined. False: some hang. The core and all that it borrows must
// then stay in place while they hang. copy_queue_files.h does that; the destructor would wait for
// them. A waiter waits only for tickets that close(), watch() or a reader that left has ended, so
// it wakes. Readers never wait for a waiter, nor for Python. The destructor closes, then waits
// until the blocked callers have left; it must not race with new calls.
// Reader, Copier and Clock are borrowed and must outlive the queue.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "queue/failure.h"
#include "queue/pages.h"

namespace moeinf {

using Ticket = std::uint64_t;  // 1, 2, ... in the order of submission
using SourceId = std::size_t;  // 0, 1, ... in the order of add_source

inline constexpr Ticket kResident = 0;  // no ticket: the slot has the bytes already

inline constexpr double kDemand = std::numeric_limits<double>::infinity();
static_assert(std::numeric_limits<double>::is_iec559, "kDemand must order above every finite");

inline constexpr double kPollSeconds = 0.1;  // how often a blocked caller looks at its KeepWaiting
inline constexpr double kSureSeconds = 1;    // after the first look at an overdue read; see Hanging
inline constexpr int kMaxReaders = 64;
inline constexpr std::size_t kPieceBytes = std::size_t{512} << 10;  // 0.2 ms at 2.5 GB/s

// The most reads that run once a speculative read has begun; see Order.
constexpr int speculative_limit(int readers) {
    return readers == 1 ? 1 : readers - std::max(1, readers / 4);
}
static_assert(speculative_limit(1) == 1 && speculative_limit(2) == 1 && speculative_limit(4) == 3);
static_assert(speculative_limit(8) == 6 && speculative_limit(32) == 24);

struct Source {
    std::string path;
    std::uint64_t offset;                 // a multiple of kPageBytes
    std::size_t bytes;                    // at most a slot
    std::optional<std::uint32_t> crc32c;  // nullopt: not checked
};

struct QueueShape {
    std::size_t slots;
    std::size_t slot_bytes;
    int readers;                // 1 to kMaxReaders
    double hang_seconds = 1e9;  // above 0; a read that takes longer fails, see Hanging
    int busy = kMaxReaders;     // above 0; this many reads at once keep the drive busy
    std::size_t piece_bytes = kPieceBytes;  // a multiple of kPageBytes, above 0; see Pieces
};

struct Counters {
    std::uint64_t submitted = 0;  // always queued + running + done + errors + cancelled
    std::uint64_t resident = 0;   // hits: requested and already in the slot, so not submitted
    std::uint64_t queued = 0;
    std::uint64_t running = 0;
    std::uint64_t hung = 0;  // readers that hang and whose ticket watch() has ended
    std::uint64_t done = 0;
    std::uint64_t errors = 0;
    std::uint64_t cancelled = 0;
    std::uint64_t undelivered = 0;  // ended, and neither waited for nor collected
    std::uint64_t waiting = 0;      // threads inside wait, wait_many or drain
    std::uint64_t reads = 0;        // complete reads; a reread counts again
    std::uint64_t bytes_read = 0;   // of those reads
    std::uint64_t yields = 0;       // times that speculation has stopped between two pieces
    double read_seconds = 0;        // inside all reads, summed over the reader threads
    // Calls that read all of a source, or one piece; and the time inside them.
    std::uint64_t whole_calls = 0, piece_calls = 0;
    double whole_seconds = 0, piece_seconds = 0;
};

// The operations of a Reader; several threads call it at once, each with its own slot.
template <class R>
concept SlotReader = requires(R& reader, const Source& source, std::byte* slot) {
    // Fills slot[from, from + bytes) or throws; later bytes are unspecified. `from` is a multiple of
    // kPageBytes, and the bytes before it have been read.
    reader.read(source, std::size_t{}, std::size_t{}, slot);
    { reader.checksum(source, slot) } -> std::same_as<std::uint32_t>;  // of slot[0, bytes)
    reader.forget(source);  // the bytes were wrong: drops their cached copies
};

// The address of a slot, and the copy to it when a reader cannot write there. In host memory the
// landing is the slot and nothing is copied. A tier behind a bus lands reads in page-locked memory,
// one place per slot, and copies on its own stream. copy() returns when the bytes are in
// the slot. Several threads call it at once, each for its own slot.
template <class C>
concept SlotCopier = requires(C& copier, std::size_t slot, std::size_t bytes) {
    { copier.landing(slot) } -> std::same_as<std::byte*>;  // kPageBytes aligned, slot_bytes long
    copier.copy(slot, bytes);  // landing(slot)[0, bytes) is read and checked; may throw
};

// Sync: Mutex, Lock (unique_lock-like), Condition (wait, notify_one, notify_all), Thread (joinable)
// and start(callable) -> Thread, wait_for(Condition, Lock, seconds). Clock: seconds() -> double.
// Allocator: a standard one; the queue allocates all its state from it. When it throws, the call
// that needed memory has changed nothing (a reader thread then fails its ticket without details).
template <class Sync, class Clock, SlotReader Reader, SlotCopier Copier,
          class Allocator = std::allocator<std::byte>>
class CopyQueueCore {
    using Lock = typename Sync::Lock;
    template <class T>
    using Of = typename std::allocator_traits<Allocator>::template rebind_alloc<T>;

  public:
    // Throws std::invalid_argument, or the exception of Sync::start (no thread is left running).
    CopyQueueCore(QueueShape shape, Reader& reader, Copier& copier, Clock& clock,
                  const Allocator& allocator = {});
    ~CopyQueueCore();
    CopyQueueCore(const CopyQueueCore&) = delete;
    CopyQueueCore& operator=(const CopyQueueCore&) = delete;

    // Throws std::invalid_argument if the offset is not page-aligned or too large, or the bytes
    // are 0 or more than a slot.
    SourceId add_source(Source source);

    // Replaces sources, so that no slot holds them. Replaces all, or throws and changes nothing:
    // as add_source, std::invalid_argument (lengths that differ), std::out_of_range (an id), and
    // std::logic_error (a queued, running or hung read of one).
    void replace_sources(std::span<const SourceId> ids, std::span<const Source> sources);

    // Returns one ticket for each, or kResident where the slot holds that source. Submits all, or
    // throws and submits nothing. Throws std::out_of_range (source, slot), std::invalid_argument
    // (a NaN priority, lengths that differ), std::logic_error (a duplicate slot, a slot with a live
    // ticket or a hung reader, a closed queue).
    using Tickets = std::vector<Ticket, Of<Ticket>>;
    Tickets submit(std::span<const SourceId> sources, std::span<const std::size_t> slots,
                   double priority);
    Ticket submit(SourceId source, std::size_t slot, double priority);

    // Raises the priority of a ticket that is queued or runs; otherwise, or if it is no higher, does
    // nothing.
    void raise_priority(Ticket ticket, double priority);

    // Returns true if the ticket had not begun and is now cancelled; false if it has begun (and will
    // complete) or has ended. half_read: also cancels one that has yielded; its slot is unspecified.
    bool cancel(Ticket ticket, bool half_read = false);

    // Marks the slot's bytes as no longer those that the queue read: the next submit reads again.
    void invalidate(std::size_t slot);

    // Returns false while a ticket is queued or running for the slot, or a hung reader may write.
    bool can_submit(std::size_t slot) const;

    // Blocks until all have ended (kResident has), then delivers them and returns true. If any
    // failed, delivers and throws only the first of these (in the order given) and leaves the
    // others to collect() or another wait(). Calls keep_waiting() every kPollSeconds, unlocked; it
    // must not throw. When it returns false, wait returns false and delivers nothing.
    template <class KeepWaiting>
    bool wait(std::span<const Ticket> tickets, KeepWaiting&& keep_waiting);

    struct Ended {
        Ticket ticket;
        FailurePtr failure;  // null: done
    };
    // Delivers the ended tickets that no thread waits for, in the order of ending. Never blocks.
    std::vector<Ended, Of<Ended>> collect();

    // Blocks until nothing is queued or running; returns false when keep_waiting() returns false.
    template <class KeepWaiting>
    bool drain(KeepWaiting&& keep_waiting);

    // While paused, no reader takes a ticket; running reads end. close() overrides it.
    void pause();
    void resume();

    // See Shutdown. Idempotent; any thread but a reader. False: readers hang, the core must stay.
    bool close();

    Counters counters() const;

  private:
    enum class State : std::uint8_t { kQueued, kRunning, kDone, kFailed, kCancelled };
    struct Record {
        SourceId source;
        std::size_t slot;
        double priority;
        std::size_t read_bytes = 0;
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
        std::size_t read_bytes;  // so far
        bool ended = false;
        FailurePtr failure = nullptr;
        std::uint64_t reads = 0;
        double seconds = 0;
        std::uint64_t whole_calls = 0, piece_calls = 0;
        double whole_seconds = 0, piece_seconds = 0;
    };
    struct Running {
        Ticket ticket = 0;
        SourceId source = 0;
        double priority = 0;
        double since = 0;    // clock time
        double overdue = 0;  // time of the first look that found it overdue; 0: no look has
        bool hung = false;
    };
    struct Slot {
        Ticket owner = 0;
        SourceId holds = kNothing;
    };
    static constexpr SourceId kNothing = std::numeric_limits<SourceId>::max();
    using Node = std::pair<const Ticket, Record>;
    using Records = std::map<Ticket, Record, std::less<Ticket>, Of<Node>>;
    using Places = std::set<Place, std::less<Place>, Of<Place>>;

    // copy_queue_life.h: construction, the reader threads' loop, the watch over them, shutdown.
    void serve(Running& running);
    std::size_t takeable(double priority) const;
    bool can_take() const;
    bool demand_comes_first() const;
    bool yields(const Running& running) const;
    void watch() noexcept;
    FailurePtr hang_failure(const Running& running, double now, const char* what) noexcept;

    // copy_queue_impl.h
    void transfer(const Source& source, std::size_t slot, std::size_t most, Transfer& so_far) noexcept;
    FailurePtr make_failure(Failure failure) const;
    FailurePtr internal_failure(const char* what) noexcept;
    void check(const Source& source) const;
    void check(SourceId source, std::size_t slot) const;
    Record* find(Ticket ticket);
    Record& find_waitable(Ticket ticket);
    void end(Record& record, State state, FailurePtr failure) noexcept;
    void leave(Ticket ticket, bool delivered);
    void forget(typename Records::iterator record);
    template <class KeepWaiting>
    bool block(Lock& lock, double& next_poll, KeepWaiting& keep_waiting);

    const QueueShape shape_;
    Reader& reader_;
    Copier& copier_;
    Clock& clock_;
    const Allocator allocator_;
    const FailurePtr cancelled_;
    const FailurePtr closed_;
    const FailurePtr unknown_;
    const FailurePtr hangs_;  // used when there is no memory to name the file

    mutable typename Sync::Mutex mutex_;
    typename Sync::Condition work_;     // readers: queue_ grew or has demand first, resume, close
    typename Sync::Condition changed_;  // waiters: a ticket ended; closers: a reader left
    std::deque<Source, Of<Source>> sources_;
    Records records_;
    Places queue_;
    std::vector<Slot, Of<Slot>> slots_;
    std::vector<Running, Of<Running>> running_;
    Ticket next_ticket_ = 1;
    std::uint64_t ended_count_ = 0;
    Counters counters_;
    std::uint64_t serving_ = 0;  // reader threads that have not left, hung ones included
    bool paused_ = false;
    bool closing_ = false;
    bool joining_ = false;
    bool joined_ = false;
    std::vector<typename Sync::Thread> readers_;  // last: started when all other members exist
};

}  // namespace moeinf

#include "queue/copy_queue_impl.h"
#include "queue/copy_queue_life.h"
