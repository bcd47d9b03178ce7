// CHECK for the C++ drivers: unlike assert it is there in every build, and it names the line.
// Does not know what is tested. on_failure, when set, says more: a seed, a schedule.
#pragma once

#include <cstdio>
#include <cstdlib>

inline void (*on_failure)() = nullptr;

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            std::fprintf(stderr, "line %d: not true: %s\n", __LINE__, #condition); \
            if (on_failure != nullptr) on_failure();                               \
            std::abort();                                                          \
        }                                                                          \
    } while (false)
