// The pool: order, shares, failures, lost and late threads, closing.

#include "../pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

namespace zenflow::test {
namespace {

constexpr double kSoon = 30.0;  // seconds; a hang, on however busy a machine

class Calls : public Work {
public:
    Calls(
        std::size_t size, std::size_t grain, std::function<void(std::size_t, std::size_t)> run,
        std::function<void()> finish = [] {})
        : size_(size), grain_(grain), run_(std::move(run)), finish_(std::move(finish)) {}
    std::size_t size() const override { return size_; }
    std::size_t grain() const override { return grain_; }
    void run(std::size_t begin, std::size_t end) override { run_(begin, end); }
    void finish() override { finish_(); }

private:
    std::size_t size_, grain_;
    std::function<void(std::size_t, std::size_t)> run_;
    std::function<void()> finish_;
};

std::unique_ptr<Work> calls(std::size_t size, std::size_t grain, std::function<void(std::size_t, std::size_t)> run) {
    return std::make_unique<Calls>(size, grain, std::move(run));
}

std::unique_ptr<Work> nothing() {
    return calls(1, 1, [](auto, auto) {});
}

std::vector<int> anywhere(std::size_t threads) {
    return std::vector<int>(threads, -1);
}

std::string error_of(Pool& pool, Pool::Ticket ticket) {
    try {
        return pool.wait(ticket, kSoon) ? "" : "still running";
    } catch (const std::runtime_error& error) {
        return error.what();
    }
}

void test_shares(std::mt19937& random) {
    for (int i = 0; i < 500; ++i) {
        const std::size_t size = random() % 5000, threads = 1 + random() % 17;
        std::size_t at = 0;
        for (std::size_t t = 0; t < threads; ++t) {
            const Share share = share_of(size, threads, t);
            CHECK(share.begin == at && share.end >= share.begin);
            CHECK(share.begin % kShareUnits == 0 || share.begin == size);
            at = share.end;
        }
        CHECK(at == size);
    }
}

// Every unit exactly once; a task begins when the one before it is over; finish comes last.
void test_every_unit_once_and_in_order(std::mt19937& random) {
    for (const std::size_t threads : {1u, 2u, 8u}) {
        Pool pool(anywhere(threads));
        std::vector<std::vector<std::atomic<int>>> seen;
        for (int task = 0; task < 60; ++task) seen.emplace_back(random() % 3000);
        std::atomic<int> over{0}, wrong{0};
        std::vector<Pool::Ticket> tickets;
        for (int task = 0; task < 60; ++task) {
            auto& units = seen[static_cast<std::size_t>(task)];
            const auto run = [&units, &over, &wrong, task](std::size_t begin, std::size_t end) {
                wrong += over != task;
                for (std::size_t i = begin; i < end; ++i) ++units[i];
            };
            const auto finish = [&units, &over, &wrong] {
                wrong += !std::all_of(units.begin(), units.end(), [](const auto& times) { return times == 1; });
                ++over;
            };
            tickets.push_back(pool.submit(std::make_unique<Calls>(units.size(), 1 + random() % 200, run, finish)));
        }
        double last = 0.0;
        for (const auto ticket : tickets) {
            const auto span = pool.wait(ticket, kSoon);
            CHECK(span && span->begin_s >= last && span->end_s >= span->begin_s);
            if (span) last = span->end_s;
        }
        CHECK(over == 60);
        CHECK(wrong == 0);
    }
}

// One thread that is held up must not hold up the others' share of its work.
void test_others_take_over_from_a_late_thread() {
    Pool pool(anywhere(2));
    pool.faults().arm(Faults::Kind::delay, 0, 0.3, 0);
    std::atomic<std::size_t> units{0};
    const auto ticket =
        pool.submit(calls(1 << 14, 32, [&](std::size_t begin, std::size_t end) { units += end - begin; }));
    CHECK(pool.wait(ticket, kSoon).has_value());
    CHECK(units == 1 << 14);
}

void test_a_failure_ends_everything_behind_it() {
    Pool pool(anywhere(3));
    std::atomic<int> ran{0};
    const auto good = pool.submit(calls(100, 10, [&](auto, auto) { ++ran; }));
    std::atomic<bool> queued{false};  // a pool that has failed takes nothing more
    const auto bad = pool.submit(calls(100, 10, [&](auto, auto) {
        queued.wait(false);
        throw std::runtime_error("a bad day");
    }));
    const auto behind = pool.submit(calls(100, 10, [&](auto, auto) { ran += 1000; }));
    queued = true;
    queued.notify_all();
    CHECK(error_of(pool, good).empty());
    CHECK(error_of(pool, bad) == "a bad day");
    CHECK(error_of(pool, behind) == "a bad day");
    CHECK(ran < 1000);
    try {
        pool.submit(nothing());
        CHECK(!"submitting after a failure throws");
    } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()) == "a bad day");
    }
    CHECK(pool.alive());  // its threads are well
}

