// CopyQueue: the core on real threads, real time and real files.
// Does not know of Python.
#include "copy_queue_files.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <utility>

#include "crc32c.h"

namespace moeinf {

template class CopyQueueCore<StdSync, SteadyClock, FileSlots>;

// Signals are Python's: one delivered to a reader thread would not interrupt the main thread.
std::thread StdSync::start(std::function<void()> body) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // a new thread inherits it
    struct Restore {
        const sigset_t* mask;
        ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
    } restore{&before};
    std::thread thread(std::move(body));
#ifdef __linux__
    pthread_setname_np(thread.native_handle(), "moeinf-read");
#endif
    return thread;
}

void FileSlots::read(const Source& source, std::byte* slot) {
    files.read(source.path, source.offset, source.bytes, slot);
}

std::uint32_t FileSlots::checksum(const Source& source, const std::byte* slot) {
    return crc32c(slot, source.bytes);
}

void FileSlots::forget(const Source& source) {
    files.forget(source.path);
}

CopyQueue::CopyQueue(std::shared_ptr<SlotPool> pool, int readers, bool direct,
                     std::size_t max_open_files)
    : pool_(std::move(pool)),
      slots_(direct, max_open_files),
      core_(std::make_unique<Core>(Arena{pool_->base(), pool_->slots(), pool_->slot_bytes()},
                                   readers, slots_, clock_)),
      process_(getpid()) {}

CopyQueue::~CopyQueue() {
    if (getpid() != process_) core_.release();  // forked: the threads are not here to be joined
}

void CopyQueue::close() {
    if (getpid() == process_) core_->close();
}

}  // namespace moeinf
