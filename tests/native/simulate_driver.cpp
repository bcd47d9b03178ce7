// Runs CopyQueueCore through seeded schedules with injected faults. Reads are slow, short, wrong,
// refused or endless. Allocations, copies and thread starts fail. Tickets are cancelled, the
// process is stopped and continued, and shutdown comes at any moment. Usage: simulate_driver
// FIRST_SEED COUNT. Prints the coverage. A failure prints its seed, which reproduces the schedule.
#include "queue/copy_queue.h"

#include <random>

#include "world.h"

namespace {

using namespace moeinf;
using world::the_world;

constexpr std::size_t kSlotBytes = 2 * kPageBytes;  // speculation reads two pieces
constexpr double kHang = 2.0;

std::uint64_t seed_of_this_run = 0;
std::mt19937_64 dice;

bool one_in(unsigned n) {
    return dice() % n == 0;
}

struct Coverage {
    std::uint64_t schedules = 0, tickets = 0, done = 0, failed = 0, cancelled = 0, resident = 0,
                  hung = 0, allocations_failed = 0, copies_failed = 0, closed_hanging = 0,
                  rereads = 0, frozen = 0, yields = 0;
} covered;

// The standard allocator, with failures on request.
int allocations_fail_one_in = 0;
template <class T>
struct FaultyAllocator {
    using value_type = T;
    FaultyAllocator() = default;
    template <class U>
    FaultyAllocator(const FaultyAllocator<U>&) {}
    T* allocate(std::size_t n) {
        if (allocations_fail_one_in != 0 &&
            one_in(static_cast<unsigned>(allocations_fail_one_in))) {
            ++covered.allocations_failed;
            throw std::bad_alloc();
        }
        return std::allocator<T>().allocate(n);
    }
    void deallocate(T* at, std::size_t n) { std::allocator<T>().deallocate(at, n); }
    bool operator==(const FaultyAllocator&) const { return true; }
};

enum Fault { kOk, kSlow, kShort, kRefused, kOther, kWrong, kWrongOnce, kHangs, kFaults };

struct Bytes {  // one slot's bytes: enough to distinguish sources and to detect a torn write
    std::byte at[3];
};

// The content of the slots. They are "behind a bus": reads land elsewhere and are copied.
struct Machine {
    std::size_t slots;
    std::vector<std::byte> landings;
    std::vector<Bytes> device;
    std::vector<int> busy;                    // slot -> number of reads and copies into it now
    std::vector<std::pair<Fault, int>> kind;  // source -> its fault, times forgotten

    explicit Machine(std::size_t n)
        : slots(n), landings((n + 1) * kSlotBytes), device(n), busy(n, 0) {}
};
Machine* machine = nullptr;

std::byte value_of(std::uint64_t source) {
    return static_cast<std::byte>(source * 7 + 1);
}

// Asserts exclusive access to a slot: no other ticket, and no abandoned reader that still writes.
struct Alone {
    int& busy;
    explicit Alone(std::size_t slot) : busy(machine->busy[slot]) { CHECK(busy++ == 0); }
    ~Alone() { --busy; }
};

struct Copier {
    static std::byte* base() {
        const auto start = reinterpret_cast<std::uintptr_t>(machine->landings.data());
        return machine->landings.data() + (kPageBytes - start % kPageBytes) % kPageBytes;
    }
    std::byte* landing(std::size_t slot) { return base() + slot * kSlotBytes; }
    void copy(std::size_t slot, std::size_t bytes) {
        const Alone alone(slot);
        const std::byte* const from = base() + slot * kSlotBytes;
        for (std::size_t i = 0; i < 3; ++i) {
            machine->device[slot].at[i] = from[i * (bytes - 1) / 2];
            the_world.step();
        }
        if (one_in(40)) {
            ++covered.copies_failed;
            throw std::runtime_error("the bus is gone");
        }
    }
};

struct Reader {
    void read(const Source& source, std::size_t from, std::size_t bytes, std::byte* slot) {
        const auto id = source.offset / kPageBytes;
        const Alone alone(static_cast<std::size_t>(slot - Copier::base()) / kSlotBytes);
        const Fault fault = machine->kind[id].first;
        if (from > 0) CHECK(slot[0] == value_of(id));
        slot[from] = value_of(id);
        the_world.step();
        std::fill(slot + from, slot + from + bytes, value_of(id));
        if (fault == kSlow) the_world.sleep(0.3);
        if (fault == kHangs) the_world.sleep(kHang * 3);
        if (fault == kShort) throw Failed(Failure::Kind::kCorrupt, ENODATA, source.path, "short");
        if (fault == kRefused) throw Failed(Failure::Kind::kIo, EIO, source.path, "refused");
        if (fault == kOther) throw 7;
    }
    std::uint32_t checksum(const Source& source, const std::byte* slot) {
        const auto id = source.offset / kPageBytes;
        const auto [fault, forgotten] = machine->kind[id];
        const bool wrong = fault == kWrong || (fault == kWrongOnce && forgotten == 0);
        return static_cast<std::uint32_t>(slot[source.bytes - 1]) + (wrong ? 1000 : 0);
    }
    void forget(const Source& source) {
        ++machine->kind[source.offset / kPageBytes].second;
        ++covered.rereads;
    }
};

using Queue = CopyQueueCore<world::Sync, world::Clock, Reader, Copier, FaultyAllocator<std::byte>>;

// The clients' record of a ticket, separate from the queue.
struct Known {
    SourceId source;
    std::size_t slot;
    bool delivered = false;
    int waiting = 0;
};

struct Play {
    Reader reader;
    Copier copier;
    world::Clock clock;
    std::map<Ticket, Known> known;
    std::vector<Ticket> last;  // slot -> its latest ticket
    std::uint64_t sources = 0;
    int clients = 0;
    bool closed = false, frozen = false;
    std::unique_ptr<Queue> queue;

