// CopyQueue: the ticket queue that Python holds. It reads real files into a SlotPool.
// Does not know of Python.
//
//   CopyQueue ── parts_ ──▶ { pool, copier, reader, clock, core }
//
// The parts are destroyed from the last to the first, which is the shutdown order:
//
//   core    closes: queued tickets end, reader threads are joined
//   reader  closes the files: no thread reads any more
//   pool    releases the arena: no thread writes any more
//
// In two cases the parts are not destroyed, arena included:
//
// - A reader hangs in the kernel (a dead disk, a network file system without its server) for
//   hang_seconds. The thread cannot be ended and the kernel may still write into its slot. So the
//   parts move to abandoned() and stay allocated. A reader that returns finds the queue closed and
//   ends. The next CopyQueue that is constructed frees the parts of such readers.
// - After a fork the child has the memory but not the threads: joining them would hang.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "queue/copy_queue.h"
#include "queue/file_reader.h"
#include "queue/slot_pool.h"

namespace moeinf {

// A drive that retries a bad sector may take this long; a longer read is taken as hung.
inline constexpr double kHangSeconds = 30;

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

// The Copier of the queue: a slot in host memory is where its reads land.
struct HostSlots {
    std::byte* base;
    std::size_t slot_bytes;

    std::byte* landing(std::size_t slot) const { return base + slot * slot_bytes; }
    void copy(std::size_t, std::size_t) const {}
};

// The Reader of the queue: a range of a file, checked by CRC-32C.
struct FileSlots {
    FileReader files;

    explicit FileSlots(FileOptions options) : files(options) {}
    void read(const Source& source, std::size_t from, std::size_t bytes, std::byte* slot);
    std::uint32_t checksum(const Source& source, const std::byte* slot);
    void forget(const Source& source);
};

extern template class CopyQueueCore<StdSync, SteadyClock, FileSlots, HostSlots>;

class CopyQueue {
  public:
    using Core = CopyQueueCore<StdSync, SteadyClock, FileSlots, HostSlots>;

    CopyQueue(std::shared_ptr<SlotPool> pool, int readers, double hang_seconds, FileOptions files,
              int busy = kMaxReaders, std::size_t piece_bytes = kPieceBytes);
    ~CopyQueue();
    CopyQueue(const CopyQueue&) = delete;
    CopyQueue& operator=(const CopyQueue&) = delete;

    Core* operator->() { return &parts_->core; }
    const FileReader& files() const { return parts_->reader.files; }
    void close();

  private:
    struct Parts {
        std::shared_ptr<SlotPool> pool;
        HostSlots copier;
        FileSlots reader;
        SteadyClock clock;
        Core core;

        Parts(std::shared_ptr<SlotPool> arena, int readers, double hang_seconds, FileOptions files,
              int busy, std::size_t piece_bytes);
    };
    struct Abandoned {
        std::mutex mutex;
        std::vector<std::unique_ptr<Parts>> parts;
    };
    static Abandoned& abandoned();
    static void bury_the_returned();

    std::unique_ptr<Parts> parts_;
    int process_;
};

}  // namespace moeinf
