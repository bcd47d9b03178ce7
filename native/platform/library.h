// Shared libraries opened at run time. macOS and Windows: compiled, not run.
#pragma once

#include <string>

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace moeinf::platform {

#ifdef _WIN32

// Returns null when the system cannot open it; then `why` has the reason.
inline void* open_library(const std::string& name, std::string& why) {
    void* const library = reinterpret_cast<void*>(::LoadLibraryA(name.c_str()));
    if (library == nullptr)
        why = name + " cannot be opened (error " + std::to_string(::GetLastError()) + ")";
    return library;
}

inline void* find_symbol(void* library, const char* name) {
    return reinterpret_cast<void*>(::GetProcAddress(static_cast<HMODULE>(library), name));
}

#else

// Returns null when the system cannot open it; then `why` has the reason.
inline void* open_library(const std::string& name, std::string& why) {
    void* const library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* const said = ::dlerror();
        why = said != nullptr ? said : name + " cannot be opened";
    }
    return library;
}

inline void* find_symbol(void* library, const char* name) { return ::dlsym(library, name); }

#endif

}  // namespace moeinf::platform
