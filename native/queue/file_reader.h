// Reads a range of a file into page-aligned memory, keeping a bounded number of files open.
//
// The cache of descriptors (thousands of shards, a few hundred descriptors):
//
//   recent_  front: just used <-> ... <-> back: closed next        at most max_open_files
//            { path, shared_ptr<Descriptor>, moment of the last use }
//   by_path_ path -> node of recent_; its keys are views into the nodes, which never move
//
// All readers of the process together keep at most a quarter of its descriptors (most_open_files).
// Beyond that the file that was used least recently is closed, of whichever reader.
//
// recent_ and by_path_ of all readers are used only under one mutex, that of OpenFiles. No system
// call that may block happens under it, except the close of an evicted file. A reader holds its own
// reference during a read, so eviction never closes a descriptor in use. At most most_open_files +
// (threads reading) descriptors are open.
//
// If the file system returns EINVAL for O_DIRECT (at the open, or at a read), the file is opened
// without it. It stays so while it is in the cache. Other files are not affected: they may be on
// another file system. refusals_ counts these cases for reports; its memory order does not matter.
//
// Under O_DIRECT the offset, address and length must be multiples of kPageBytes. The queue refuses
// other offsets and the arena has no other addresses, so an assert checks them. Only the last page
// of a file may be short; any other short read is finished through the page cache.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "platform/files.h"
#include "queue/failure.h"
#include "queue/pages.h"

namespace moeinf {

// System calls whose failures a test can provoke only by replacing them.
struct FileCalls {
    int (*open)(const char* path, int flags) = platform::open_file;
    std::ptrdiff_t (*pread)(int file, void* to, std::size_t bytes,
                            std::int64_t offset) = platform::read_at;
};

// Some systems refuse to read 2 GiB or more in one call.
inline constexpr std::size_t kMaxBlockBytes = std::size_t{1} << 30;
static_assert(kMaxBlockBytes % kPageBytes == 0, "a split read stays aligned");

struct FileOptions {
    bool direct = false;  // O_DIRECT where the file system supports it
    std::size_t max_open_files = SIZE_MAX;  // of this reader; most_open_files bounds them all
    std::size_t block_bytes = kMaxBlockBytes;  // per system call: a multiple of kPageBytes
    FileCalls calls = {};
};

// The bound of open files of all readers: a quarter of the process's descriptors as of now.
std::size_t most_open_files() noexcept;

class FileReader {
  public:
    static constexpr int kEioRetries = 2;  // per read; the third failure is final

    // Throws std::invalid_argument if max_open_files is 0, or if block_bytes is 0, above
    // kMaxBlockBytes or not a multiple of kPageBytes.
    explicit FileReader(FileOptions options);
    ~FileReader();
    FileReader(const FileReader&) = delete;
    FileReader& operator=(const FileReader&) = delete;

    // Fills to[0, bytes) from `offset`; may write up to round_up_to_page(bytes). `offset` and `to`
    // are multiples of kPageBytes. Any thread. Throws Failed: kIo with errno (a symbolic link as
    // the last part of the path is ELOOP, a directory EISDIR), kCorrupt when the file ends early.
    void read(const std::string& path, std::uint64_t offset, std::size_t bytes, std::byte* to);

    // Closes `path` (once no thread reads it) and drops its cached pages. The next read goes to the
    // drive, or to the file that has replaced it.
    void forget(const std::string& path);

    // Closes all files that no thread reads. A later read opens its file again.
    void close();

    bool direct() const noexcept { return options_.direct; }  // as requested
    std::uint64_t direct_refusals() const noexcept { return refusals_; }
    std::size_t open_files() const;  // in the cache; each read in progress may hold one more

  private:
    struct Descriptor;
    using DescriptorPtr = std::shared_ptr<Descriptor>;
    struct Entry {
        std::string path;
        DescriptorPtr file;
        std::uint64_t used;  // grows with each use of any reader's file
    };
    class OpenFiles;

    int try_open(const std::string& path, int extra_flags);
    DescriptorPtr open(const std::string& path, bool direct);
    DescriptorPtr acquire(const std::string& path);
    DescriptorPtr keep(const std::string& path, DescriptorPtr file);
    int pread_until(const Descriptor& file, std::byte* to, std::size_t bytes, std::uint64_t offset,
                    std::size_t& got) const;

    const FileOptions options_;
    std::atomic<std::uint64_t> refusals_{0};
    std::list<Entry> recent_;
    std::unordered_map<std::string_view, std::list<Entry>::iterator> by_path_;
};

}  // namespace moeinf
