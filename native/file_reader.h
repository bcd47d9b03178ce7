// Reads a range of a file into page-aligned memory, keeping a bounded number of files open.
// Does not know of tickets, slots or checksums.
//
// The cache of descriptors (thousands of shards, a few hundred descriptors):
//
//   recent_  front: just used <-> ... <-> back: closed next        at most max_open_files
//            { path, shared_ptr<Descriptor> }
//   by_path_ path -> node of recent_; its keys are views into the nodes, which never move
//
// Who writes: both only under mutex_; no system call that may wait happens under it, except the
// close of what was evicted. A reader holds its own reference for the length of a read, so eviction
// never closes a descriptor in use: at most max_open_files + (threads reading) are ever open.
//
// direct_ only ever goes from true to false: the first file system that answers EINVAL (to the open
// or to a read) turns O_DIRECT off for this reader. Relaxed order is enough: a thread that has not
// seen it yet gets its own EINVAL and does the same.
//
// Under O_DIRECT offset, address and length must be multiples of kPageBytes: the queue refuses
// other offsets and the arena has no other addresses, hence an assert. Only the last page of a file
// may come short; whatever else comes short is finished through the page cache.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "failure.h"
#include "pages.h"

namespace moeinf {

static_assert(sizeof(off_t) == 8, "shards are addressed with 64-bit offsets");

// The system calls that can fail in ways a test cannot provoke otherwise.
struct FileCalls {
    int (*open)(const char* path, int flags) = [](const char* path, int flags) {
        return ::open(path, flags);
    };
    ssize_t (*pread)(int file, void* to, std::size_t bytes, off_t offset) = ::pread;
};

class FileReader {
  public:
    static constexpr int kEioRetries = 2;  // per read; a drive that fails thrice means it

    FileReader(bool direct, std::size_t max_open_files, FileCalls calls = {});
    ~FileReader();
    FileReader(const FileReader&) = delete;
    FileReader& operator=(const FileReader&) = delete;

    // Fills to[0, bytes) from `offset`; may write up to round_up_to_page(bytes). `offset` and `to`
    // are multiples of kPageBytes. Any thread. Throws Failed: kIo with errno (a symbolic link in
    // the last part of the path is ELOOP, a directory EISDIR), kCorrupt when the file ends early.
    void read(const std::string& path, std::uint64_t offset, std::size_t bytes, std::byte* to);

    // Closes `path` (once nobody reads it) and drops its cached pages, so that the next read asks
    // the drive, or finds the file that has replaced it.
    void forget(const std::string& path);

    bool direct() const noexcept { return direct_.load(std::memory_order_relaxed); }
    std::size_t open_files() const;  // in the cache; a read in progress may hold one more

  private:
    struct Descriptor;
    using DescriptorPtr = std::shared_ptr<Descriptor>;
    struct Entry {
        std::string path;
        DescriptorPtr file;
    };

    int try_open(const std::string& path, int extra_flags);
    DescriptorPtr open(const std::string& path, bool direct);
    DescriptorPtr acquire(const std::string& path);
    int pread_until(const Descriptor& file, std::byte* to, std::size_t bytes, std::uint64_t offset,
                    std::size_t& got) const;

    const FileCalls calls_;
    const std::size_t max_open_files_;
    std::atomic<bool> direct_;
    mutable std::mutex mutex_;
    std::list<Entry> recent_;
    std::unordered_map<std::string_view, std::list<Entry>::iterator> by_path_;
};

}  // namespace moeinf