    bool right(std::size_t slot, SourceId source) {
        for (const std::byte byte : machine->device[slot].at)
            if (byte != value_of(source)) return false;
        return true;
    }

    // Checks that the source can have this failure, or that any source can have it.
    void check_end(const Known& ticket, const FailurePtr& failure) {
        const Fault fault = machine->kind[ticket.source].first;
        if (!failure) {
            CHECK(fault == kOk || fault == kSlow || fault == kWrongOnce || fault == kHangs);
            ++covered.done;
            return;
        }
        switch (failure->kind) {
            case Failure::Kind::kCancelled:
                ++covered.cancelled;
                return;
            case Failure::Kind::kInternal:  // the copy, an allocation, or a foreign exception
                break;
            case Failure::Kind::kCorrupt:
                CHECK(failure->code == (fault == kShort ? ENODATA : EBADMSG));
                CHECK(fault == kShort || fault == kWrong);
                break;
            case Failure::Kind::kIo:
                CHECK(failure->code == ETIMEDOUT || fault == kRefused);
                if (failure->message.starts_with("the read has not ended")) CHECK(fault == kHangs);
                covered.hung += failure->code == ETIMEDOUT;
                break;
        }
        ++covered.failed;
    }

    void delivered(Ticket ticket, const FailurePtr& failure, bool waited) {
        Known& at = known.at(ticket);
        CHECK(!at.delivered || waited);  // collect() never returns a ticket twice
        if (!at.delivered) check_end(at, failure);
        at.delivered = true;
    }

    void wait(Ticket ticket) {
        Known& at = known.at(ticket);
        const bool was_delivered = at.delivered && at.waiting == 0;
        ++at.waiting;
        FailurePtr failure;
        bool kept = true;
        try {
            kept = queue->wait({&ticket, 1}, [] { return !one_in(30); });
            CHECK(!was_delivered || !kept);
        } catch (const Failed& error) {
            failure = error.failure();
        } catch (const std::invalid_argument&) {
            CHECK(known.at(ticket).delivered);
            --known.at(ticket).waiting;
            return;
        }
        --known.at(ticket).waiting;
        if (!kept) return;
        delivered(ticket, failure, true);
        // The waiter of a slot's latest ticket may compute from it.
        if (!failure && queue->can_submit(at.slot) && last[at.slot] == ticket)
            CHECK(right(at.slot, at.source));
    }

    void submit(std::vector<std::size_t> slots, double priority) {
        std::vector<SourceId> ids;
        for ([[maybe_unused]] const std::size_t slot : slots) ids.push_back(dice() % sources);
        const auto tickets = queue->submit(ids, slots, priority);
        for (std::size_t i = 0; i < slots.size(); ++i) {
            if (tickets[i] == kResident) {
                ++covered.resident;
                CHECK(right(slots[i], ids[i]));
                continue;
            }
            CHECK(known.emplace(tickets[i], Known{ids[i], slots[i]}).second);
            last[slots[i]] = tickets[i];
            ++covered.tickets;
        }
    }

    void act() {
        const Ticket any = known.empty() ? 0 : known.rbegin()->first - dice() % known.size();
        const std::size_t slot = dice() % machine->slots;
        switch (dice() % 12) {
            case 0:
            case 1:
            case 2:
                return submit({slot}, one_in(3) ? kDemand : static_cast<double>(dice() % 3));
            case 3:
                return submit({slot, (slot + 1) % machine->slots}, kDemand);
            case 4:
                return any ? static_cast<void>(queue->cancel(any)) : void();
            case 5:
                return any ? queue->raise_priority(any, one_in(2) ? kDemand : 1.5) : void();
            case 6:
            case 7:
            case 8:
                return any ? wait(any) : void();
            case 9:
                for (const auto& [ticket, failure] : queue->collect())
                    delivered(ticket, failure, false);
                return;
            case 10:
                return queue->invalidate(slot);
            case 11:
                if (one_in(3)) static_cast<void>(queue->drain([] { return !one_in(10); }));
                if (one_in(4)) {
                    queue->pause();
                    the_world.sleep(0.05);
                    queue->resume();
                }
                if (!frozen && one_in(4)) {  // once: reads end soon after, unless they hang
                    frozen = true;
                    ++covered.frozen;
                    the_world.freeze(kHang * 20);
                }
                return;
        }
    }

