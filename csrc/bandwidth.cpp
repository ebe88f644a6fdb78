// One pass of the probe moves what one host update of a window moves: it reads master, both moments and S logged
// gradients, and writes master, both moments and a 2-byte result. Instead of AdamW it rotates the three state words
// (master <- m <- v <- master) and stores a xor of everything read, so that no access can be left out. It walks through
// memory as the kernel does: it is to be that one's ceiling.

#include "bandwidth.hpp"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>

#include "blocks.hpp"
#include "clones.hpp"
#include "memory.hpp"
#include "thread.hpp"

namespace zenflow {
namespace {

constexpr std::size_t kPage = 4096;         // bytes
constexpr std::size_t kSkew = 5 * 64;       // bytes; equal page offsets of two streams would alias in the store buffer
constexpr std::size_t kStateBytes = 3 * 4;  // master and two moments
constexpr std::size_t kResultBytes = 2;

// The part of one thread: its own range of elements, in memory that it touches first.
struct Slice {
    std::size_t begin = 0;  // of all elements
    std::size_t count = 0;
    std::size_t update_interval = 0;
    std::uint32_t* state[3] = {};  // master, first moment, second moment
    std::byte* log = nullptr;      // S streams, log_stride bytes apart
    std::size_t log_stride = 0;
    std::uint16_t* result = nullptr;
    Pages memory;
};

std::size_t stream_bytes(std::size_t payload) {
    return (payload + kPage - 1) / kPage * kPage + kSkew;
}

Slice make_slice(const BandwidthPlan& plan, std::size_t thread) {
    const std::size_t threads = plan.cpus.size();
    const std::size_t share = plan.elements / threads;
    const std::size_t extra = plan.elements % threads;
    Slice slice;
    slice.begin = share * thread + std::min(thread, extra);
    slice.count = share + (thread < extra ? 1 : 0);
    slice.update_interval = plan.update_interval;
    slice.log_stride = stream_bytes(slice.count * plan.gradient_bytes);

    const std::size_t state_stride = stream_bytes(slice.count * 4);
    const std::size_t total =
        3 * state_stride + plan.update_interval * slice.log_stride + stream_bytes(slice.count * kResultBytes);
    slice.memory = map_pages(total);

    std::byte* next = slice.memory.get();
    for (auto& stream : slice.state) {
        stream = reinterpret_cast<std::uint32_t*>(next);
        next += state_stride;
    }
    slice.log = next;
    slice.result = reinterpret_cast<std::uint16_t*>(next + plan.update_interval * slice.log_stride);
    return slice;
}

// A word that depends on the element and the stream, cheap to write again in a test.
std::uint32_t pattern(std::size_t element, std::size_t stream) {
    const auto x = static_cast<std::uint32_t>(element) * 2654435761u + static_cast<std::uint32_t>(stream) * 2246822519u;
    return x ^ (x >> 15);
}

template <typename Gradient>
void fill(Slice& slice) {
    for (std::size_t stream = 0; stream < 3; ++stream) {
        for (std::size_t i = 0; i < slice.count; ++i) slice.state[stream][i] = pattern(slice.begin + i, stream);
    }
    for (std::size_t s = 0; s < slice.update_interval; ++s) {
        auto* gradient = reinterpret_cast<Gradient*>(slice.log + s * slice.log_stride);
        for (std::size_t i = 0; i < slice.count; ++i) {
            gradient[i] = static_cast<Gradient>(pattern(slice.begin + i, 3 + s));
        }
    }
    std::fill_n(slice.result, slice.count, std::uint16_t{0});
}

// Inlined into both functions below, so that each clone of them vectorises it for its own instruction set.
template <typename Gradient>
[[gnu::always_inline]] inline void pass(Slice& slice) {
    std::uint32_t logged[kBlock];
    for (std::size_t first = 0; first < slice.count; first += kBlock) {
        const std::size_t n = std::min(kBlock, slice.count - first);
        for (const std::uint32_t* stream : slice.state) fetch(stream + first);
        fetch(slice.result + first);
        for (std::size_t i = 0; i < n; ++i) logged[i] = 0;
        for (std::size_t s = 0; s < slice.update_interval; ++s) {
            const auto* gradient = reinterpret_cast<const Gradient*>(slice.log + s * slice.log_stride) + first;
            fetch(gradient);
            for (std::size_t i = 0; i < n; ++i) logged[i] ^= gradient[i];
        }
        std::uint32_t* master = slice.state[0] + first;
        std::uint32_t* m = slice.state[1] + first;
        std::uint32_t* v = slice.state[2] + first;
        std::uint16_t* result = slice.result + first;
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint32_t old_master = master[i];
            const std::uint32_t word = logged[i] ^ old_master;
            master[i] = m[i];
            m[i] = v[i];
            v[i] = old_master;
            result[i] = static_cast<std::uint16_t>(word ^ (word >> 16));
        }
    }
}

ZENFLOW_CLONES void pass_2_byte_gradients(Slice& slice) {
    pass<std::uint16_t>(slice);
}

ZENFLOW_CLONES void pass_4_byte_gradients(Slice& slice) {
    pass<std::uint32_t>(slice);
}

// Weighted with the element's number, so that a word in the wrong place shows.
std::uint64_t checksum(const Slice& slice) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < slice.count; ++i) {
        const std::uint64_t words =
            slice.state[0][i] + 3ull * slice.state[1][i] + 5ull * slice.state[2][i] + 7ull * slice.result[i];
        sum += words * (slice.begin + i + 1);
    }
    return sum;
}

