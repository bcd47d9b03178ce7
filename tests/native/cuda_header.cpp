// Compiles only if our declarations of the driver's calls match NVIDIA's cuda.h. Handles and result
// codes have their own types there, so the check compares how an argument is passed.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "device/cuda_calls.h"

using namespace moeinf;

template <class T>
constexpr bool handle =
    std::is_same_v<T, CUctx_st> || std::is_same_v<T, CUstream_st> || std::is_same_v<T, CUevent_st>;

// Types behind a pointer must match as well; our handles are void*.
template <class Ours, class Theirs>
constexpr bool alike =
    sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;
template <class Ours, class Theirs>
constexpr bool alike<Ours*, Theirs*> = [] {
    if constexpr (std::is_void_v<Ours>)
        return std::is_const_v<Ours> == std::is_const_v<Theirs> &&
               (std::is_void_v<Theirs> || handle<Theirs>);
    else if constexpr (std::is_void_v<Theirs> || handle<Theirs>)
        return false;
    else
        return std::is_const_v<Ours> == std::is_const_v<Theirs> && alike<Ours, Theirs>;
}();

template <class Ours, class Theirs>
constexpr bool same = false;
template <class... Ours, class... Theirs>
constexpr bool same<int (*)(Ours...), CUresult (*)(Theirs...)> = [] {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs))
        return (alike<Ours, Theirs> && ...);
    else
        return false;
}();

#define CHECK(member, name, ...) \
    static_assert(same<decltype(cuda::Calls::member), decltype(&name)>, #name);
MOEINF_CUDA_CALLS(CHECK)
#if CUDA_VERSION >= 13000
MOEINF_CUDA_BATCH_V2(CHECK)
#else
MOEINF_CUDA_BATCH(CHECK)
#endif

static_assert(sizeof(CUresult) == sizeof(int));
static_assert(cuda::kSuccess == CUDA_SUCCESS);
static_assert(cuda::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(cuda::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cuda::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(cuda::kNonBlockingStream == CU_STREAM_NON_BLOCKING);
static_assert(cuda::kSleepingEvent == (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));
static_assert(cuda::kPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(cuda::kSourceInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);

static_assert(sizeof(cuda::CopyAttributes) == sizeof(CUmemcpyAttributes));
#define CHECK_FIELD(ours, theirs) \
    static_assert(offsetof(cuda::CopyAttributes, ours) == offsetof(CUmemcpyAttributes, theirs));
CHECK_FIELD(source_order, srcAccessOrder)
CHECK_FIELD(source_hint, srcLocHint)
CHECK_FIELD(target_hint, dstLocHint)
CHECK_FIELD(flags, flags)
static_assert(sizeof(cuda::Location) == sizeof(CUmemLocation));
static_assert(offsetof(cuda::Location, id) == offsetof(CUmemLocation, id));