    void client(unsigned steps) {
        for (unsigned i = 0; i < steps; ++i) {
            const Counters before = queue->counters();
            try {
                act();
            } catch (const std::bad_alloc&) {
            } catch (const std::logic_error&) {  // a busy slot, or closed
                CHECK(before.submitted <= queue->counters().submitted);
            }
            the_world.step();
        }
        --clients;
    }

    void finish() {
        closed = true;
        const bool all_left = queue->close();
        covered.closed_hanging += !all_left;
        Counters counters = queue->counters();
        CHECK(all_left == (counters.hung == 0) || counters.hung == 0);
        CHECK(counters.queued == 0 && counters.running == 0);
        CHECK(counters.submitted == counters.done + counters.errors + counters.cancelled);
        while (clients != 0) the_world.sleep(0.01);
        allocations_fail_one_in = 0;
        for (const auto& [ticket, failure] : queue->collect()) delivered(ticket, failure, false);
        for (const auto& [ticket, at] : known) CHECK(at.delivered);
        CHECK(queue->collect().empty());
        counters = queue->counters();
        CHECK(counters.submitted == known.size());
        CHECK(counters.undelivered == 0 && counters.waiting == 0);
        covered.yields += counters.yields;
        queue.reset();
        for (const int busy : machine->busy) CHECK(busy == 0);
    }

    void run() {
        const std::size_t slots = 2 + dice() % 5;
        machine = new Machine(slots);
        const std::unique_ptr<Machine> owner(machine);
        last.resize(slots, 0);
        world::starts_allowed = one_in(50) ? static_cast<int>(dice() % 3) : 1 << 30;
        const bool memory_fails = one_in(3);
        const int readers = 1 + static_cast<int>(dice() % 4);
        try {
            queue = std::make_unique<Queue>(
                QueueShape{slots, kSlotBytes, readers, kHang, kMaxReaders, kPageBytes}, reader,
                copier, clock);
        } catch (const std::bad_alloc&) {
            return;  // its threads have exited; otherwise the world would not end
        }
        for (int i = 0; i < 12; ++i) {
            const auto fault = static_cast<Fault>(one_in(2) ? 0 : dice() % kFaults);
            machine->kind.emplace_back(fault, 0);
            queue->add_source({"file" + std::to_string(i), sources * kPageBytes, kSlotBytes,
                               static_cast<std::uint32_t>(value_of(sources))});
            ++sources;
        }
        if (memory_fails) allocations_fail_one_in = 12;
        clients = 1 + static_cast<int>(dice() % 3);
        for (int i = clients; i > 0; --i) the_world.add([this] { client(6 + dice() % 20); });
        if (one_in(2))
            while (clients != 0) the_world.sleep(0.05);
        else
            the_world.sleep(static_cast<double>(dice() % 100) / 40);
        finish();
    }
};

void play(std::uint64_t seed) {
    seed_of_this_run = seed;
    dice.seed(seed);
    allocations_fail_one_in = 0;
    Play scene;
    the_world.play([&] { scene.run(); });
    ++covered.schedules;
}

void name_the_seed() {
    std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed_of_this_run));
}

}  // namespace

int main(int, char** arguments) {
    on_failure = name_the_seed;
    the_world.choose = [](std::size_t n) { return dice() % n; };
    the_world.stuck = [] { CHECK(!"every thread waits, for ever"); };
    const std::uint64_t first = std::strtoull(arguments[1], nullptr, 10);
    const std::uint64_t count = std::strtoull(arguments[2], nullptr, 10);
    for (std::uint64_t i = 0; i < count; ++i) play(first + i);
    const auto print = [](const char* what, std::uint64_t number) {
        std::printf("%s %llu\n", what, static_cast<unsigned long long>(number));
    };
    print("schedules", covered.schedules);
    print("tickets", covered.tickets);
    print("done", covered.done);
    print("failed", covered.failed);
    print("cancelled", covered.cancelled);
    print("resident", covered.resident);
    print("hung", covered.hung);
    print("allocations_failed", covered.allocations_failed);
    print("copies_failed", covered.copies_failed);
    print("closed_hanging", covered.closed_hanging);
    print("rereads", covered.rereads);
    print("frozen", covered.frozen);
    print("yields", covered.yields);
}
