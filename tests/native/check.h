// CHECK for the C++ drivers: unlike assert it exists in every build, and it prints the line.
// on_failure, when set, prints more: a seed, a schedule.
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
