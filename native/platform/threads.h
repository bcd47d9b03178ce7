// Threads and processes as the operating system runs them: signals, names, cores, forks.
//
// macOS and Windows: compiled, not run.
#pragma once

#include <thread>

#ifdef _WIN32
#include <process.h>
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#endif

namespace moeinf::platform {

#ifdef _WIN32

class SignalsBlocked {};  // signals do not interrupt threads there

inline void set_name(std::thread&, const char*) {}

inline void yield_core() noexcept { ::SwitchToThread(); }

inline int usable_cores() noexcept {
    return static_cast<int>(std::thread::hardware_concurrency());
}

inline void after_fork_in_child(void (*)()) {}  // no process forks there

inline int process_number() noexcept { return ::_getpid(); }

#else

// Blocks all signals in this thread, and in those that it starts, which inherit the mask. Signals
// belong to Python's threads: delivered to another one, they would not interrupt the main thread.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t before_;
};

inline void set_name([[maybe_unused]] std::thread& thread, [[maybe_unused]] const char* name) {
#ifdef __linux__
    pthread_setname_np(thread.native_handle(), name);
#endif
}

inline void yield_core() noexcept { sched_yield(); }

inline int usable_cores() noexcept {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::thread::hardware_concurrency());
}

inline void after_fork_in_child(void (*call)()) { pthread_atfork(nullptr, nullptr, call); }

inline int process_number() noexcept { return getpid(); }

#endif

}  // namespace moeinf::platform
