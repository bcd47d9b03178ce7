// CopyQueueCore on real threads, with a reader that a test can hold, hang and make fail.
#pragma once

#include "queue/copy_queue.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>

#include "check.h"

namespace {

using namespace moeinf;

int starts_allowed = 1 << 30;

struct Sync {
    using Mutex = std::mutex;
    using Lock = std::unique_lock<std::mutex>;
    using Condition = std::condition_variable;
    using Thread = std::thread;
    static std::thread start(std::function<void()> body) {
        if (starts_allowed-- <= 0)
            throw std::system_error(
                std::make_error_code(std::errc::resource_unavailable_try_again));
        return std::thread(std::move(body));
    }
    static void wait_for(Condition& condition, Lock& lock, double seconds) {
        condition.wait_for(lock, std::chrono::duration<double>(seconds));
    }
};

struct Clock {
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }
};

constexpr std::size_t kSlots = 96;
constexpr std::size_t kSlotBytes = 2 * kPageBytes;  // speculation reads two pieces

// A source's path gives its read's outcome: ok, io, int (throws one), std, flip (wrong once), wrong
// (always), late (its second piece throws), stuck (while the reader is). Reads wait at the gate
// while it is shut.
struct Reader {
    std::mutex mutex;
    std::condition_variable moved;
    bool shut = false, stuck = false;
    int at_gate = 0, may_pass = 0;
    std::vector<std::uint64_t> order;  // offsets, as begun
    int pieces = 0;                    // calls of read
    std::atomic<int> forgets{0};
    std::atomic<bool> slot_busy[kSlots] = {};
    std::byte* base = nullptr;

    void read(const Source& source, std::size_t from, std::size_t bytes, std::byte* slot) {
        auto& busy = slot_busy[static_cast<std::size_t>(slot - base) / kSlotBytes];
        CHECK(!busy.exchange(true));  // never two reads into one slot
        {
            std::unique_lock lock(mutex);
            if (from == 0) order.push_back(source.offset / kPageBytes);
            ++pieces;
            ++at_gate;
            moved.notify_all();
            while ((shut && may_pass == 0) || (stuck && source.path == "stuck")) moved.wait(lock);
            if (shut) --may_pass;
            --at_gate;
        }
        const auto value = static_cast<std::byte>(source.offset / kPageBytes);
        std::fill(slot + from, slot + from + bytes, value);  // unlocked: ThreadSanitizer watches the bytes
        CHECK(busy.exchange(false));
        if (source.path == "late" && from > 0) throw Failed(Failure::Kind::kIo, EIO, "late", "no");
        if (source.path == "io") throw Failed(Failure::Kind::kIo, EIO, "io", "no luck");
        if (source.path == "int") throw 7;
        if (source.path == "std") throw std::bad_alloc();
    }
    std::uint32_t checksum(const Source& source, const std::byte* slot) {
        const bool wrong = source.path == "wrong" || (source.path == "flip" && forgets == 0);
        CHECK(slot[0] == slot[source.bytes - 1]);
        return static_cast<std::uint32_t>(slot[0]) + (wrong ? 1 : 0);
    }
    void forget(const Source&) { ++forgets; }

    void set_gate(bool value) {
        const std::lock_guard lock(mutex);
        shut = value;
        moved.notify_all();
    }
    void let_through(int count) {
        const std::lock_guard lock(mutex);
        may_pass += count;
        moved.notify_all();
    }
    void stick(bool value) {
        const std::lock_guard lock(mutex);
        stuck = value;
        moved.notify_all();
    }
    void await_at_gate(int count) {
        std::unique_lock lock(mutex);
        while (at_gate < count) moved.wait(lock);
    }
};

struct Copier {
    std::byte* base;
    std::byte* landing(std::size_t slot) { return base + slot * kSlotBytes; }
    void copy(std::size_t, std::size_t) {}
};

using Queue = CopyQueueCore<Sync, Clock, Reader, Copier>;

bool forever() {
    return true;
}

struct Bench {
    std::vector<std::byte> bytes = std::vector<std::byte>(kSlots * kSlotBytes);
    Reader reader;
    Copier copier{bytes.data()};
    Clock clock;
    std::optional<Queue> queue;

    explicit Bench(int readers, double hang_seconds = 1e9, int busy = kMaxReaders) {
        reader.base = bytes.data();
        const QueueShape shape{kSlots, kSlotBytes, readers, hang_seconds, busy, kPageBytes};
        queue.emplace(shape, reader, copier, clock);
    }
    SourceId source(std::uint64_t tag, const char* path = "ok") {
        return queue->add_source({path, tag * kPageBytes, kSlotBytes,
                                  static_cast<std::uint32_t>(static_cast<std::uint8_t>(tag))});
    }
    Ticket submit(SourceId source, std::size_t slot, double priority) {
        return queue->submit(source, slot, priority);
    }
    bool wait(Ticket ticket) { return queue->wait({&ticket, 1}, forever); }
    FailurePtr failure(Ticket ticket) {
        try {
            wait(ticket);
        } catch (const Failed& error) {
            return error.failure();
        }
        return nullptr;
    }
};

}  // namespace
