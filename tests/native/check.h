// CHECK for the C++ drivers: unlike assert it is there in every build, and it names the line.
// Does not know what is tested.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            std::fprintf(stderr, "line %d: not true: %s\n", __LINE__, #condition); \
            std::abort();                                                          \
        }                                                                          \
    } while (false)
