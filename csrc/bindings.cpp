// zenflow._native: what Python sees of the host code. Signatures are repeated in runtime/zenflow/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "bandwidth.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::pair<std::vector<double>, std::uint64_t> bandwidth(std::size_t elements, std::size_t update_interval,
                                                        std::size_t gradient_bytes, std::size_t repeats,
                                                        std::vector<int> cpus) {
    zenflow::BandwidthResult result;
    {
        const nb::gil_scoped_release unlocked;
        result = zenflow::measure_bandwidth({elements, update_interval, gradient_bytes, repeats, std::move(cpus)});
    }
    return {std::move(result.seconds), result.checksum};
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native part of zenflow.";
    m.def("bandwidth", &bandwidth, nb::kw_only(), "elements"_a, "update_interval"_a, "gradient_bytes"_a, "repeats"_a,
          "cpus"_a, "Seconds of each timed pass over the streams of a host update, and a checksum of the memory.");
}
