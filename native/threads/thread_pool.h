// The threads of the kernels: parallel_for over a fixed count, in which the caller takes part.
//
// One call, with n = min(threads(), count) shares of the indices:
//
//   share     0            1            ...   n-1
//   indices   [0, c/n)     [c/n, 2c/n)  ...   [(n-1)c/n, c)      the same for every call
//   worked on by the caller, then by the workers in the order in which they join
//
// A thread that finishes its share takes indices of the other shares. So a worker that wakes late,
// or whose core is busy, delays no other thread: the caller alone can finish all indices. It is
// therefore not fixed which thread runs an index; a body must give the same bytes on any thread.
//
// state_ is one 32-bit word that workers sleep on (futex):
//
//   | epoch : 23 | open : 1 | entered : 8 |
//
//   post     epoch + 1, open, entered 0       release: publishes job_ and shares_
//   join     entered + 1, only while open     acquire: sees them
//   close    open cleared by the caller when no index is left; no worker joins after that
//   leave    left_ + 1                        release: publishes what the body wrote
//
// The caller returns when left_ == entered. So job_ and shares_ never change while a worker uses
// them, and all writes of the bodies happen-before the return. If the epoch wraps round while a
// worker sleeps, that worker may miss one call, and the other threads do its work.
//
// Waiting. A worker spins for kSpinSeconds and then sleeps. That is long enough to catch the second
// of two consecutive calls (gate·up, then down). It is short enough not to hold a core while torch
// computes between them.
//
// One call at a time has the workers. A call that finds them busy (another thread, or a body that
// calls again) runs all of its indices itself. The only waits are for running bodies.
//
// Fork and exit. compute_pool() is constructed at first use and never destroyed, so at exit its
// workers use nothing that was destroyed before them. After fork() the child gets a new pool
// without threads; they start at its first call.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace moeinf {

inline constexpr int kMaxComputeThreads = 64;
inline constexpr double kSpinSeconds = 50e-6;
static_assert(kMaxComputeThreads < 256, "entered has 8 bits");

class ThreadPool {
  public:
    // `threads` in 1 … kMaxComputeThreads, the caller included. The workers start at the first call
    // that needs them. Throws std::invalid_argument.
    explicit ThreadPool(int threads);
    ~ThreadPool();  // must not race with calls
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const noexcept { return threads_.load(std::memory_order_relaxed); }

    // Waits for a running call to end, then changes the count. Throws std::invalid_argument.
    void set_threads(int threads);

    // Runs body(index) once for every index in [0, count), and returns when all have run. The body
    // must not throw. An index should run for some microseconds: taking it costs an atomic add.
    template <class Body>
    void parallel_for(std::size_t count, Body&& body) {
        using Plain = std::remove_reference_t<Body>;
        const Call call = [](void* context, std::size_t index) noexcept {
            (*static_cast<Plain*>(context))(index);
        };
        run({call, const_cast<void*>(static_cast<const void*>(std::addressof(body))), count});
    }

  private:
    using Call = void (*)(void* context, std::size_t index) noexcept;
    struct Job {
        Call call;
        void* context;
        std::size_t count;
    };
    struct alignas(64) Share {  // one cache line each
        std::atomic<std::size_t> next{0};
        std::size_t end = 0;
    };

    void run(Job job);
    void work(std::size_t share) noexcept;  // takes indices until none is left, its own share first
    void serve() noexcept;                  // the body of a worker thread
    std::uint32_t await(std::uint32_t seen) noexcept;
    void start_workers();
    void stop_workers();
    void hold() noexcept;  // waits until it has busy_

    std::atomic<int> threads_;
    std::atomic_flag busy_;  // its holder posts calls and changes the members below
    std::vector<std::thread> workers_;
    std::array<Share, kMaxComputeThreads> shares_;
    std::size_t share_count_ = 0;
    Job job_{};
    alignas(64) std::atomic<std::uint32_t> state_{0};
    alignas(64) std::atomic<std::uint32_t> left_{0};
    std::atomic<bool> stopping_{false};
};

// Returns the pool of the process. It has one thread per usable core, until set_threads.
ThreadPool& compute_pool();

}  // namespace moeinf
