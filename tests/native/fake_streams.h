// The parts of the fake libcuda: streams, events, registrations, failures, and their execution.
// fake_libcuda.cpp has the driver's calls and documents the guarantees. Included by it alone.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace fake {

enum Code {
    kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoDevice = 100, kInvalidContext = 201,
    kInvalidHandle = 400, kNotReady = 600, kLaunchFailed = 719, kIllegalAddress = 700,
    kAlreadyRegistered = 712, kNotRegistered = 713, kNotSupported = 801, kUnknown = 999,
    kNvmlTooSmall = 7, kNvmlNotFound = 12
};

struct Event {
    std::uint64_t recorded = 0;  // records queued
    std::uint64_t done = 0;      // records that have run
};

struct Op {
    std::function<void()> run;      // the operation
    std::function<bool()> can_run;  // null: at once
};

struct Stream {
    std::deque<Op> queue;
    bool running = false;
    bool stop = false;
    std::thread thread;
};

struct Failure {
    std::string call;
    int after, code, times;
};

struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool threads = false, at_once = false;
    std::mt19937 random{1};
    std::size_t memory_bytes = std::size_t{1} << 30, context_bytes = std::size_t{8} << 20;
    std::size_t lockable_bytes = ~std::size_t{0}, others_bytes = 0;
    long said = -1;
    std::string nvml;  // "": no NVML; processes; device
    bool fault_next = false;  // the next copy fails when it runs
    int devices = 1, retained = 0, sticky = kOk;
    unsigned delay_us = 200;
    std::map<std::uintptr_t, std::size_t> allocated, registered;
    std::map<Stream*, std::unique_ptr<Stream>> streams;
    std::map<Event*, std::shared_ptr<Event>> events;  // queued operations keep theirs
    Stream legacy;  // the default stream: null
    std::vector<Failure> failures;
    std::map<std::string, long> counts;

    State() {
        if (const char* words = std::getenv("FAKE_CUDA")) configure(words);
    }

    // `mode=threads,seed=3,memory=1000000,context=9,others=9,lockable=5000,devices=1,delay_us=9,`
    // `nvml=processes,fail=CALL:AFTER:CODE:TIMES,mend` (the last word: calls stop failing)
    void configure(const std::string& words) {
        std::stringstream stream(words);
        for (std::string item; std::getline(stream, item, ',');) {
            const auto at = item.find('=');
            const std::string key = item.substr(0, at);
            const std::string value = at == std::string::npos ? "" : item.substr(at + 1);
            if (key == "mode") {
                threads = value == "threads";
                at_once = value == "at_once";
            }
            if (key == "seed") random.seed(static_cast<unsigned>(std::stoul(value)));
            if (key == "memory") memory_bytes = std::stoull(value);
            if (key == "context") context_bytes = std::stoull(value);
            if (key == "others") others_bytes = std::stoull(value);
            if (key == "said") said = std::stol(value);
            if (key == "nvml") nvml = value;
            if (key == "lockable") lockable_bytes = std::stoull(value);
            if (key == "devices") devices = std::stoi(value);
            if (key == "delay_us") delay_us = static_cast<unsigned>(std::stoul(value));
            if (key == "mend") failures.clear();
            if (key == "fail") {
                Failure failure{"", 0, kUnknown, 1};
                std::stringstream parts(value);
                std::string part;
                std::getline(parts, failure.call, ':');
                if (std::getline(parts, part, ':')) failure.after = std::stoi(part);
                if (std::getline(parts, part, ':')) failure.code = std::stoi(part);
                if (std::getline(parts, part, ':')) failure.times = std::stoi(part);
                failures.push_back(failure);
            }
        }
    }
};

inline State& state() {
    static State* const kept = new State;  // outlives every thread
    return *kept;
}

inline thread_local std::vector<void*> current;
inline int primary;  // its address is the context

using Lock = std::unique_lock<std::mutex>;

// Counts the call; returns its planned error code, or kOk.
inline int enter(const char* call, bool needs_context = true) {
    State& s = state();
    ++s.counts[call];
    for (Failure& failure : s.failures)
        if (failure.call == call && failure.times != 0) {
            if (failure.after-- > 0) continue;
            failure.after = 0;
            --failure.times;
            if (failure.code != kIllegalAddress) return failure.code;
            s.fault_next = true;
        }
    if (needs_context && current.empty()) return kInvalidContext;
    return s.sticky;
}