void test_a_failure_in_finish() {
    Pool pool(anywhere(2));
    const auto fail = [] { throw std::runtime_error("at the end"); };
    const auto ticket = pool.submit(std::make_unique<Calls>(10, 1, [](auto, auto) {}, fail));
    CHECK(error_of(pool, ticket) == "at the end");
}

void test_a_lost_thread_is_an_error_at_once() {
    for (const std::uint64_t pieces : {0u, 3u, 9u}) {
        Pool pool(anywhere(4));
        pool.faults().arm(Faults::Kind::die, pieces, 0.0, 0);
        const auto ticket = pool.submit(calls(1000, 32, [](auto, auto) {}));
        CHECK(error_of(pool, ticket) == "a thread of the host engine is gone");
        CHECK(!pool.alive());
        pool.close();
    }
}

// A thread that is held up for long must not keep another's failure, or closing, from being told.
void test_delays_end_with_a_failure_and_with_closing() {
    const auto begin = std::chrono::steady_clock::now();
    {
        Pool pool(anywhere(2));
        pool.faults().arm(Faults::Kind::delay, 0, 600.0, 0);
        const auto ticket = pool.submit(calls(64, 32, [](auto, auto) { throw std::runtime_error("a bad day"); }));
        CHECK(error_of(pool, ticket) == "a bad day");
    }
    {
        Pool pool(anywhere(2));
        pool.faults().arm(Faults::Kind::delay, 0, 600.0, 0);
        std::vector<Pool::Ticket> tickets;
        for (int i = 0; i < 20; ++i) tickets.push_back(pool.submit(calls(64, 32, [](auto, auto) {})));
        CHECK(!pool.wait(tickets.front(), 0.01).has_value());
        pool.close();
        CHECK(error_of(pool, tickets.front()).empty());  // it was being done
        for (std::size_t i = 1; i < tickets.size(); ++i) {
            CHECK(error_of(pool, tickets[i]) == "the host engine was closed");
        }
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    CHECK(took.count() < kSoon);
}

void test_waits() {
    Pool pool(anywhere(1));
    for (const Pool::Ticket unknown : {Pool::Ticket{0}, Pool::Ticket{7}}) {
        bool refused = false;
        try {
            pool.wait(unknown, 0.0);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused);
    }
    const auto ticket = pool.submit(calls(0, 1, [](auto, auto) {}));  // nothing to do is done too
    CHECK(pool.wait(ticket, kSoon).has_value());
    CHECK(!pool.poll(ticket));  // forgotten
    bool refused = false;
    try {
        Pool none({});
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
}

// Many threads submit, wait, poll and at last stop, under random delays.
void test_stress(std::mt19937& random) {
    for (int round = 0; round < 6; ++round) {
        Pool pool(anywhere(1 + random() % 8));
        pool.faults().arm(Faults::Kind::jitter, 0, 1e-4, random());
        std::atomic<std::size_t> done{0};
        std::vector<std::thread> users;
        for (unsigned user = 0; user < 3; ++user) {
            users.emplace_back([&pool, &done, seed = random()] {
                std::mt19937 own(seed);
                try {
                    for (int i = 0; i < 40; ++i) {
                        const std::size_t size = own() % 500;
                        const auto ticket = pool.submit(
                            calls(size, 1 + own() % 64, [&done](std::size_t a, std::size_t b) { done += b - a; }));
                        while (own() % 2 && !pool.poll(ticket)) std::this_thread::yield();
                        if (own() % 4) error_of(pool, ticket);
                    }
                } catch (const std::runtime_error&) {
                    // it was stopped
                }
            });
        }
        if (round % 2) pool.stop();
        for (auto& user : users) user.join();
        pool.close();
        pool.close();
    }
}

}  // namespace

void test_pool(unsigned seed) {
    std::mt19937 random(seed);
    context = "pool";
    test_shares(random);
    test_every_unit_once_and_in_order(random);
    test_others_take_over_from_a_late_thread();
    test_a_failure_ends_everything_behind_it();
    test_a_failure_in_finish();
    test_a_lost_thread_is_an_error_at_once();
    test_delays_end_with_a_failure_and_with_closing();
    test_waits();
    test_stress(random);
}

}  // namespace zenflow::test
