// The reason why a read failed: plain data, made once in a reader thread, thrown in every waiter.
// Does not know of Python; bindings/module.cpp turns a Failure into an exception.
//
// Failure::Kind   in Python
//   kIo           OSError; its errno picks FileNotFoundError, PermissionError, ...
//   kCorrupt      moeinf.native.CorruptShard(OSError): truncated, or the checksum differs
//   kCancelled    moeinf.native.Cancelled(RuntimeError): cancel() or close() came first
//   kInternal     RuntimeError: a bug, or out of memory, inside a reader thread
//
// The data is shared and const, not a std::exception_ptr. Copying it cannot throw, any number of
// waiters may read it at once, and ThreadSanitizer can see its reference count.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace moeinf {

struct Failure {
    enum class Kind { kIo, kCorrupt, kCancelled, kInternal };
    Kind kind;
    int code;             // errno of kIo and kCorrupt, else 0
    std::string path;     // empty unless kIo or kCorrupt
    std::string message;  // without the path
};
using FailurePtr = std::shared_ptr<const Failure>;  // null: no failure

class Failed : public std::runtime_error {
  public:
    explicit Failed(FailurePtr failure)
        : std::runtime_error(failure->path.empty() ? failure->message
                                                   : failure->path + ": " + failure->message),
          failure_(std::move(failure)) {}
    Failed(Failure::Kind kind, int code, std::string path, std::string message)
        : Failed(std::make_shared<const Failure>(
              Failure{kind, code, std::move(path), std::move(message)})) {}

    const FailurePtr& failure() const noexcept { return failure_; }

  private:
    FailurePtr failure_;
};
static_assert(std::is_nothrow_copy_constructible_v<FailurePtr>, "a reader thread must not throw");

}  // namespace moeinf
