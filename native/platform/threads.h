// Threads and processes as the operating system runs them: signals, names, cores, forks.
//
// macOS and Windows: compiled, not run.
#pragma once

#include <cerrno>
#include <thread>

#ifdef _WIN32
#include <process.h>
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/time.h>
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

inline void end_after_signals(double) {}  // the server is not run there

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

namespace ending {

inline double seconds = 0;
inline volatile sig_atomic_t begun = 0;
inline void (*next_of[NSIG])(int) = {};

inline void end_now(int) { ::_exit(1); }

// Starts the clock, then calls Python's handler, which only notes the signal. Async-signal-safe:
// setitimer is a system call here.
inline void begin_end(int number) {
    const int code = errno;
    if (begun == 0) {
        begun = 1;
        itimerval left{};
        left.it_value.tv_sec = static_cast<time_t>(seconds);
        left.it_value.tv_usec =
            static_cast<suseconds_t>((seconds - static_cast<double>(left.it_value.tv_sec)) * 1e6);
        ::setitimer(ITIMER_REAL, &left, nullptr);
    }
    errno = code;
    if (next_of[number] != nullptr) next_of[number](number);
}

}  // namespace ending

// Ends the process with status 1 `seconds` after its first SIGINT or SIGTERM, unless it has ended
// before. No thread of Python is needed for that: one may hold the interpreter's lock for minutes.
inline void end_after_signals(double seconds) {
    ending::seconds = seconds;
    struct sigaction about{};
    about.sa_handler = ending::end_now;
    ::sigaction(SIGALRM, &about, nullptr);
    for (const int number : {SIGINT, SIGTERM}) {
        struct sigaction now{};
        ::sigaction(number, nullptr, &now);
        const bool calls = now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN;
        if (!calls || now.sa_handler == ending::begin_end) continue;
        ending::next_of[number] = now.sa_handler;
        now.sa_handler = ending::begin_end;
        ::sigaction(number, &now, nullptr);
    }
}

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
