// Files as the operating system reads them. The only place that names O_DIRECT or its like.
//
// Failures are -1 with errno, as in POSIX. macOS and Windows: compiled, not run.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

#ifdef _WIN32
#include <io.h>
#include <windows.h>
#else
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace moeinf::platform {

#ifdef _WIN32

inline constexpr int kOpenFlags = _O_RDONLY | _O_BINARY | _O_NOINHERIT;
inline constexpr int kDirectFlag = 0;  // FILE_FLAG_NO_BUFFERING needs CreateFile: not used yet

inline int open_file(const char* path, int flags) { return ::_open(path, flags); }

inline void close_file(int file) { ::_close(file); }

inline void skip_page_cache(int) {}

inline void drop_pages(int) {}

inline std::ptrdiff_t read_at(int file, void* to, std::size_t bytes, std::int64_t offset) {
    OVERLAPPED where{};
    where.Offset = static_cast<DWORD>(offset);
    where.OffsetHigh = static_cast<DWORD>(offset >> 32);
    DWORD got = 0;
    const auto handle = reinterpret_cast<HANDLE>(::_get_osfhandle(file));
    if (::ReadFile(handle, to, static_cast<DWORD>(bytes), &got, &where)) return got;
    if (::GetLastError() == ERROR_HANDLE_EOF) return 0;
    errno = EIO;
    return -1;
}

inline int sync_file_system(int file) { return ::_commit(file); }

inline std::size_t descriptor_limit() { return 1024; }

#else

// O_NONBLOCK: opening a FIFO in the model's folder must not block a reader thread. It has no effect
// on regular files.
inline constexpr int kOpenFlags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
#ifdef O_DIRECT
inline constexpr int kDirectFlag = O_DIRECT;
#else
inline constexpr int kDirectFlag = 0;
#endif

inline int open_file(const char* path, int flags) { return ::open(path, flags); }

inline void close_file(int file) { ::close(file); }

// Where no flag of open() does it: macOS reads past its page cache after this call.
inline void skip_page_cache([[maybe_unused]] int file) {
#ifdef F_NOCACHE
    ::fcntl(file, F_NOCACHE, 1);  // advice: failing costs nothing
#endif
}

inline void drop_pages([[maybe_unused]] int file) {
#ifdef POSIX_FADV_DONTNEED
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);  // advice: failing costs nothing
#endif
}

inline std::ptrdiff_t read_at(int file, void* to, std::size_t bytes, std::int64_t offset) {
    return ::pread(file, to, bytes, offset);
}

// Writes the file system's data to its drive; only the file's where the system cannot do more.
inline int sync_file_system(int file) {
#ifdef __linux__
    return ::syncfs(file);
#else
    return ::fsync(file);
#endif
}

// The most descriptors that this process may have open now: the soft limit.
inline std::size_t descriptor_limit() {
    rlimit limit{};
    return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<std::size_t>(limit.rlim_cur) : 256;
}

#endif

}  // namespace moeinf::platform
