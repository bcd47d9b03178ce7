// CopyQueue: the core on real threads, real time and real files. Does not know of Python.
#include "queue/copy_queue_files.h"

#include <utility>

#include "platform/threads.h"
#include "queue/crc32c.h"

namespace moeinf {

template class CopyQueueCore<StdSync, SteadyClock, FileSlots, HostSlots>;

std::thread StdSync::start(std::function<void()> body) {
    [[maybe_unused]] const platform::SignalsBlocked inherited;
    std::thread thread(std::move(body));
    platform::set_name(thread, "moeinf-read");
    return thread;
}

void FileSlots::read(const Source& source, std::size_t from, std::size_t bytes, std::byte* slot) {
    files.read(source.path, source.offset + from, bytes, slot + from);
}

std::uint32_t FileSlots::checksum(const Source& source, const std::byte* slot) {
    return crc32c(slot, source.bytes);
}

void FileSlots::forget(const Source& source) {
    files.forget(source.path);
}

CopyQueue::Parts::Parts(std::shared_ptr<SlotPool> arena, int readers, double hang_seconds,
                        FileOptions files, int busy, std::size_t piece_bytes)
    : pool(std::move(arena)),
      copier{pool->base(), pool->slot_bytes()},
      reader(files),
      core({pool->slots(), pool->slot_bytes(), readers, hang_seconds, busy, piece_bytes}, reader,
           copier, clock) {}

// Never destroyed: a reader may return from the kernel while the process exits.
CopyQueue::Abandoned& CopyQueue::abandoned() {
    static auto* const all = new Abandoned;
    return *all;
}

void CopyQueue::bury_the_returned() {
    Abandoned& all = abandoned();
    const std::lock_guard lock(all.mutex);
    std::erase_if(all.parts, [](const auto& parts) { return parts->core.close(); });
}

CopyQueue::CopyQueue(std::shared_ptr<SlotPool> pool, int readers, double hang_seconds,
                     FileOptions files, int busy, std::size_t piece_bytes)
    : process_(platform::process_number()) {
    bury_the_returned();
    parts_ = std::make_unique<Parts>(std::move(pool), readers, hang_seconds, files, busy,
                                     piece_bytes);
}

CopyQueue::~CopyQueue() {
    if (platform::process_number() != process_) {
        static_cast<void>(parts_.release());
    } else if (!parts_->core.close()) {
        Abandoned& all = abandoned();
        const std::lock_guard lock(all.mutex);
        all.parts.push_back(std::move(parts_));
    }
}

void CopyQueue::close() {
    if (platform::process_number() != process_) return;
    parts_->core.close();
    parts_->reader.files.close();  // a file that a hung thread reads closes when it returns
}

}  // namespace moeinf
