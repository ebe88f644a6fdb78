// CHECK(condition): counts what does not hold and prints the first of it.
#pragma once

#include <cstdio>
#include <string>

namespace zenflow::test {

inline int failures = 0;
inline std::string context;  // what a test is at; printed with a failure

inline void check(bool holds, const char* condition, const char* file, int line) {
    constexpr int printed = 20;
    if (holds || ++failures > printed) return;
    std::fprintf(stderr, "%s:%d: %s does not hold (%s)\n", file, line, condition, context.c_str());
}

}  // namespace zenflow::test

#define CHECK(condition) ::zenflow::test::check((condition), #condition, __FILE__, __LINE__)
