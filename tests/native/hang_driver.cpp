// Reads that yield between two pieces, whatever comes meanwhile. Reads that hang: they time out with
// the file's name, and shutdown does not wait for them. Built with ThreadSanitizer and with
// AddressSanitizer. Takes a folder to write in.
#include <sys/mman.h>

#include <filesystem>
#include <fstream>

#include "queue/copy_queue_files.h"
#include "queue_bench.h"

namespace {

// One reader; speculation has read its first of two pieces, and a demand is at the gate.
struct HalfRead {
    Bench bench;
    Ticket half, demand;

    explicit HalfRead(const char* path = "ok", const char* then = "ok", double hang_seconds = 1e9)
        : bench(1, hang_seconds) {
        bench.reader.set_gate(true);
        half = bench.submit(bench.source(1, path), 0, 0.5);
        bench.reader.await_at_gate(1);
        demand = bench.submit(bench.source(2, then), 1, kDemand);
        bench.reader.let_through(1);
        while (bench.queue->counters().yields == 0) std::this_thread::yield();
        bench.reader.await_at_gate(1);
        CHECK((bench.reader.order == std::vector<std::uint64_t>{1, 2}));
    }
};

void half_read_tickets() {
    {
        HalfRead test;
        Bench& bench = test.bench;
        CHECK(!bench.queue->cancel(test.half));  // its slot's old bytes are gone
        CHECK(!bench.queue->can_submit(0));
        const Ticket other = bench.submit(bench.source(3), 2, 0.5);
        bench.reader.set_gate(false);
        CHECK(bench.wait(test.half) && bench.wait(test.demand) && bench.wait(other));
        CHECK(bench.reader.pieces == 2 + 1 + 2);  // no piece is read twice
        CHECK(bench.bytes[17] == std::byte{1} && bench.bytes[kPageBytes + 17] == std::byte{1});
        CHECK(bench.submit(0, 0, kDemand) == kResident);
    }
    {  // raised: it goes on in one call, before a later demand
        HalfRead test;
        Bench& bench = test.bench;
        bench.queue->raise_priority(test.half, kDemand);
        const Ticket later = bench.submit(bench.source(3), 2, kDemand);
        bench.reader.let_through(2);
        CHECK(bench.wait(test.half));
        CHECK(bench.wait(test.demand) && bench.queue->counters().done == 2);
        bench.reader.set_gate(false);
        CHECK(bench.wait(later) && bench.queue->counters().yields == 1);
    }
    {  // its second piece cannot be read
        HalfRead test("late");
        test.bench.reader.set_gate(false);
        CHECK(test.bench.failure(test.half)->code == EIO);
        CHECK(test.bench.queue->can_submit(0) && test.bench.wait(test.demand));
    }
    {  // shutdown does not read the rest
        HalfRead test;
        std::thread closer([&] { test.bench.queue->close(); });
        CHECK(test.bench.failure(test.half)->kind == Failure::Kind::kCancelled);
        test.bench.reader.set_gate(false);
        closer.join();
        CHECK(test.bench.wait(test.demand) && test.bench.reader.pieces == 2);
    }
    {  // the demand hangs, and with it the only reader: that is no hang of the half-read ticket
        HalfRead test("ok", "stuck", 0.2);
        test.bench.reader.stick(true);
        test.bench.reader.set_gate(false);
        CHECK(test.bench.failure(test.demand)->message.starts_with("the read has not ended"));
        CHECK(test.bench.failure(test.half)->message.starts_with("not read"));
        CHECK(test.bench.queue->can_submit(0));  // nothing writes there
        test.bench.reader.stick(false);
    }
}

// A running speculative read is raised: from then on it is demand, which does not yield and before
// which other speculation yields.
void a_running_read_is_raised() {
    Bench bench(2);
    bench.reader.set_gate(true);
    const Ticket raised = bench.submit(bench.source(1), 0, 0.5);
    bench.reader.await_at_gate(1);
    bench.queue->raise_priority(raised, kDemand);
    const Ticket later = bench.submit(bench.source(2), 1, 0.5);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(bench.queue->counters().running == 1);  // speculation waits for it
    const Ticket demand = bench.submit(bench.source(3), 2, kDemand);
    bench.reader.set_gate(false);
    CHECK(bench.wait(raised) && bench.wait(demand) && bench.wait(later));
    CHECK(bench.reader.order.back() == 2 && bench.queue->counters().yields == 0);
}

// A read hangs: its waiter gets an error, its slot stays reserved, and other reads continue.
void a_hung_read_is_given_up() {
    Bench bench(2, 0.2);
    const SourceId stuck = bench.source(1, "stuck"), fine = bench.source(2);
    bench.reader.stick(true);
    const Ticket hung = bench.submit(stuck, 0, kDemand);
    const FailurePtr failure = bench.failure(hung);
    CHECK(failure && failure->kind == Failure::Kind::kIo && failure->code == ETIMEDOUT);
    CHECK(failure->path == "stuck");
    CHECK(failure->message.find("not ended for 0.") != std::string::npos);
    CHECK(!bench.queue->can_submit(0) && bench.queue->counters().hung == 1);
    try {
        bench.submit(fine, 0, kDemand);
        CHECK(false);
    } catch (const std::logic_error& error) {
        CHECK(std::string(error.what()).find("hung ticket") != std::string::npos);
    }
    CHECK(bench.wait(bench.submit(fine, 1, kDemand)));  // the other reader
    const Ticket second = bench.submit(stuck, 2, kDemand);
    CHECK(bench.failure(second)->code == ETIMEDOUT);
    const Ticket queued = bench.submit(fine, 3, kDemand);  // no reader is left for it
    CHECK(bench.failure(queued)->path == "stuck");
    CHECK(bench.queue->drain(forever) && !bench.queue->close());
    bench.reader.stick(false);
    bench.queue.reset();  // waits for them
}

// Hung speculation does not keep other speculation from the remaining reader.
void a_hung_speculation_gives_up_its_place() {
    Bench bench(2, 0.2);
    bench.reader.stick(true);
    const Ticket hung = bench.submit(bench.source(1, "stuck"), 0, 0.5);
    const Ticket queued = bench.submit(bench.source(2), 1, 0.5);
    CHECK(bench.wait(queued));
    CHECK(bench.failure(hung)->code == ETIMEDOUT);
    bench.reader.stick(false);
}

void a_hung_read_comes_back() {
    Bench bench(1, 0.2);
    bench.reader.stick(true);
    const SourceId stuck = bench.source(1, "stuck");
    CHECK(bench.failure(bench.submit(stuck, 0, kDemand))->code == ETIMEDOUT);
    bench.reader.stick(false);
    while (!bench.queue->can_submit(0)) std::this_thread::yield();
    CHECK(bench.submit(stuck, 0, kDemand) == kResident);  // the late read was complete and verified
    CHECK(bench.wait(bench.submit(bench.source(3), 0, kDemand)));
    CHECK(bench.queue->counters().hung == 0 && bench.queue->close());
}

std::size_t mapped = 0;

// An arena frees all its pages; a refused allocation is an error with its size.
void an_arena_gives_back_what_it_took() {
    ArenaCalls calls;
    calls.map = [](std::size_t bytes) {
        mapped += bytes;
        return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    };
    calls.unmap = [](void* base, std::size_t bytes) {
        mapped -= bytes;
        return ::munmap(base, bytes);
    };
    {
        const SlotPool pool(3, 2 * kHugePageBytes, calls);
        CHECK(mapped == pool.bytes());
    }
    CHECK(mapped == 0);
    calls.map = [](std::size_t) { return errno = ENOMEM, static_cast<void*>(nullptr); };
    try {
        SlotPool(3, 4096, calls);
        CHECK(false);
    } catch (const ArenaError& error) {
        CHECK(std::string(error.what()).find("cannot allocate 12288 bytes") == 0);
    }
}

// Real files: pread hangs on one, as on a dead disk.
std::mutex disk_mutex;
std::condition_variable disk_moved;
bool disk_dead = true;

FileCalls dying_disk() {
    FileCalls calls;
    calls.pread = [](int file, void* to, std::size_t bytes, off_t offset) {
        std::unique_lock lock(disk_mutex);
        while (disk_dead) disk_moved.wait(lock);
        lock.unlock();
        return ::pread(file, to, bytes, offset);
    };
    return calls;
}

std::ptrdiff_t threads() {
    using std::filesystem::directory_iterator;
    return std::distance(directory_iterator("/proc/self/task"), directory_iterator());
}

// The queue is destroyed while its only reader hangs. The destructor returns, and the objects that
// the reader needs stay alive until it returns from the kernel.
void destroyed_while_a_read_hangs(const std::string& folder) {
    const std::ptrdiff_t before = threads();
    const std::string path = folder + "/shard";
    std::ofstream(path, std::ios::binary) << std::string(2 * kPageBytes, 'x');
    auto pool = std::make_shared<SlotPool>(2, kPageBytes);
    std::byte* const slot = pool->base();
    {
        CopyQueue queue(std::move(pool), 1, 0.2, {false, 4, kMaxBlockBytes, dying_disk()});
        const SourceId source = queue->add_source({path, kPageBytes, kPageBytes, {}});
        const Ticket ticket = queue->submit(source, 0, kDemand);
        try {
            queue->wait({&ticket, 1}, forever);
            CHECK(false);
        } catch (const Failed& error) {
            CHECK(error.failure()->code == ETIMEDOUT && error.failure()->path == path);
        }
    }  // the pool's last owner, except for the reader's reference
    slot[5] = std::byte{7};  // still allocated
    {
        const std::lock_guard lock(disk_mutex);
        disk_dead = false;
    }
    disk_moved.notify_all();
    while (threads() > before) std::this_thread::yield();  // the reader writes, and exits
    // frees the objects of the exited reader
    CopyQueue next(std::make_shared<SlotPool>(1, kPageBytes), 1, 1, {});
}

}  // namespace

int main(int, char** arguments) {
    half_read_tickets();
    a_running_read_is_raised();
    a_hung_read_is_given_up();
    a_hung_speculation_gives_up_its_place();
    a_hung_read_comes_back();
    an_arena_gives_back_what_it_took();
    destroyed_while_a_read_hangs(arguments[1]);
}
