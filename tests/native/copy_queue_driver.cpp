// Runs CopyQueueCore on real threads with a reader that the test controls. It is built with
// ThreadSanitizer and with AddressSanitizer. Prints nothing and exits 0 when every check held.
#include "queue_bench.h"

namespace {

void demand_overtakes() {
    Bench bench(1);
    bench.reader.set_gate(true);
    const Ticket running = bench.submit(bench.source(100), 80, 0.0);
    bench.reader.await_at_gate(1);
    std::vector<Ticket> speculative;
    for (std::uint64_t i = 0; i < 64; ++i)
        speculative.push_back(bench.submit(bench.source(i), i, i == 9 ? 0.5 : 0.25));
    bench.queue->raise_priority(speculative[40], 0.75);
    bench.queue->raise_priority(speculative[41], 0.1);  // lower: no effect
    bench.queue->raise_priority(running, 0.1);          // running: it goes on, or yields
    CHECK(!bench.queue->cancel(running));
    CHECK(bench.queue->cancel(speculative[3]));
    CHECK(!bench.queue->cancel(speculative[3]));
    const Ticket demand = bench.submit(bench.source(200), 81, kDemand);
    const Ticket raised = speculative[50];
    bench.queue->raise_priority(raised, kDemand);  // older than `demand`: first among equals
    bench.reader.set_gate(false);
    CHECK(bench.wait(demand));
    bench.queue->drain(forever);
    std::vector<std::uint64_t> expected = {100, 50, 200, 40, 9};
    for (std::uint64_t i = 0; i < 64; ++i)
        if (i != 3 && i != 9 && i != 40 && i != 50) expected.push_back(i);
    CHECK(bench.reader.order == expected);
    CHECK(bench.queue->counters().cancelled == 1 && bench.queue->counters().done == 65);
    CHECK(bench.queue->collect().size() == 65);  // all but the delivered one
    CHECK(bench.queue->counters().undelivered == 0);
}

// 64 speculative tickets are queued, and the maximum number of them is running: demand does not
// wait for one.
void demand_does_not_wait_for_running_speculation() {
    constexpr int kReaders = 8;
    Bench bench(kReaders);
    bench.reader.set_gate(true);
    for (std::uint64_t i = 0; i < 64; ++i) bench.submit(bench.source(i), i, 0.25);
    bench.reader.await_at_gate(speculative_limit(kReaders));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(bench.queue->counters().running == 6);  // the maximum stays
    const Ticket demand[] = {bench.submit(bench.source(200), 80, kDemand),
                             bench.submit(bench.source(201), 81, kDemand)};
    bench.reader.await_at_gate(kReaders);
    {
        const std::lock_guard lock(bench.reader.mutex);
        const auto& order = bench.reader.order;
        CHECK((order.size() == 8 && std::min(order[6], order[7]) == 200));
    }
    bench.reader.set_gate(false);
    CHECK(bench.queue->wait(demand, forever));
    bench.queue->drain(forever);
    CHECK(bench.queue->counters().done == 66);
}

// Two reads keep this drive busy. At most two speculative ones run, and none while a demand does.
void speculation_waits_for_a_busy_drive() {
    Bench bench(4, 1e9, 2);
    const auto settled = [&](int running) {
        bench.reader.await_at_gate(running);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return bench.queue->counters().running == static_cast<std::uint64_t>(running);
    };
    bench.reader.set_gate(true);
    for (std::uint64_t i = 0; i < 8; ++i) bench.submit(bench.source(i), i, 0.25);
    CHECK(settled(2));
    const Ticket demand[] = {bench.submit(bench.source(200), 80, kDemand),
                             bench.submit(bench.source(201), 81, kDemand)};
    CHECK(settled(4));
    bench.reader.set_gate(false);
    bench.queue->drain(forever);
    CHECK(bench.queue->counters().yields <= 2);  // none if demand ends before the first piece
    CHECK(bench.reader.pieces == 8 * 2 + 2);
    CHECK(bench.queue->wait(demand, forever));
    bench.queue->drain(forever);
    CHECK(bench.queue->counters().done == 10);
    bench.reader.set_gate(true);
    bench.submit(bench.source(202), 82, kDemand);
    bench.reader.await_at_gate(1);
    bench.submit(bench.source(8), 8, 0.25);
    CHECK(settled(1));
    bench.reader.set_gate(false);
    bench.queue->drain(forever);
    CHECK(bench.reader.order.back() == 8);
}

void failures_reach_their_waiters() {
    Bench bench(3);
    bench.reader.set_gate(true);
    const char* paths[] = {"ok", "io", "int", "std", "wrong"};
    std::vector<Ticket> tickets;
    for (std::size_t i = 0; i < 5; ++i)
        tickets.push_back(bench.submit(bench.source(i, paths[i]), i, 0));
    std::atomic<int> seen[5] = {};
    std::vector<std::thread> waiters;
    for (std::size_t w = 0; w < 15; ++w)
        waiters.emplace_back([&, i = w % 5] {
            const FailurePtr failure = bench.failure(tickets[i]);
            const std::optional<Failure::Kind> kind =
                failure ? std::optional(failure->kind) : std::nullopt;
            using enum Failure::Kind;
            const std::optional<Failure::Kind> expected[] = {
                {}, kIo, kInternal, kInternal, kCorrupt};
            CHECK(kind == expected[i]);
            ++seen[i];
        });
    while (bench.queue->counters().waiting < 15) std::this_thread::yield();
    bench.reader.set_gate(false);
    for (auto& waiter : waiters) waiter.join();
    for (const auto& count : seen) CHECK(count == 3);
    CHECK(bench.queue->counters().errors == 4 && bench.queue->counters().undelivered == 0);
    CHECK(bench.reader.forgets == 1);
}

void wrong_bytes_are_read_again() {
    Bench bench(1);
    CHECK(bench.wait(bench.submit(bench.source(5, "flip"), 0, 0)));
    CHECK(bench.reader.forgets == 1);
    CHECK(bench.queue->counters().reads == 2);
    CHECK(bench.queue->counters().bytes_read == 2 * kSlotBytes);
}

// wait_many raises the first failure in the given order and leaves the rest to collect().
void wait_many_delivers_one_failure() {
    Bench bench(2);
    const SourceId good = bench.source(1), bad = bench.source(2, "io");
    const std::vector<SourceId> sources = {good, bad, bad, good};
    const std::vector<std::size_t> slots = {0, 1, 2, 3};
    const auto tickets = bench.queue->submit(sources, slots, 1.0);
    try {
        bench.queue->wait(tickets, forever);
        CHECK(false);
    } catch (const Failed& error) {
        CHECK(error.failure()->code == EIO);
    }
    std::vector<Ticket> rest;
    for (const auto& ended : bench.queue->collect()) rest.push_back(ended.ticket);
    std::sort(rest.begin(), rest.end());
    CHECK((rest == std::vector<Ticket>{tickets[0], tickets[2], tickets[3]}));
}

void giving_up_delivers_nothing() {
    Bench bench(1);
    bench.queue->pause();
    const Ticket ticket = bench.submit(bench.source(1), 0, 0);
    CHECK(!bench.queue->wait({&ticket, 1}, [] { return false; }));
    CHECK(!bench.queue->drain([] { return false; }));
    bench.queue->resume();
    CHECK(bench.wait(ticket));
}

void close_wakes_everyone() {
    Bench bench(2);
    bench.reader.set_gate(true);
    std::vector<Ticket> tickets;
    for (std::uint64_t i = 0; i < 20; ++i)
        tickets.push_back(bench.submit(bench.source(i), i, kDemand));
    bench.reader.await_at_gate(2);
    std::atomic<int> done{0}, cancelled{0};
    std::vector<std::thread> threads;
    for (const Ticket ticket : tickets)
        threads.emplace_back([&, ticket] {
            const FailurePtr failure = bench.failure(ticket);
            if (failure) CHECK(failure->kind == Failure::Kind::kCancelled);
            ++(failure ? cancelled : done);
        });
    threads.emplace_back([&] { bench.queue->drain(forever); });
    while (bench.queue->counters().waiting < 21) std::this_thread::yield();
    std::atomic<int> closed{0};
    for (int i = 0; i < 3; ++i)
        threads.emplace_back([&] {
            bench.queue->close();
            ++closed;
        });
    while (cancelled < 18) std::this_thread::yield();  // before any running read has ended
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(closed == 0);  // every close() returns only after the readers have ended
    bench.reader.set_gate(false);
    for (auto& thread : threads) thread.join();
    CHECK(done == 2 && cancelled == 18);
    bench.queue->close();
}

// A waiter that is held inside its keep_waiting(), where the queue is unlocked.
struct HeldWaiter {
    std::atomic<bool> inside{false}, release{false};
    FailurePtr failure;
    std::thread thread;

