// Posting, joining and leaving a call; starting, stopping and forking threads.
#include "threads/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <system_error>

#include "platform/threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeinf {
namespace {

constexpr std::uint32_t kEntered = 0xFF;
constexpr std::uint32_t kOpen = 0x100;
constexpr std::uint32_t kEpoch = 0x200;  // added for every call
constexpr int kPausesPerLook = 32;       // pauses between two readings of the clock

void relax() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

int checked(int threads) {
    if (threads < 1 || threads > kMaxComputeThreads)
        throw std::invalid_argument("threads must lie in 1 ... " +
                                    std::to_string(kMaxComputeThreads));
    return threads;
}

int usable_cores() noexcept {
    return std::clamp(platform::usable_cores(), 1, kMaxComputeThreads);
}

std::atomic<ThreadPool*> process_pool{nullptr};

// Replaces the pool in a forked child: the old pool's threads do not exist in the child, so its
// flags may stay set permanently. The old pool leaks.
void begin_anew_in_child() {
    process_pool.store(new ThreadPool(process_pool.load()->threads()));
}

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(checked(threads)) {
    workers_.reserve(kMaxComputeThreads - 1);  // so that starting them cannot run out of memory
}

ThreadPool::~ThreadPool() {
    stop_workers();
}

void ThreadPool::hold() noexcept {
    while (busy_.test_and_set(std::memory_order_acquire)) platform::yield_core();
}

void ThreadPool::set_threads(int threads) {
    checked(threads);
    hold();
    if (threads != this->threads()) {
        stop_workers();
        threads_.store(threads, std::memory_order_relaxed);
    }
    busy_.clear(std::memory_order_release);
}

void ThreadPool::run(Job job) {
    if (job.count <= 1 || threads() == 1 || busy_.test_and_set(std::memory_order_acquire)) {
        for (std::size_t index = 0; index < job.count; ++index) job.call(job.context, index);
        return;
    }
    if (workers_.empty()) start_workers();
    job_ = job;
    share_count_ = std::min(workers_.size() + 1, job.count);
    for (std::size_t s = 0; s < share_count_; ++s) {
        shares_[s].next.store(s * job.count / share_count_, std::memory_order_relaxed);
        shares_[s].end = (s + 1) * job.count / share_count_;
    }
    left_.store(0, std::memory_order_relaxed);
    const std::uint32_t epoch = state_.load(std::memory_order_relaxed) & ~(kOpen | kEntered);
    state_.store((epoch + kEpoch) | kOpen, std::memory_order_release);
    state_.notify_all();  // a system call only if a worker sleeps
    work(0);
    const std::uint32_t entered =
        state_.fetch_and(~kOpen, std::memory_order_acq_rel) & kEntered;
    for (int spins = 0; left_.load(std::memory_order_acquire) != entered; ++spins)
        spins % 1024 == 1023 ? platform::yield_core() : relax();
    busy_.clear(std::memory_order_release);
}

void ThreadPool::work(std::size_t share) noexcept {
    for (std::size_t turn = 0; turn < share_count_; ++turn) {
        Share& from = shares_[(share + turn) % share_count_];
        while (true) {
            const std::size_t index = from.next.fetch_add(1, std::memory_order_relaxed);
            if (index >= from.end) break;
            job_.call(job_.context, index);
        }
    }
}

void ThreadPool::serve() noexcept {
    std::uint32_t seen = 0;
    while (true) {
        std::uint32_t state = await(seen);
        if (stopping_.load(std::memory_order_acquire)) return;
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
        work((state & kEntered) + 1);
        seen = state & ~(kOpen | kEntered);
        left_.fetch_add(1, std::memory_order_release);
    }
}

// Waits for an open state of another epoch than `seen` and returns it, or any state when stopping.
std::uint32_t ThreadPool::await(std::uint32_t seen) noexcept {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::duration<double>(kSpinSeconds);
    while (true) {
        const std::uint32_t state = state_.load(std::memory_order_acquire);
        if (stopping_.load(std::memory_order_acquire)) return state;
        if ((state & kOpen) && (state & ~(kOpen | kEntered)) != seen) return state;
        if (Clock::now() < until)
            for (int pause = 0; pause < kPausesPerLook; ++pause) relax();
        else
            state_.wait(state, std::memory_order_acquire);
    }
}

// Starts the workers. Fewer threads than requested are enough: every thread can take any index.
void ThreadPool::start_workers() {
    const auto wanted = static_cast<std::size_t>(threads()) - 1;
    [[maybe_unused]] const platform::SignalsBlocked inherited;
    try {
        while (workers_.size() < wanted) {
            workers_.emplace_back([this] { serve(); });
            platform::set_name(workers_.back(), "moeinf-compute");
        }
    } catch (const std::system_error&) {
        // The system refuses more threads.
    }
}

void ThreadPool::stop_workers() {
    stopping_.store(true, std::memory_order_release);
    state_.fetch_add(kEpoch, std::memory_order_release);
    state_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_.store(false, std::memory_order_release);
}

ThreadPool& compute_pool() {
    static const bool made = [] {
        process_pool.store(new ThreadPool(usable_cores()));
        platform::after_fork_in_child(begin_anew_in_child);
        return true;
    }();
    (void)made;
    return *process_pool.load(std::memory_order_acquire);
}

}  // namespace moeinf
