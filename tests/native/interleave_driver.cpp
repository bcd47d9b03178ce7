// Runs small scenes with CopyQueueCore in every interleaving that its mutex allows. The search is
// depth-first over the scheduler's choices, and each path restarts its scene. Timeouts never fire,
// so a lost wake-up is a deadlock. Prints the number of interleavings per scene; a failure prints
// the scene and its choices.
#include "queue/copy_queue.h"

#include <string>

#include "world.h"

namespace {

using namespace moeinf;
using world::the_world;

constexpr std::size_t kSlots = 4;
constexpr std::size_t kSlotBytes = 2 * kPageBytes;
constexpr std::size_t kTwoPieces = kPageBytes + 1;  // of speculation

constexpr std::uint64_t kDemanded = 9;

struct Choice {
    std::size_t chosen, of;
};
std::vector<Choice> path;
std::size_t depth = 0;
const char* scene_name = "";

bool exploring = true;  // false: the scene's checks are done, and only cleanup remains

std::size_t choose(std::size_t of) {
    if (!exploring) return 0;
    if (depth == path.size()) path.push_back({0, of});
    CHECK(path[depth].of == of);  // the same choices must lead to the same state
    return path[depth++].chosen;
}

// Advances to the next path in order; false after the last.
bool next_path() {
    while (!path.empty() && path.back().chosen + 1 == path.back().of) path.pop_back();
    if (path.empty()) return false;
    ++path.back().chosen;
    return true;
}

void tell_where() {
    std::fprintf(stderr, "scene %s, choices", scene_name);
    for (std::size_t i = 0; i < depth; ++i) std::fprintf(stderr, " %zu", path[i].chosen);
    std::fprintf(stderr, "\n");
}

struct Copier {
    std::byte* landing(std::size_t slot) { return at[slot].bytes; }
    void copy(std::size_t, std::size_t) {}

    struct alignas(kPageBytes) Slot {
        std::byte bytes[kSlotBytes];
    };
    Slot at[kSlots];
};

// Source n fills its slot with n. A "bad" one fails then; a "held" one waits for the gate first.
struct Reader {
    Copier* copier = nullptr;
    int reading[kSlots] = {};
    int at_once = 0, most_at_once = 0;
    std::vector<std::uint64_t> order;  // of every piece
    bool open = false;
    std::uint64_t speculative = 0;  // the source whose later pieces must not meet demand
    bool demand_queued = false;     // set by the scene
    int demands_reading = 0;
    world::Mutex mutex;
    world::Sync::Condition gate;

    void read(const Source& source, std::size_t from, std::size_t bytes, std::byte* slot) {
        const auto index = static_cast<std::size_t>(slot - copier->at[0].bytes) / kSlotBytes;
        const std::uint64_t id = source.offset / kPageBytes;
        CHECK(reading[index]++ == 0);
        CHECK(from == 0 || order_has(id));
        if (id == speculative && from > 0) CHECK(!demand_queued && demands_reading == 0);
        if (id == kDemanded) demand_queued = false;
        demands_reading += id == kDemanded;
        order.push_back(id);
        most_at_once = std::max(most_at_once, ++at_once);
        if (source.path == "held") {
            world::Lock lock(mutex);
            while (!open) gate.wait(lock);
        }
        slot[from] = static_cast<std::byte>(id);
        the_world.step();
        slot[from + bytes - 1] = static_cast<std::byte>(id);
        --reading[index];
        demands_reading -= id == kDemanded;
        --at_once;
        if (source.path == "bad") throw Failed(Failure::Kind::kIo, EIO, "bad", "no luck");
    }
    bool order_has(std::uint64_t id) const {
        return std::find(order.begin(), order.end(), id) != order.end();
    }
    std::uint32_t checksum(const Source& source, const std::byte* slot) {
        CHECK(slot[0] == slot[source.bytes - 1]);
        return static_cast<std::uint32_t>(slot[0]);
    }
    void forget(const Source&) { CHECK(false); }

    void let_go() {
        world::Lock lock(mutex);
        open = true;
        gate.notify_all();
    }
};

using Queue = CopyQueueCore<world::Sync, world::Clock, Reader, Copier>;

bool forever() {
    return true;
}

struct Scene {
    Copier copier{};
    Reader reader{};
    world::Clock clock;
    Queue queue;
    std::vector<world::Sync::Thread> others;  // clients besides the main one

    explicit Scene(int readers, int busy = kMaxReaders)
        : queue({kSlots, kSlotBytes, readers, 1e9, busy, kPageBytes}, reader, copier, clock) {
        reader.copier = &copier;
        if (readers == 1) return;  // else its start adds more interleavings
        exploring = false;
        the_world.sleep(1);  // until all readers wait for work
        exploring = true;
    }

