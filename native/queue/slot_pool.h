// The arena of equal slots in host memory that experts are read into.
//
// base() (2 MiB aligned)                                            base() + bytes()
// |<------ slot 0 ------>|<------ slot 1 ------>| ... |<-- slot n-1 -->|
// | expert | unspecified |
// |<---- slot_bytes(): a multiple of kPageBytes ->|
//
// Equal slots: no fragmentation, and evicting an expert moves a number, never bytes.
//
// Writers: a reader thread, between taking a ticket and ending it; afterwards only Python, through
// a view. The pool does not arbitrate. The copy queue refuses two live tickets on one slot, and the
// store pins a slot while a computation reads it.
//
// Lifetime: the mapping lives from the constructor to the destructor, at one address. Python views
// (buffer protocol) and every CopyQueue hold a reference to the pool, so neither can outlive it.
//
// Memory: the system allocates pages on first touch, zeroed. The mapping is exactly bytes() long,
// and a huge page never exceeds a mapping, so resident memory never exceeds bytes(). Huge pages are
// advised for kHugeAdviceBytes or more. In a smaller arena they gain nothing, and one touched byte
// would cost 2 MiB. An arena may have more slots than are used: they cost addresses only.
//
// ArenaCalls supplies the memory. host_lock.h page-locks it if there is a GPU.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string>

#include "queue/pages.h"

namespace moeinf {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
inline constexpr std::size_t kHugeAdviceBytes = 2 * kHugePageBytes;
static_assert(kHugePageBytes % kPageBytes == 0, "an arena on a huge page is on a page");

// std::bad_alloc (MemoryError in Python) whose message gives the number of bytes requested.
class ArenaError : public std::bad_alloc {
  public:
    explicit ArenaError(std::string message)
        : message_(std::make_shared<const std::string>(std::move(message))) {}
    const char* what() const noexcept override { return message_->c_str(); }

  private:
    std::shared_ptr<const std::string> message_;  // shared: copying an exception must not throw
};

// The system calls that map and unmap an arena's memory, like mmap and munmap.
struct ArenaCalls {
    void* (*map)(std::size_t bytes) = nullptr;  // null: anonymous memory, or null and errno
    int (*unmap)(void* base, std::size_t bytes) = nullptr;  // of any page-aligned part
};

class SlotPool {
  public:
    // Rounds slot_bytes up to kPageBytes. Throws std::invalid_argument when either is 0, ArenaError
    // when the product overflows or the system cannot map it.
    SlotPool(std::size_t slots, std::size_t slot_bytes, ArenaCalls calls = {});
    ~SlotPool();
    SlotPool(const SlotPool&) = delete;
    SlotPool& operator=(const SlotPool&) = delete;

    std::byte* base() const noexcept { return base_; }
    std::size_t slots() const noexcept { return slots_; }
    std::size_t slot_bytes() const noexcept { return slot_bytes_; }
    std::size_t bytes() const noexcept { return slots_ * slot_bytes_; }

    // Gives the memory of a slot back to the system; the slot is zeroed, and may be used again.
    // Nothing may write to it meanwhile. Throws std::out_of_range.
    void release(std::size_t slot);

    // The same for all slots.
    void release_all();

  private:
    ArenaCalls calls_;
    std::byte* base_ = nullptr;
    std::size_t slots_;
    std::size_t slot_bytes_;
};

}  // namespace moeinf
