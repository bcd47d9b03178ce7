// Simulates many threads on one operating-system thread: a Sync and a Clock for CopyQueueCore.
// Every interleaving is a sequence of choices that the caller makes.
//
//   fiber ──lock, wait, sleep, step──▶ scheduler ──choose(n)──▶ one of the n fibers that can go on
//
// A fiber runs alone until it returns to the scheduler: before every lock, in every wait and where
// a test calls step(). Between these points the core touches only data that its mutex guards, so no
// interleaving is lost. Other drivers check that with ThreadSanitizer.
//
// Time stands still while any fiber can run, and then jumps to the next deadline. With timeouts off
// a timed wait never ends by itself: a lost wake-up is then a deadlock and not a delay of 0.1 s.
//
// The C++ runtime's exception state per thread is swapped along with the stack. A fiber is entered
// the first time by setcontext, afterwards by longjmp, which makes no system calls.
// AddressSanitizer is notified of every switch, and needs swapcontext for all of them.
#pragma once

#include <cxxabi.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace world {

inline constexpr double kNever = std::numeric_limits<double>::infinity();
inline constexpr std::size_t kStackBytes = 256 << 10;

struct Mutex {
    int owner = -1;
};
struct Condition {
    void notify_one();
    void notify_all();
};

struct Context {
    ucontext_t whole{};
    jmp_buf registers{};
    bool started = false;
};

struct Fiber {
    Context context;
    std::unique_ptr<char[]> stack;
    std::function<void()> body;
    bool done = false;
    const Mutex* wants = nullptr;        // continues when it is free
    const Condition* sleeps = nullptr;   // continues when notified
    const Fiber* joins = nullptr;        // continues when that is done
    double deadline = kNever;            // or at this time
    char exceptions[16] = {};            // __cxa_eh_globals
    void* fake_stack = nullptr;

    bool can_run() const {
        if (done || sleeps != nullptr) return false;
        if (wants != nullptr) return wants->owner == -1;
        if (joins != nullptr) return joins->done;
        return deadline == kNever;
    }
};

class World {
  public:
    std::function<std::size_t(std::size_t)> choose;  // from [0, n)
    std::function<void()> stuck;                     // no fiber can continue; must not return
    bool timeouts = true;
    double now = 0;

    // Runs `main` and all fibers that it starts to the end.
    void play(std::function<void()> main) {
        fibers_.clear();
        now = 0;
        add(std::move(main));
        for (;;) {
            runnable_.clear();
            bool all_done = true;
            for (std::size_t i = 0; i < fibers_.size(); ++i) {
                all_done &= fibers_[i]->done;
                if (fibers_[i]->can_run()) runnable_.push_back(static_cast<int>(i));
            }
            if (all_done) break;
            if (runnable_.empty()) {
                pass_time();
                continue;
            }
            const std::size_t n = runnable_.size();
            enter(runnable_[n == 1 ? 0 : choose(n)]);
        }
        for (auto& fiber : fibers_) stacks_.push_back(std::move(fiber->stack));
    }

    // The running fiber:
    int self() const { return current_; }
    Fiber& fiber() { return *fibers_[static_cast<std::size_t>(current_)]; }
    void step() { leave(); }
    // The clock advances while no fiber runs, as in a process that is stopped and continued.
    void freeze(double seconds) { now += seconds; }
    void sleep(double seconds) {
        fiber().deadline = now + seconds;
        leave();
    }
    Fiber& add(std::function<void()> body) {
        fibers_.push_back(std::make_unique<Fiber>());
        Fiber& made = *fibers_.back();
        made.body = std::move(body);
        if (stacks_.empty()) {
            made.stack = std::make_unique<char[]>(kStackBytes);
        } else {
            made.stack = std::move(stacks_.back());
            stacks_.pop_back();
        }
#ifdef __SANITIZE_ADDRESS__
        // of the stack's previous fiber
        __asan_unpoison_memory_region(made.stack.get(), kStackBytes);
#endif
        getcontext(&made.context.whole);
        made.context.whole.uc_stack.ss_sp = made.stack.get();
        made.context.whole.uc_stack.ss_size = kStackBytes;
        made.context.whole.uc_link = nullptr;
        makecontext(&made.context.whole, &World::start, 0);
        return made;
    }
    void wake(const Condition& condition, bool all) {
        std::vector<Fiber*> sleepers;
        for (auto& fiber : fibers_)
            if (fiber->sleeps == &condition) sleepers.push_back(fiber.get());
        if (sleepers.empty()) return;
        if (!all && sleepers.size() > 1) sleepers = {sleepers[choose(sleepers.size())]};
        for (Fiber* sleeper : sleepers) {
            sleeper->sleeps = nullptr;
            sleeper->deadline = kNever;
        }
    }
    // Returns to the scheduler; continues when chosen.
    void leave() {
        Fiber& me = fiber();
        save_exceptions(me.exceptions);
        switch_to(me.fake_stack, &me.context, &scheduler_, scheduler_stack_, scheduler_bytes_);
        finish_switch(me.fake_stack);
        load_exceptions(me.exceptions);
    }

