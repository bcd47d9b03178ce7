// Anonymous memory as the operating system maps it. The only place that names mmap or madvise.
//
// macOS and Windows: compiled, not run.
#pragma once

#include <cerrno>
#include <cstddef>

#ifdef _WIN32
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace moeinf::platform {

#ifdef _WIN32

// Returns zeroed memory, or null with errno.
inline void* map_memory(std::size_t bytes) {
    void* const base = ::VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (base == nullptr) errno = ENOMEM;
    return base;
}

// Any page-aligned part. Windows keeps its addresses reserved: only whole mappings can be freed.
inline int unmap_memory(void* base, std::size_t bytes) {
    return ::VirtualFree(base, bytes, MEM_DECOMMIT) ? 0 : -1;
}

inline void advise_huge_pages(void*, std::size_t, bool) {}

// Gives memory back to the system. It stays usable, and is zeroed.
inline void give_back(void* base, std::size_t bytes) {
    ::VirtualFree(base, bytes, MEM_DECOMMIT);
    ::VirtualAlloc(base, bytes, MEM_COMMIT, PAGE_READWRITE);
}

inline std::size_t page_bytes() {
    SYSTEM_INFO about;
    ::GetSystemInfo(&about);
    return about.dwPageSize;
}

#else

// Returns zeroed memory, or null with errno. No MAP_NORESERVE: memory beyond RAM + swap must fail
// here, not be killed when touched.
inline void* map_memory(std::size_t bytes) {
    void* const base =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return base == MAP_FAILED ? nullptr : base;
}

inline int unmap_memory(void* base, std::size_t bytes) { return ::munmap(base, bytes); }

// Advice: the system may refuse it.
inline void advise_huge_pages([[maybe_unused]] void* base, [[maybe_unused]] std::size_t bytes,
                              [[maybe_unused]] bool wanted) {
#ifdef MADV_HUGEPAGE
    ::madvise(base, bytes, wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
}

// Gives memory back to the system. It stays usable, and is zeroed.
inline void give_back(void* base, std::size_t bytes) {
#ifdef __linux__
    ::madvise(base, bytes, MADV_DONTNEED);  // cannot fail on our pages
#else
    ::mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#endif
}

inline std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

#endif

}  // namespace moeinf::platform
