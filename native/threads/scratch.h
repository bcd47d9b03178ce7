// Memory of a thread for one call, kept for its next call.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace moeinf {

// One buffer that grows, aligned to a cache line. Use it as a thread_local: take() invalidates the
// memory taken before.
class Scratch {
  public:
    // Returns at least `bytes` bytes. Throws std::bad_alloc; then the buffer is empty.
    std::byte* take(std::size_t bytes) {
        if (bytes > size_) {
            data_.reset();
            size_ = 0;
            data_.reset(static_cast<std::byte*>(::operator new(bytes, kLine)));
            size_ = bytes;
        }
        return data_.get();
    }

  private:
    static constexpr std::align_val_t kLine{64};
    struct Free {
        void operator()(std::byte* data) const noexcept { ::operator delete(data, kLine); }
    };
    std::unique_ptr<std::byte, Free> data_;
    std::size_t size_ = 0;
};

}  // namespace moeinf
