// ThreadPool under ThreadSanitizer: every index runs once, with late, nested and stopping threads.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "threads/thread_pool.h"

using moeinf::ThreadPool;

namespace {

// Plain ints: ThreadSanitizer reports a second run of an index, or a return before its end, as a
// race.
void counts_every_index(ThreadPool& pool, std::size_t count) {
    std::vector<int> runs(count, 0);
    pool.parallel_for(count, [&](std::size_t index) { ++runs[index]; });
    for (const int times : runs) CHECK(times == 1);
}

void every_count_and_thread_number() {
    for (int threads = 1; threads <= 5; ++threads) {
        ThreadPool pool(threads);
        for (std::size_t count = 0; count < 40; ++count) counts_every_index(pool, count);
    }
}

void calls_that_come_while_workers_sleep() {
    ThreadPool pool(3);
    for (int round = 0; round < 20; ++round) {
        std::this_thread::sleep_for(std::chrono::microseconds(40 * (round % 5)));
        counts_every_index(pool, 100);
    }
}

void workers_take_part() {
    ThreadPool pool(2);
    std::atomic<int> inside{0};
    // each index waits for the other, so both threads must take part
    pool.parallel_for(2, [&](std::size_t) {
        ++inside;
        while (inside.load() < 2) std::this_thread::yield();
    });
    CHECK(inside == 2);
}

void a_body_may_call_again() {
    ThreadPool pool(3);
    std::vector<std::vector<int>> runs(8, std::vector<int>(8, 0));
    pool.parallel_for(8, [&](std::size_t outer) {
        pool.parallel_for(8, [&](std::size_t inner) { ++runs[outer][inner]; });
    });
    for (const auto& row : runs)
        for (const int times : row) CHECK(times == 1);
}

void several_callers_and_a_changing_number_of_threads() {
    ThreadPool pool(3);
    std::vector<std::thread> callers;
    for (int c = 0; c < 3; ++c)
        callers.emplace_back([&] {
            for (int round = 0; round < 200; ++round) counts_every_index(pool, 17);
        });
    for (int round = 0; round < 30; ++round) pool.set_threads(1 + round % 4);
    for (auto& caller : callers) caller.join();
}

void a_number_that_cannot_be() {
    ThreadPool pool(2);
    for (const int threads : {0, -1, moeinf::kMaxComputeThreads + 1}) {
        try {
            pool.set_threads(threads);
            CHECK(false);
        } catch (const std::invalid_argument&) {
        }
        CHECK(pool.threads() == 2);
    }
}

}  // namespace

int main() {
    every_count_and_thread_number();
    calls_that_come_while_workers_sleep();
    workers_take_part();
    a_body_may_call_again();
    several_callers_and_a_changing_number_of_threads();
    a_number_that_cannot_be();
}