inline std::vector<Stream*> all_streams() {
    std::vector<Stream*> found{&state().legacy};
    for (auto& [key, stream] : state().streams) found.push_back(stream.get());
    return found;
}

// Runs the head of a stream, if possible; releases the lock meanwhile.
inline bool run_head(Stream& stream, Lock& lock) {
    if (stream.queue.empty() || stream.running) return false;
    if (stream.queue.front().can_run && !stream.queue.front().can_run()) return false;
    stream.running = true;
    const Op op = stream.queue.front();
    lock.unlock();
    op.run();
    lock.lock();
    stream.queue.pop_front();
    stream.running = false;
    state().changed.notify_all();
    return true;
}

// Deferred mode: runs one operation of a random stream; false: none can run.
inline bool run_one(Lock& lock) {
    auto streams = all_streams();
    std::shuffle(streams.begin(), streams.end(), state().random);
    for (Stream* stream : streams)
        if (run_head(*stream, lock)) return true;
    return false;
}

inline int wait_until(const std::function<bool()>& reached, Lock& lock) {
    while (!reached()) {
        if (state().threads) {
            state().changed.wait(lock);
        } else if (!run_one(lock)) {
            const auto streams = all_streams();
            const auto running = [](const Stream* stream) { return stream->running; };
            if (std::any_of(streams.begin(), streams.end(), running)) {
                state().changed.wait(lock);  // another thread runs an operation
                continue;
            }
            // a deadlock of streams: impossible, waits only refer to earlier records
            return kUnknown;
        }
    }
    return state().sticky;
}

// A moment in which the device may make progress.
inline void pass_time(Lock& lock) {
    if (state().threads) return;
    while (state().at_once && run_one(lock)) {
    }
    for (unsigned steps = state().random() % 4 == 0 ? state().random() % 3 : 0; steps > 0; --steps)
        if (!run_one(lock)) return;
}

inline void serve(Stream* stream) {
    State& s = state();
    Lock lock(s.mutex);
    while (true) {
        s.changed.wait(lock, [&] {
            if (stream->queue.empty()) return stream->stop;
            if (!s.threads) return false;  // the default stream's thread outlives a test
            const Op& head = stream->queue.front();
            return !head.can_run || head.can_run();
        });
        if (stream->queue.empty()) return;
        if (s.delay_us > 0 && s.random() % 2 == 0) {
            const auto pause = std::chrono::microseconds(s.random() % s.delay_us);
            lock.unlock();
            std::this_thread::sleep_for(pause);
            lock.lock();
        }
        run_head(*stream, lock);
    }
}

inline Stream* find(void* handle) {
    if (handle == nullptr) {
        Stream& legacy = state().legacy;
        if (state().threads && !legacy.thread.joinable()) {
            legacy.thread = std::thread(serve, &legacy);
            legacy.thread.detach();
        }
        return &legacy;
    }
    const auto found = state().streams.find(static_cast<Stream*>(handle));
    return found == state().streams.end() ? nullptr : found->second.get();
}

inline std::shared_ptr<Event> find_event(void* handle) {
    const auto found = state().events.find(static_cast<Event*>(handle));
    return found == state().events.end() ? nullptr : found->second;
}

inline int queue(void* handle, std::function<void()> run, std::function<bool()> can_run = nullptr) {
    Stream* const stream = find(handle);
    if (stream == nullptr) return kInvalidHandle;
    stream->queue.push_back({std::move(run), std::move(can_run)});
    state().changed.notify_all();
    return kOk;
}

// Returns kOk when [from, from + bytes) lies in one registration, kNotRegistered when in none.
inline int registration_of(std::uintptr_t from, std::size_t bytes) {
    for (const auto& [base, size] : state().registered) {
        if (from + bytes <= base || from >= base + size) continue;
        return from >= base && from + bytes <= base + size ? kOk : kInvalidValue;
    }
    return kNotRegistered;
}

inline bool is_device(std::uintptr_t to, std::size_t bytes) {
    for (const auto& [base, size] : state().allocated)
        if (to >= base && to + bytes <= base + size) return true;
    return false;
}

}  // namespace fake