  private:
    static void start();

    void pass_time() {
        double next = kNever;
        for (auto& fiber : fibers_)
            if (!fiber->done && (timeouts || fiber->sleeps == nullptr))
                next = std::min(next, fiber->deadline);
        if (next == kNever) {
            stuck();
            std::abort();
        }
        now = std::max(now, next);
        for (auto& fiber : fibers_) {
            if (fiber->done || fiber->deadline > now || (!timeouts && fiber->sleeps)) continue;
            fiber->deadline = kNever;
            fiber->sleeps = nullptr;
        }
    }
    void enter(int index) {
        current_ = index;
        Fiber& next = fiber();
        switch_to(scheduler_fake_, &scheduler_, &next.context, next.stack.get(), kStackBytes);
        finish_switch(scheduler_fake_);
        current_ = -1;
    }
    static void switch_to([[maybe_unused]] void*& fake, Context* from, Context* to,
                          [[maybe_unused]] const void* stack, [[maybe_unused]] std::size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_start_switch_fiber(&fake, stack, bytes);
        swapcontext(&from->whole, &to->whole);
#else
        from->started = true;
        if (_setjmp(from->registers) != 0) return;
        if (to->started) _longjmp(to->registers, 1);
        setcontext(&to->whole);
#endif
    }
    void finish_switch([[maybe_unused]] void* fake) {
#ifdef __SANITIZE_ADDRESS__
        const void* stack = nullptr;
        std::size_t bytes = 0;
        __sanitizer_finish_switch_fiber(fake, &stack, &bytes);
        if (current_ != -1 && scheduler_stack_ == nullptr) {
            scheduler_stack_ = stack;
            scheduler_bytes_ = bytes;
        }
#endif
    }
    static void save_exceptions(char* to) { std::memcpy(to, abi::__cxa_get_globals(), 16); }
    static void load_exceptions(const char* from) {
        std::memcpy(static_cast<void*>(abi::__cxa_get_globals()), from, 16);
    }

    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<std::unique_ptr<char[]>> stacks_;  // of fibers that have ended
    std::vector<int> runnable_;
    int current_ = -1;
    Context scheduler_;
    void* scheduler_fake_ = nullptr;
    const void* scheduler_stack_ = nullptr;
    std::size_t scheduler_bytes_ = 0;
};

inline World the_world;

inline void World::start() {
    World& w = the_world;
    w.finish_switch(nullptr);
    Fiber& me = w.fiber();
    load_exceptions(me.exceptions);
    me.body();
    me.body = nullptr;
    me.done = true;
    w.leave();
}

inline void Condition::notify_one() {
    the_world.wake(*this, false);
}
inline void Condition::notify_all() {
    the_world.wake(*this, true);
}

class Lock {
  public:
    explicit Lock(Mutex& mutex) : mutex_(mutex) { lock(); }
    ~Lock() {
        if (mutex_.owner == the_world.self()) mutex_.owner = -1;
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    void lock() {
        CHECK(mutex_.owner != the_world.self());
        Fiber& me = the_world.fiber();
        me.wants = &mutex_;
        the_world.leave();
        me.wants = nullptr;
        mutex_.owner = the_world.self();
    }
    void unlock() {
        CHECK(mutex_.owner == the_world.self());
        mutex_.owner = -1;
    }
    // Frees the mutex, sleeps until notified or `deadline`, and takes it again.
    void sleep(const Condition& condition, double deadline) {
        CHECK(mutex_.owner == the_world.self());
        mutex_.owner = -1;
        Fiber& me = the_world.fiber();
        me.sleeps = &condition;
        me.deadline = deadline;
        me.wants = &mutex_;
        the_world.leave();
        me.wants = nullptr;
        mutex_.owner = the_world.self();
    }

  private:
    Mutex& mutex_;
};

inline int starts_allowed = 1 << 30;

struct Sync {
    using Mutex = world::Mutex;
    using Lock = world::Lock;
    struct Condition : world::Condition {
        void wait(Lock& lock) { lock.sleep(*this, kNever); }
    };
    struct Thread {
        Fiber* fiber;
        void join() {
            Fiber& me = the_world.fiber();
            me.joins = fiber;
            the_world.leave();
            me.joins = nullptr;
        }
    };
    static Thread start(std::function<void()> body) {
        if (starts_allowed-- <= 0) throw std::bad_alloc();
        return {&the_world.add(std::move(body))};
    }
    static void wait_for(Condition& condition, Lock& lock, double seconds) {
        lock.sleep(condition, the_world.now + seconds);
    }
};

struct Clock {
    double seconds() const { return the_world.now; }
};

}  // namespace world
