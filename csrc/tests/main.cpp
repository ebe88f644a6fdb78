// The tests of what has no Python above it yet, or needs a sanitizer below it. Usage: host_tests [seed]

#include <cstdio>
#include <cstdlib>
#include <random>

#include "check.hpp"

namespace zenflow::test {

void test_convert(unsigned seed);
void test_kernel(unsigned seed);
void test_pool(unsigned seed);
void test_team(unsigned seed);

}  // namespace zenflow::test

int main(int argc, char** argv) {
    using namespace zenflow::test;
    const unsigned seed = argc > 1 ? static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10)) : std::random_device{}();
    std::printf("seed %u\n", seed);
    test_convert(seed);
    test_kernel(seed);
    test_pool(seed);
    test_team(seed);
    if (failures > 0) std::fprintf(stderr, "%d checks failed\n", failures);
    return failures == 0 ? 0 : 1;
}
