// CopyQueue: the ticket queue that Python holds, reading real files into a SlotPool.
// Does not know of Python.
//
// Members are destroyed from the last to the first, which is the shutdown order:
//
//   core_   closes: queued tickets end, reader threads are joined
//   slots_  closes the files: nobody reads any more
//   pool_   lets go of the arena: nobody writes any more
//
// After a fork the child has the memory but not the threads: there, destruction leaks the core
// rather than join threads that do not exist, and close() does nothing.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "copy_queue.h"
#include "file_reader.h"
#include "slot_pool.h"

namespace moeinf {

struct StdSync {
    using Mutex = std::mutex;
    using Lock = std::unique_lock<std::mutex>;
    using Condition = std::condition_variable;
    using Thread = std::thread;

    static std::thread start(std::function<void()> body);
    static void wait_for(Condition& condition, Lock& lock, double seconds) {
        condition.wait_for(lock, std::chrono::duration<double>(seconds));
    }
};

struct SteadyClock {
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }
};

// The Reader of the queue: a range of a file, checked by CRC-32C.
struct FileSlots {
    FileReader files;

    FileSlots(bool direct, std::size_t max_open_files) : files(direct, max_open_files) {}
    void read(const Source& source, std::byte* slot);
    std::uint32_t checksum(const Source& source, const std::byte* slot);
    void forget(const Source& source);
};

extern template class CopyQueueCore<StdSync, SteadyClock, FileSlots>;

class CopyQueue {
  public:
    using Core = CopyQueueCore<StdSync, SteadyClock, FileSlots>;

    CopyQueue(std::shared_ptr<SlotPool> pool, int readers, bool direct, std::size_t max_open_files);
    ~CopyQueue();

    Core* operator->() { return core_.get(); }
    const FileReader& files() const { return slots_.files; }
    void close();

  private:
    std::shared_ptr<SlotPool> pool_;
    FileSlots slots_;
    SteadyClock clock_;
    std::unique_ptr<Core> core_;
    pid_t process_;
};

}  // namespace moeinf