    SourceId source(std::uint64_t id, const char* path = "ok", std::size_t bytes = 2) {
        return queue.add_source({path, id * kPageBytes, bytes, static_cast<std::uint32_t>(id)});
    }
    void also(std::function<void()> body) { others.push_back({&the_world.add(std::move(body))}); }
    void await_others() {
        for (auto& other : others) other.join();
    }
    // Returns the outcome as one letter: done, cancelled, io ...
    char wait(Ticket ticket) {
        try {
            CHECK(queue.wait({&ticket, 1}, forever));
            return 'd';
        } catch (const Failed& error) {
            return error.failure()->kind == Failure::Kind::kCancelled ? 'c' : 'f';
        }
    }
    void check_end() {
        exploring = false;
        CHECK(queue.close());
        const Counters c = queue.counters();
        CHECK(c.queued == 0 && c.running == 0 && c.waiting == 0 && c.hung == 0);
        CHECK(c.submitted == c.done + c.errors + c.cancelled);
    }
};

// Two waiters for two tickets, one of which fails: each gets its own result in every wake-up order.
void two_waiters() {
    Scene s(1);
    const Ticket good = s.queue.submit(s.source(2), 0, 1.0);
    s.also([&s, bad = s.queue.submit(s.source(3, "bad"), 1, 1.0)] { CHECK(s.wait(bad) == 'f'); });
    CHECK(s.wait(good) == 'd');
    CHECK(s.copier.at[0].bytes[1] == std::byte{2});
    s.await_others();
    CHECK(s.queue.counters().undelivered == 0);
    s.check_end();
}

// A cancellation races with the reader that takes the ticket: exactly one of them gets it.
void cancel_against_take() {
    Scene s(1);
    const Ticket ticket = s.queue.submit(s.source(2), 0, 1.0);
    bool cancelled = false;
    s.also([&] { cancelled = s.queue.cancel(ticket); });
    const char end = s.wait(ticket);
    s.await_others();
    CHECK(end == (cancelled ? 'c' : 'd'));
    CHECK(s.reader.order.size() == (cancelled ? 0 : 1));
    CHECK((s.queue.submit(s.source(2), 0, 1.0) != kResident));  // another source with equal content
    s.check_end();
}

// Shutdown against a waiter, with one ticket queued behind a running one.
void close_against_wait() {
    Scene s(1);
    const Ticket first = s.queue.submit(s.source(2), 0, 1.0);
    const Ticket second = s.queue.submit(s.source(3), 1, 1.0);
    std::string ends;
    s.also([&] {
        for (const Ticket ticket : {second, first}) ends += s.wait(ticket);
    });
    CHECK(s.queue.close());
    s.await_others();
    CHECK(ends == "dd" || ends == "cd" || ends == "cc");
    s.check_end();
}

// The first of two speculative reads does not end. Another thread raises the second one to demand,
// and the reader reserved for demand serves it.
void raise_overtakes_a_running_read() {
    Scene s(2);
    const Ticket held = s.queue.submit(s.source(2, "held"), 0, 1.0);
    const Ticket raised = s.queue.submit(s.source(4), 1, 1.0);
    s.also([&] { s.queue.raise_priority(raised, kDemand); });
    CHECK(s.wait(raised) == 'd');
    s.reader.let_go();
    CHECK(s.wait(held) == 'd');
    s.await_others();
    s.check_end();
}

// Demand arrives behind speculative reads that all end later.
void demand_overtakes_running_reads() {
    Scene s(2);
    const SourceId sources[] = {s.source(2, "held"), s.source(4, "held")};
    const std::size_t slots[] = {0, 1};
    const auto speculative = s.queue.submit(sources, slots, 0.5);
    CHECK(s.wait(s.queue.submit(s.source(6), 2, kDemand)) == 'd');
    CHECK(s.reader.order.size() <= 2);  // the demand, and at most one of the others
    s.reader.let_go();
    CHECK(s.queue.wait(speculative, forever));
    s.check_end();
}

// One read keeps the drive busy. Speculation that comes while demand runs is started when the
// demand ends, although no wake-up was sent for it. No two reads share the drive.
void speculation_waits_for_demand() {
    Scene s(2, 1);
    const Ticket demand = s.queue.submit(s.source(2), 0, kDemand);
    const SourceId sources[] = {s.source(4), s.source(6)};
    const std::size_t slots[] = {1, 2};
    const auto speculative = s.queue.submit(sources, slots, 0.5);
    CHECK(s.wait(demand) == 'd' && s.queue.wait(speculative, forever));
    CHECK(s.reader.most_at_once == 1);
    s.check_end();
}

// A demand comes at any time of a speculative read of two pieces, in the only reader or beside it:
// it waits for one piece at most, and no second piece is read while it is queued or read.
void demand_waits_for_a_piece(int readers) {
    Scene s(readers);
    const SourceId demanded = s.source(kDemanded);
    s.reader.speculative = 2;
    const Ticket read_ahead = s.queue.submit(s.source(2, "ok", kTwoPieces), 0, 0.5);
    const Ticket demand = s.queue.submit(demanded, 1, kDemand);
    s.reader.demand_queued = !s.reader.order_has(kDemanded);
    CHECK(s.wait(demand) == 'd' && s.wait(read_ahead) == 'd');
    CHECK(s.reader.order.size() == 3);
    CHECK(s.copier.at[0].bytes[kPageBytes] == std::byte{2});
    s.check_end();
}
void demand_waits_for_a_piece_of_its_reader() { demand_waits_for_a_piece(1); }
void demand_waits_for_a_piece_of_another() { demand_waits_for_a_piece(2); }

// A speculative read that yields is raised, or cancelled, at any time. It is read once; a part of
// it only when the queue closes.
void a_half_read_is_raised_or_cancelled() {
    Scene s(1);
    const Ticket read_ahead = s.queue.submit(s.source(2, "ok", kTwoPieces), 0, 0.5);
    const Ticket demand = s.queue.submit(s.source(kDemanded), 1, kDemand);
    s.queue.raise_priority(read_ahead, kDemand);
    const bool cancelled = s.queue.cancel(read_ahead);
    CHECK(s.wait(demand) == 'd');
    const char end = s.wait(read_ahead);
    CHECK(end == (cancelled ? 'c' : 'd'));
    CHECK(s.reader.order_has(2) != cancelled);
    s.check_end();
}

void a_half_read_meets_shutdown() {
    Scene s(1);
    const Ticket read_ahead = s.queue.submit(s.source(2, "ok", kTwoPieces), 0, 0.5);
    const Ticket demand = s.queue.submit(s.source(kDemanded), 1, kDemand);
    CHECK(s.queue.close());
    const char end = s.wait(read_ahead);
    CHECK(end == 'c' || (end == 'd' && s.copier.at[0].bytes[kPageBytes] == std::byte{2}));
    CHECK(s.wait(demand) != 'f');
    s.check_end();
}

// A slot is requested again while, and after, it is filled.
void resident_or_not() {
    Scene s(1);
    const SourceId source = s.source(2);
    const Ticket ticket = s.queue.submit(source, 0, 1.0);
    s.also([&] {
        try {
            const Ticket again = s.queue.submit(source, 0, kDemand);
            CHECK(again == kResident);
            const std::byte* const bytes = s.copier.at[0].bytes;
            CHECK(bytes[0] == std::byte{2} && bytes[1] == std::byte{2});
        } catch (const std::logic_error&) {
            CHECK(!s.queue.counters().resident);
        }
    });
    CHECK(s.wait(ticket) == 'd');
    s.await_others();
    CHECK(s.queue.submit(source, 0, 1.0) == kResident && s.wait(kResident) == 'd');
    s.check_end();
}

struct Named {
    const char* name;
    void (*play)();
};
constexpr Named kScenes[] = {
    {"two_waiters", two_waiters},
    {"cancel_against_take", cancel_against_take},
    {"close_against_wait", close_against_wait},
    {"raise_overtakes_a_running_read", raise_overtakes_a_running_read},
    {"demand_overtakes_running_reads", demand_overtakes_running_reads},
    {"speculation_waits_for_demand", speculation_waits_for_demand},
    {"demand_waits_for_a_piece_of_its_reader", demand_waits_for_a_piece_of_its_reader},
    {"demand_waits_for_a_piece_of_another", demand_waits_for_a_piece_of_another},
    {"a_half_read_is_raised_or_cancelled", a_half_read_is_raised_or_cancelled},
    {"a_half_read_meets_shutdown", a_half_read_meets_shutdown},
    {"resident_or_not", resident_or_not},
};

}  // namespace

int main(int count, char** arguments) {
    on_failure = tell_where;
    the_world.choose = choose;
    the_world.timeouts = false;
    the_world.stuck = [] { CHECK(!"every thread waits, for ever"); };
    const std::string only = count > 1 ? arguments[1] : "";
    for (const Named& scene : kScenes) {
        if (!only.empty() && only != scene.name) continue;
        scene_name = scene.name;
        std::uint64_t interleavings = 0;
        path.clear();
        do {
            depth = 0;
            exploring = true;
            the_world.play(scene.play);
            CHECK(depth == path.size());
            ++interleavings;
        } while (next_path());
        std::printf("%s %llu\n", scene.name, static_cast<unsigned long long>(interleavings));
        std::fflush(stdout);
    }
}