// Threads that were started wait here until all are, or until one could not be.
class Gate {
public:
    void open(bool go) {
        state_.store(go ? kGo : kStop);
        state_.notify_all();
    }
    bool wait() {
        state_.wait(kClosed);
        return state_.load() == kGo;
    }

private:
    static constexpr int kClosed = 0, kGo = 1, kStop = 2;
    std::atomic<int> state_{kClosed};
};

void check(const BandwidthPlan& plan) {
    if (plan.elements == 0 || plan.update_interval == 0 || plan.repeats == 0 || plan.cpus.empty()) {
        throw std::invalid_argument("elements, update_interval, repeats and cpus must not be empty");
    }
    if (plan.gradient_bytes != 2 && plan.gradient_bytes != 4) {
        throw std::invalid_argument("gradient_bytes must be 2 or 4");
    }
    constexpr std::size_t limit = std::numeric_limits<std::size_t>::max() / 4;
    if (plan.update_interval > limit / (2 * kPage)) throw std::bad_alloc();
    const std::size_t bytes = kStateBytes + kResultBytes + plan.update_interval * plan.gradient_bytes;
    if (plan.elements > limit / bytes) throw std::bad_alloc();
}

}  // namespace

BandwidthResult measure_bandwidth(const BandwidthPlan& plan) {
    check(plan);
    const std::size_t threads = plan.cpus.size();
    std::vector<Slice> slices;
    slices.reserve(threads);
    for (std::size_t i = 0; i < threads; ++i) slices.push_back(make_slice(plan, i));

    const bool narrow = plan.gradient_bytes == 2;
    const auto run_pass = narrow ? pass_2_byte_gradients : pass_4_byte_gradients;

    // The clock is read by the last thread that arrives: with every core taken, a thread that only keeps the time
    // would be scheduled late.
    using Clock = std::chrono::steady_clock;
    std::vector<Clock::time_point> times(plan.repeats + 2);  // before the warm-up, after it, after each pass
    std::size_t phase = 0;
    std::barrier barrier(static_cast<std::ptrdiff_t>(threads), [&]() noexcept { times[phase++] = Clock::now(); });

    Gate gate;
    std::vector<std::uint64_t> sums(threads);
    auto work = [&](std::size_t i) {
        if (!gate.wait()) return;
        run_on(plan.cpus[i]);
        narrow ? fill<std::uint16_t>(slices[i]) : fill<std::uint32_t>(slices[i]);
        barrier.arrive_and_wait();
        for (std::size_t r = 0; r < plan.repeats + 1; ++r) {
            run_pass(slices[i]);
            barrier.arrive_and_wait();
        }
        sums[i] = checksum(slices[i]);
    };

    {
        std::vector<std::jthread> pool;
        pool.reserve(threads);
        try {
            for (std::size_t i = 0; i < threads; ++i) pool.emplace_back(work, i);
        } catch (...) {
            gate.open(false);
            throw;
        }
        gate.open(true);
    }

    BandwidthResult result{{}, 0};
    for (std::size_t r = 0; r < plan.repeats; ++r) {
        result.seconds.push_back(std::chrono::duration<double>(times[r + 2] - times[r + 1]).count());
    }
    for (const std::uint64_t sum : sums) result.checksum += sum;
    return result;
}

}  // namespace zenflow
