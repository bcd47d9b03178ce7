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
// A file whose file system answers EINVAL to O_DIRECT (at the open, or at a read) is opened
// without, and stays so while it is in the cache. Other files are not concerned: they may lie elsewhere.
// refusals_ counts, for who wants to tell; its order against anything does not matter.
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

#include "queue/failure.h"
#include "queue/pages.h"

namespace moeinf {

static_assert(sizeof(off_t) == 8, "shards are addressed with 64-bit offsets");

// The system calls that can fail in ways a test cannot provoke otherwise.
struct FileCalls {
    int (*open)(const char* path, int flags) = [](const char* path, int flags) {
        return ::open(path, flags);
    };
    ssize_t (*pread)(int file, void* to, std::size_t bytes, off_t offset) = ::pread;
};

// Some systems refuse to read 2 GiB and more at once.
inline constexpr std::size_t kMaxBlockBytes = std::size_t{1} << 30;
static_assert(kMaxBlockBytes % kPageBytes == 0, "a split read stays aligned");

struct FileOptions {
    bool direct = false;  // O_DIRECT where the file system takes it
    std::size_t max_open_files = 256;
    std::size_t block_bytes = kMaxBlockBytes;  // of one system call: a multiple of kPageBytes
    FileCalls calls = {};
};

class FileReader {
  public:
    static constexpr int kEioRetries = 2;  // per read; a drive that fails thrice means it

    // Throws std::invalid_argument for no open files, or blocks that are none or too large.
    explicit FileReader(FileOptions options);
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

    bool direct() const noexcept { return options_.direct; }  // as asked for
    std::uint64_t direct_refusals() const noexcept { return refusals_; }
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
    DescriptorPtr keep(const std::string& path, DescriptorPtr file);
    int pread_until(const Descriptor& file, std::byte* to, std::size_t bytes, std::uint64_t offset,
                    std::size_t& got) const;

    const FileOptions options_;
    std::atomic<std::uint64_t> refusals_{0};
    mutable std::mutex mutex_;
    std::list<Entry> recent_;
    std::unordered_map<std::string_view, std::list<Entry>::iterator> by_path_;
};

}  // namespace moeinf