    HeldWaiter(Queue& queue, Ticket ticket)
        : thread([this, &queue, ticket] {
              try {
                  queue.wait({&ticket, 1}, [this] {
                      inside = true;
                      while (!release) std::this_thread::yield();
                      return true;
                  });
              } catch (const Failed& error) {
                  failure = error.failure();
              }
          }) {
        while (!inside) std::this_thread::yield();
    }
    void let_go() {
        release = true;
        thread.join();
    }
};

void collect_leaves_what_somebody_waits_for() {
    Bench bench(1);
    bench.queue->pause();
    const Ticket ticket = bench.submit(bench.source(1), 0, 0);
    HeldWaiter waiter(*bench.queue, ticket);
    bench.queue->resume();
    bench.queue->drain(forever);
    CHECK(bench.queue->collect().empty());
    waiter.let_go();
    CHECK(!waiter.failure);
    CHECK(bench.queue->counters().undelivered == 0);
}

void destructor_lets_blocked_callers_out() {
    Bench bench(1);
    bench.queue->pause();
    const Ticket ticket = bench.submit(bench.source(1), 0, 0);
    HeldWaiter waiter(*bench.queue, ticket);
    std::atomic<bool> destroyed{false};
    std::thread destroyer([&] {
        bench.queue.reset();
        destroyed = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(!destroyed);
    waiter.let_go();
    destroyer.join();
    CHECK(waiter.failure && waiter.failure->kind == Failure::Kind::kCancelled);
}

void a_thread_that_does_not_start() {
    starts_allowed = 2;
    try {
        Bench bench(3);
        CHECK(false);
    } catch (const std::system_error&) {
    }
    starts_allowed = 1 << 30;
}

// Threads own disjoint slots and perform random operations; one closes in the middle. Every ticket
// must be delivered exactly once, with the right bytes when done.
void random_stress(unsigned seed) {
    constexpr int kThreads = 4;
    constexpr std::size_t kOwn = kSlots / kThreads;
    Bench bench(1 + static_cast<int>(seed % 4));
    std::vector<SourceId> sources;
    for (std::uint64_t i = 0; i < 32; ++i)
        sources.push_back(bench.source(i, i % 8 == 7 ? "io" : "ok"));
    std::atomic<std::uint64_t> issued{0}, delivered{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([&, t] {
            std::mt19937 random(seed * 31 + static_cast<unsigned>(t));
            struct Mine {
                Ticket ticket = 0;
                SourceId source = 0;
            };
            std::vector<Mine> mine(kOwn);
            for (int step = 0; step < 250; ++step) {
                const std::size_t pick = random() % kOwn;
                const std::size_t slot = static_cast<std::size_t>(t) * kOwn + pick;
                Mine& at = mine[pick];
                const unsigned action = random() % 8;
                if (at.ticket == 0) {
                    at.source = random() % sources.size();
                    try {
                        at.ticket = bench.submit(sources[at.source], slot,
                                                 action == 0 ? kDemand : random() % 4);
                        if (at.ticket == kResident) continue;
                        ++issued;
                    } catch (const std::logic_error&) {  // closed
                    }
                } else if (action == 0) {
                    bench.queue->cancel(at.ticket);
                } else if (action == 1) {
                    bench.queue->raise_priority(at.ticket, kDemand);
                } else if (action < 5) {
                    const FailurePtr failure = bench.failure(at.ticket);
                    for (const std::size_t at_byte : {std::size_t{17}, kSlotBytes - 1})
                        if (!failure)
                            CHECK(bench.bytes[slot * kSlotBytes + at_byte] ==
                                  static_cast<std::byte>(at.source));
                    ++delivered;
                    at.ticket = 0;
                }
                if (t == 0 && step == 200 && seed % 2) bench.queue->close();
            }
            for (const Mine& at : mine)
                if (at.ticket != 0 && random() % 2) {
                    bench.failure(at.ticket);
                    ++delivered;
                }
        });
    for (auto& thread : threads) thread.join();
    bench.queue->drain(forever);
    const Counters counters = bench.queue->counters();
    CHECK(counters.submitted == issued);
    CHECK(counters.done + counters.errors + counters.cancelled == issued);
    CHECK(counters.queued == 0 && counters.running == 0 && counters.waiting == 0);
    CHECK(counters.undelivered == issued - delivered);
    CHECK(bench.queue->collect().size() == issued - delivered);
    CHECK(bench.queue->collect().empty());
}

}  // namespace

int main() {
    demand_overtakes();
    demand_does_not_wait_for_running_speculation();
    speculation_waits_for_a_busy_drive();
    failures_reach_their_waiters();
    wrong_bytes_are_read_again();
    wait_many_delivers_one_failure();
    giving_up_delivers_nothing();
    close_wakes_everyone();
    collect_leaves_what_somebody_waits_for();
    destructor_lets_blocked_callers_out();
    a_thread_that_does_not_start();
    for (unsigned seed = 0; seed < 12; ++seed) random_stress(seed);
}
