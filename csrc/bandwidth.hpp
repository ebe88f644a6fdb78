// The host's memory bandwidth on the streams of one host update. See bandwidth.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zenflow {

struct BandwidthPlan {
    std::size_t elements;         // deferred elements, over all threads
    std::size_t update_interval;  // S: logged gradients per element
    std::size_t gradient_bytes;   // 2 or 4
    std::size_t repeats;          // timed passes, after one that warms up
    std::vector<int> cpus;        // one entry a thread: the core to run on, -1 for any
};

struct BandwidthResult {
    std::vector<double> seconds;  // one entry a timed pass
    std::uint64_t checksum;       // of master, moments and result after the last pass; see `checksum` in bandwidth.cpp
};

// Throws std::invalid_argument, std::bad_alloc, or std::system_error when a thread cannot be started.
BandwidthResult measure_bandwidth(const BandwidthPlan& plan);

}  // namespace zenflow
