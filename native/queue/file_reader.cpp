// Opens, caches and reads files, and handles every kind of short read.
#include "queue/file_reader.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

namespace moeinf {
namespace {

constexpr std::size_t kLeastOpenFiles = 16, kMostOpenFiles = 4096;

[[noreturn]] void fail_io(int code, const std::string& path, const std::string& what) {
    throw Failed(Failure::Kind::kIo, code, path,
                 what + ": " + std::generic_category().message(code));
}

std::string range(std::size_t bytes, std::uint64_t offset) {
    return std::to_string(bytes) + " bytes at offset " + std::to_string(offset);
}

}  // namespace

struct FileReader::Descriptor {
    int number = -1;
    bool direct = false;

    Descriptor() = default;
    ~Descriptor() {
        if (number >= 0) platform::close_file(number);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
};

// All readers of the process. Every member is used under the mutex.
class FileReader::OpenFiles {
  public:
    std::mutex mutex;
    std::uint64_t uses = 0;

    // Never destroyed: a reader may return from the kernel while the process exits.
    static OpenFiles& all() {
        static auto* const files = new OpenFiles;
        return *files;
    }

    void enter(FileReader* reader) { readers_.push_back(reader); }

    void leave(FileReader* reader) {
        drop(*reader);
        std::erase(readers_, reader);
    }

    // Closes the file that was used least recently, of any reader.
    void evict_oldest() {
        FileReader* oldest = nullptr;
        for (FileReader* one : readers_)
            if (!one->recent_.empty() &&
                (oldest == nullptr || one->recent_.back().used < oldest->recent_.back().used))
                oldest = one;
        if (oldest != nullptr) evict(*oldest);
    }

    void evict(FileReader& reader) {
        reader.by_path_.erase(reader.recent_.back().path);
        reader.recent_.pop_back();
        --count_;
    }

    void drop(FileReader& reader) {
        while (!reader.recent_.empty()) evict(reader);
    }

    void drop_all() {
        for (FileReader* one : readers_) drop(*one);
    }

    // Counts a new file, and closes others until all are within their bounds.
    void admitted(FileReader& reader) {
        ++count_;
        if (reader.recent_.size() > reader.options_.max_open_files) evict(reader);
        for (const std::size_t most = most_open_files(); count_ > most;) evict_oldest();
    }

    void left() { --count_; }

