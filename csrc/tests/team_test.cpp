// The team: every piece once, with any number of threads and callers, before and after its end.

#include "../team.hpp"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

namespace zenflow::test {
namespace {

bool every_piece_once(Team& team, std::size_t threads, std::size_t pieces) {
    std::vector<std::atomic<int>> times(pieces);
    team.run(threads, pieces, [&](std::size_t piece) { ++times[piece]; });
    return std::all_of(times.begin(), times.end(), [](const auto& n) { return n == 1; });
}

void test_sizes(Team& team, std::mt19937& random) {
    for (const std::size_t threads : {0u, 1u, 2u, 3u, 9u, 2u}) {
        for (const std::size_t pieces : {0u, 1u, 2u, 7u, 1000u}) CHECK(every_piece_once(team, threads, pieces));
        for (int i = 0; i < 50; ++i) CHECK(every_piece_once(team, threads, random() % 40));
    }
}

// Whoever comes while another's loop runs does it alone, and neither waits for the other.
void test_callers_at_once(Team& team) {
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&] {
            for (std::size_t i = 0; i < 100; ++i) wrong += !every_piece_once(team, 3, i);
        });
    }
    for (auto& caller : callers) caller.join();
    CHECK(wrong == 0);
}

void test_rounding_is_the_callers_again(Team& team) {
    std::fesetround(FE_UPWARD);
    std::atomic<int> others{0};
    team.run(3, 100, [&](std::size_t) { others += std::fegetround() != FE_TONEAREST; });
    CHECK(others == 0);
    CHECK(std::fegetround() == FE_UPWARD);
    std::fesetround(FE_TONEAREST);
}

}  // namespace

void test_team(unsigned seed) {
    std::mt19937 random(seed);
    context = "team";
    Team& team = Team::of_process();
    CHECK(&team == &Team::of_process());
    test_sizes(team, random);
    test_callers_at_once(team);
    test_rounding_is_the_callers_again(team);
    team.end();
    team.end();
    test_sizes(team, random);
}

}  // namespace zenflow::test
