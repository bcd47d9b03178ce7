// Included before every native source (-include): hides the processor features that
// MOEINF_FAKE_FLAGS does not name. The kernels then take the path of a smaller machine.
#pragma once
#include <cstdlib>
#include <cstring>

namespace moeinf_fake {
inline bool has(const char* flag) {
    const char* kept = std::getenv("MOEINF_FAKE_FLAGS");
    if (kept == nullptr) return true;
    const std::size_t length = std::strlen(flag);
    for (const char* at = kept; (at = std::strstr(at, flag)) != nullptr; at += length) {
        const bool begins = at == kept || at[-1] == ' ';
        if (begins && (at[length] == ' ' || at[length] == '\0')) return true;
    }
    return false;
}
}  // namespace moeinf_fake

#define __builtin_cpu_supports(flag) (moeinf_fake::has(flag) && (__builtin_cpu_supports)(flag))