  private:
    std::vector<FileReader*> readers_;
    std::size_t count_ = 0;
};

std::size_t most_open_files() noexcept {
    return std::clamp<std::size_t>(platform::descriptor_limit() / 4, kLeastOpenFiles,
                                   kMostOpenFiles);
}

FileReader::FileReader(FileOptions options) : options_(options) {
    if (options.max_open_files == 0)
        throw std::invalid_argument("max_open_files must be at least 1");
    if (options.block_bytes == 0 || options.block_bytes > kMaxBlockBytes ||
        options.block_bytes % kPageBytes != 0)
        throw std::invalid_argument("block_bytes must be a multiple of " +
                                    std::to_string(kPageBytes) + " up to " +
                                    std::to_string(kMaxBlockBytes));
    OpenFiles& all = OpenFiles::all();
    const std::lock_guard lock(all.mutex);
    all.enter(this);
}

FileReader::~FileReader() {
    OpenFiles& all = OpenFiles::all();
    const std::lock_guard lock(all.mutex);
    all.leave(this);
}

void FileReader::close() {
    OpenFiles& all = OpenFiles::all();
    const std::lock_guard lock(all.mutex);
    all.drop(*this);
}

// Returns the descriptor number, or -1 with errno. When out of descriptors, drops the cached ones of
// all readers and tries again, once.
int FileReader::try_open(const std::string& path, int extra_flags) {
    bool gave_back = false;
    for (;;) {
        const int number = options_.calls.open(path.c_str(), platform::kOpenFlags | extra_flags);
        if (number >= 0) return number;
        const int code = errno;
        if (code == EINTR) continue;
        if ((code != EMFILE && code != ENFILE) || gave_back) {
            errno = code;
            return -1;
        }
        gave_back = true;
        OpenFiles& all = OpenFiles::all();
        const std::lock_guard lock(all.mutex);
        all.drop_all();
    }
}

FileReader::DescriptorPtr FileReader::open(const std::string& path, bool direct) {
    auto file = std::make_shared<Descriptor>();  // before the open: no number can leak
    file->number = try_open(path, direct ? platform::kDirectFlag : 0);
    const bool refused = direct && file->number < 0 && errno == EINVAL;
    if (refused) file->number = try_open(path, 0);
    file->direct = direct && !refused;
    if (file->number < 0) fail_io(errno, path, "cannot open");
    struct stat status{};
    if (fstat(file->number, &status) != 0) fail_io(errno, path, "cannot stat");
    if (S_ISDIR(status.st_mode)) fail_io(EISDIR, path, "cannot read");
    if (!S_ISREG(status.st_mode)) fail_io(EINVAL, path, "not a regular file");
    if (file->direct) platform::skip_page_cache(file->number);
    if (refused) ++refusals_;
    return file;
}

FileReader::DescriptorPtr FileReader::acquire(const std::string& path) {
    {
        OpenFiles& all = OpenFiles::all();
        const std::lock_guard lock(all.mutex);
        if (const auto found = by_path_.find(path); found != by_path_.end()) {
            recent_.splice(recent_.begin(), recent_, found->second);
            found->second->used = ++all.uses;
            return found->second->file;
        }
    }
    return keep(path, open(path, options_.direct));  // may wait on the drive: not under the mutex
}

// Caches a descriptor and evicts the least recently used ones beyond the bounds. Returns the
// descriptor of another thread if that one was first.
FileReader::DescriptorPtr FileReader::keep(const std::string& path, DescriptorPtr file) {
    OpenFiles& all = OpenFiles::all();
    const std::lock_guard lock(all.mutex);
    if (const auto found = by_path_.find(path); found != by_path_.end()) {
        return found->second->file;  // another thread opened it first; this one closes
    }
    recent_.push_front({path, file, ++all.uses});
    by_path_.emplace(recent_.front().path, recent_.begin());
    all.admitted(*this);
    return file;
}

void FileReader::forget(const std::string& path) {
    DescriptorPtr file;
    {
        OpenFiles& all = OpenFiles::all();
        const std::lock_guard lock(all.mutex);
        const auto found = by_path_.find(path);
        if (found == by_path_.end()) return;
        const auto node = found->second;
        file = std::move(node->file);
        by_path_.erase(found);  // before its key's node
        recent_.erase(node);
        all.left();
    }
    platform::drop_pages(file->number);
}

std::size_t FileReader::open_files() const {
    const std::lock_guard lock(OpenFiles::all().mutex);
    return recent_.size();
}

// Continues from `got` until `bytes` or the end of the file. A direct read also stops at a count
// that is not page-aligned, because no aligned read can follow it. Returns 0, or the errno of the
// failed call.
int FileReader::pread_until(const Descriptor& file, std::byte* to, std::size_t bytes,
                            std::uint64_t offset, std::size_t& got) const {
    int retries = 0;
    while (got < bytes) {
        const std::ptrdiff_t count =
            options_.calls.pread(file.number, to + got, std::min(bytes - got, options_.block_bytes),
                         static_cast<std::int64_t>(offset + got));
        if (count == 0) return 0;
        if (count < 0) {
            const int code = errno;
            if (code == EINTR || (code == EIO && retries++ < kEioRetries)) continue;
            return code;
        }
        got += static_cast<std::size_t>(count);
        if (file.direct && got % kPageBytes != 0) return 0;
    }
    return 0;
}

void FileReader::read(const std::string& path, std::uint64_t offset, std::size_t bytes,
                      std::byte* to) {
    assert(offset % kPageBytes == 0);
    assert(reinterpret_cast<std::uintptr_t>(to) % kPageBytes == 0);
    DescriptorPtr file = acquire(path);
    std::size_t got = 0;
    int code = 0;
    if (file->direct) {
        code = pread_until(*file, to, round_up_to_page(bytes), offset, got);
        if (code != 0 && code != EINVAL) fail_io(code, path, "cannot read " + range(bytes, offset));
        if (got >= bytes) return;
        file = open(path, false);
        if (code == EINVAL) {
            ++refusals_;
            forget(path);
            keep(path, file);
        }
    }
    code = pread_until(*file, to, bytes, offset, got);
    if (code != 0) fail_io(code, path, "cannot read " + range(bytes, offset));
    if (got < bytes) {
        throw Failed(Failure::Kind::kCorrupt, ENODATA, path,
                     "truncated: wanted " + range(bytes, offset) + ", got " + std::to_string(got));
    }
}

}  // namespace moeinf
