// zenflow._native: what Python sees of the host code. Signatures are repeated in runtime/zenflow/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bandwidth.hpp"
#include "energies.hpp"
#include "engine.hpp"
#include "matrix.hpp"
#include "team.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Address = std::uintptr_t;
using Index = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HyperArgument = std::pair<std::vector<double>, double>;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);  // Python owns the memory and keeps it until the task is over
}

template <typename Value>
Value by_name(const std::map<std::string, Value>& table, const std::string& name) {
    const auto found = table.find(name);
    if (found == table.end()) throw std::invalid_argument("'" + name + "' is not known");
    return found->second;
}

zenflow::Dtype dtype_of(const std::string& name) {
    using zenflow::Dtype;
    static const std::map<std::string, Dtype> table{
        {"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}, {"fp16", Dtype::fp16}};
    return by_name(table, name);
}

zenflow::Rule rule_of(const std::string& name) {
    using zenflow::Rule;
    static const std::map<std::string, Rule> table{{"adamw", Rule::adamw},
                                                   {"adam", Rule::adam},
                                                   {"adagrad", Rule::adagrad},
                                                   {"lion", Rule::lion},
                                                   {"sgd", Rule::sgd}};
    return by_name(table, name);
}

zenflow::Faults::Kind fault_of(const std::string& name) {
    using Kind = zenflow::Faults::Kind;
    return by_name<Kind>({{"none", Kind::none},
                          {"fail", Kind::fail},
                          {"die", Kind::die},
                          {"delay", Kind::delay},
                          {"jitter", Kind::jitter}},
                         name);
}

zenflow::Hyper hyper_of(const HyperArgument& argument) {
    zenflow::Hyper hyper{{}, argument.second};
    if (argument.first.size() > hyper.numbers.size()) throw std::invalid_argument("too many hyperparameters");
    std::copy(argument.first.begin(), argument.first.end(), hyper.numbers.begin());
    return hyper;
}

std::vector<std::int64_t> index_of(const std::optional<Index>& index) {
    if (!index) return {};
    return {index->data(), index->data() + index->shape(0)};
}

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

zenflow::Entry make_entry(const std::vector<std::pair<Address, std::size_t>>& extents, const std::string& dtype,
                          const HyperArgument& hyper, float factor, const std::optional<Index>& rows) {
    zenflow::Entry entry{{}, dtype_of(dtype), factor, hyper_of(hyper), index_of(rows)};
    for (const auto& [address, elements] : extents) entry.extents.push_back({at<const std::byte>(address), elements});
    return entry;
}

zenflow::Part make_part(std::size_t first, std::size_t targets, std::vector<zenflow::Entry> entries,
                        const std::optional<Index>& slots, const std::optional<Index>& out) {
    return {first, targets, index_of(slots), std::move(entries), index_of(out)};
}

zenflow::Columns state_of(const std::string& rule, std::size_t columns, std::size_t rows, Address master,
                          const std::vector<Address>& moments, Address count) {
    zenflow::Columns state{rule_of(rule), columns, rows, at<float>(master), {}, at<std::int32_t>(count)};
    if (moments.size() != zenflow::moments_of(state.rule)) throw std::invalid_argument("wrong number of moments");
    for (std::size_t m = 0; m < moments.size(); ++m) state.moments[m] = at<float>(moments[m]);
    return state;
}

std::size_t add(zenflow::Engine& engine, const std::string& rule, std::size_t columns, std::size_t rows, Address master,
                const std::vector<Address>& moments, Address count) {
    return engine.add(state_of(rule, columns, rows, master, moments, count));
}

std::uint64_t submit_update(zenflow::Engine& engine, std::size_t weight, std::vector<zenflow::Part> parts,
                            const std::optional<HyperArgument>& mean,
                            const std::optional<std::pair<Address, std::string>>& weights,
                            std::optional<Address> packed, float coast) {
    zenflow::Result result;
    if (weights) {
        result = {zenflow::Result::Kind::weights, at<std::byte>(weights->first), dtype_of(weights->second), coast};
    } else if (packed) {
        result = {zenflow::Result::Kind::packed, at<std::byte>(*packed), zenflow::Dtype::fp32};
    }
    const auto closing = mean ? std::optional(hyper_of(*mean)) : std::nullopt;
    const nb::gil_scoped_release unlocked;
    return engine.update(weight, std::move(parts), closing, result);
}

std::uint64_t submit_read(zenflow::Engine& engine, std::size_t weight, std::size_t first, std::size_t targets,
                          Address weights, const std::string& dtype, bool keep) {
    return engine.read(weight, first, targets, at<const std::byte>(weights), dtype_of(dtype), keep);
}

std::uint64_t submit_unpack(zenflow::Engine& engine, std::size_t weight, const Index& slots, Address packed) {
    return engine.unpack(weight, index_of(slots), at<const std::byte>(packed));
}

nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> allocate(zenflow::Engine& engine, std::size_t nbytes,
                                                           std::size_t interval_bytes) {
    zenflow::Pages pages;
    {
        const nb::gil_scoped_release unlocked;
        pages = engine.allocate(nbytes, interval_bytes);
    }
    auto* owned = new zenflow::Pages(std::move(pages));
    const nb::capsule owner(owned, [](void* memory) noexcept { delete static_cast<zenflow::Pages*>(memory); });
    return {owned->get(), {nbytes}, owner};
}

std::optional<std::pair<double, double>> wait(zenflow::Engine& engine, std::uint64_t ticket, double timeout_s) {
    const nb::gil_scoped_release unlocked;
    const auto span = engine.pool().wait(ticket, timeout_s);
    if (!span) return std::nullopt;
    return std::pair(span->begin_s, span->end_s);
}

using MatrixArgument = std::tuple<Address, std::string, std::int64_t, std::int64_t>;

zenflow::Matrix matrix_of(const MatrixArgument& argument) {
    const auto& [address, dtype, row_stride, column_stride] = argument;
    return {at<std::byte>(address), dtype_of(dtype), row_stride, column_stride};
}

zenflow::Index columns_of(const std::optional<Address>& columns, std::size_t n, std::size_t limit) {
    if (!columns) return nullptr;
    zenflow::check_columns(at<std::int64_t>(*columns), n, limit);
    return at<std::int64_t>(*columns);
}

// State on the device of several weights, which every step updates: what does not change from step to step.
struct DeviceUpdates {
    std::vector<zenflow::ColumnUpdate> updates;
    std::vector<std::size_t> weights;  // of each, the number of its weight
    std::vector<std::size_t> groups;   // and of its parameter group
    std::vector<bool> packed;          // whether its gradients are where they were

    void run(const std::vector<Address>& addresses, const std::vector<Address>& gradients,
             const std::vector<HyperArgument>& hypers, float factor, bool skip, std::size_t threads) {
        std::vector<zenflow::Hyper> made;
        for (const HyperArgument& hyper : hypers) made.push_back(hyper_of(hyper));
        for (std::size_t i = 0; i < updates.size(); ++i) {
            updates[i].weights.data = at<std::byte>(addresses.at(weights[i]));
            if (!packed[i]) updates[i].gradient.data = at<std::byte>(gradients.at(weights[i]));
            if (updates[i].gradient.data == nullptr) throw std::invalid_argument("a gradient is missing");
            updates[i].hyper = made.at(groups[i]);
            updates[i].factor = factor;
            updates[i].skip = skip;
        }
        const nb::gil_scoped_release unlocked;
        zenflow::update_columns(updates, threads);
    }
};

// Numbers of the weight and its group, n, rows, addresses of master, moments, counts and gradients (0: each run is
// given them), strides of the weight, address of the columns and how many there are, dtype of both.
using PartArgument =
    std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, Address, std::vector<Address>, Address, Address,
               std::int64_t, std::int64_t, std::optional<Address>, std::size_t, std::string>;

DeviceUpdates make_device_updates(const std::string& rule, const std::vector<PartArgument>& parts) {
    DeviceUpdates made;
    for (const auto& [weight, group, n, rows, master, moments, count, gradient, row_stride, column_stride, columns,
                      limit, dtype] : parts) {
        zenflow::ColumnUpdate update{};
        update.state = state_of(rule, n, rows, master, moments, count);
        update.gradient = {at<std::byte>(gradient), dtype_of(dtype), 1, static_cast<std::int64_t>(rows)};
        update.weights = {nullptr, dtype_of(dtype), row_stride, column_stride};
        update.columns = columns_of(columns, n, limit);
        update.packed = true;
        made.updates.push_back(update);
        made.weights.push_back(weight);
        made.groups.push_back(group);
        made.packed.push_back(gradient != 0);
    }
    return made;
}

void column_energies(const MatrixArgument& matrix, std::size_t rows, std::size_t columns, Address energies,
                     std::size_t threads) {
    const zenflow::Matrix of = matrix_of(matrix);
    const nb::gil_scoped_release unlocked;
    zenflow::column_energies(of, rows, columns, at<float>(energies), threads);
}

void pack_columns(const MatrixArgument& matrix, Address columns, std::size_t n, std::size_t rows, std::size_t limit,
                  Address packed, std::size_t threads) {
    const zenflow::Matrix from = matrix_of(matrix);
    const zenflow::Index index = columns_of(columns, n, limit);
    const nb::gil_scoped_release unlocked;
    zenflow::pack_columns(from, zenflow::element_bytes(from.dtype), index, n, rows, at<std::byte>(packed), threads);
}

void scatter_columns(const MatrixArgument& matrix, Address columns, std::size_t n, std::size_t rows, std::size_t limit,
                     Address source, const std::string& source_dtype, std::size_t threads) {
    const zenflow::Matrix to = matrix_of(matrix);
    const zenflow::Index index = columns_of(columns, n, limit);
    const zenflow::Dtype dtype = dtype_of(source_dtype);
    const nb::gil_scoped_release unlocked;
    zenflow::scatter_columns(to, index, n, rows, at<const std::byte>(source), dtype, threads);
}

using BucketPartArgument = std::tuple<std::size_t, std::size_t, std::vector<std::int64_t>, std::vector<std::int64_t>,
                                      std::size_t, std::size_t>;

zenflow::Bucket make_bucket(const std::string& dtype, bool transposed, const std::vector<BucketPartArgument>& parts) {
    zenflow::Bucket bucket{dtype_of(dtype), transposed, {}};
    for (const auto& [rows, columns, sent, kept, sent_start, kept_start] : parts) {
        zenflow::check_columns(sent.data(), sent.size(), columns);
        zenflow::check_columns(kept.data(), kept.size(), columns);
        bucket.parts.push_back({rows, columns, sent, kept, sent_start, kept_start});
    }
    return bucket;
}

using Buffer = std::pair<Address, std::size_t>;  // elements

std::vector<std::byte*> matrices_of(const zenflow::Bucket& bucket, const std::vector<Address>& addresses,
                                    std::size_t sent, std::size_t kept) {
    if (addresses.size() != bucket.parts.size()) throw std::invalid_argument("there is not one address a part");
    std::vector<std::byte*> found;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
        const zenflow::BucketPart& part = bucket.parts[i];
        found.push_back(at<std::byte>(addresses[i]));
        if (addresses[i] == 0) continue;
        if (part.sent_start + part.sent.size() * part.rows > sent ||
            part.kept_start + part.kept.size() * part.rows > kept) {
            throw std::out_of_range("a buffer is too short for the columns of a bucket");
        }
    }
    return found;
}

void pack_bucket(const zenflow::Bucket& bucket, const std::vector<Address>& gradients, const Buffer& sent,
                 const Buffer& kept, const Buffer& energies, std::size_t threads) {
    const std::vector<std::byte*> matrices = matrices_of(bucket, gradients, sent.second, kept.second);
    std::size_t columns = 0;
    for (const zenflow::BucketPart& part : bucket.parts) columns += part.columns;
    if (columns > energies.second) throw std::out_of_range("there is no room for all energies of a bucket");
    const nb::gil_scoped_release unlocked;
    zenflow::pack_bucket(bucket, matrices, at<std::byte>(sent.first), at<std::byte>(kept.first),
                         at<float>(energies.first), threads);
}

void show_bucket(const zenflow::Bucket& bucket, const std::vector<Address>& weights, const Buffer& sent,
                 std::size_t threads) {
    // Of the kept columns nothing is read.
    const std::vector<std::byte*> matrices = matrices_of(bucket, weights, sent.second, SIZE_MAX);
    const nb::gil_scoped_release unlocked;
    zenflow::show_bucket(bucket, matrices, at<const std::byte>(sent.first), threads);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // an engine that lives until the interpreter ends is no mistake
    m.doc() = "The native part of zenflow.";
    m.def("bandwidth", &bandwidth, nb::kw_only(), "elements"_a, "update_interval"_a, "gradient_bytes"_a, "repeats"_a,
          "cpus"_a, "Seconds of each timed pass over the streams of a host update, and a checksum of the memory.");

    nb::class_<zenflow::Entry>(m, "Entry", "One step's gradient of some columns.")
        .def(
            "__init__",
            [](zenflow::Entry* self, const std::vector<std::pair<Address, std::size_t>>& extents,
               const std::string& dtype, const HyperArgument& hyper, float factor, const std::optional<Index>& rows) {
                new (self) zenflow::Entry(make_entry(extents, dtype, hyper, factor, rows));
            },
            "extents"_a, "dtype"_a, "hyper"_a, "factor"_a, "rows"_a.none());
    nb::class_<zenflow::Part>(m, "Part", "Columns that share a log.")
        .def(
            "__init__",
            [](zenflow::Part* self, std::size_t first, std::size_t targets, std::vector<zenflow::Entry> entries,
               const std::optional<Index>& slots, const std::optional<Index>& out) {
                new (self) zenflow::Part(make_part(first, targets, std::move(entries), slots, out));
            },
            "first"_a, "targets"_a, "entries"_a, "slots"_a.none(), "out"_a.none());

    nb::class_<DeviceUpdates>(m, "DeviceUpdates", "Updates of state on the device, which is the host's memory.")
        .def(
            "__init__",
            [](DeviceUpdates* self, const std::string& rule, const std::vector<PartArgument>& parts) {
                new (self) DeviceUpdates(make_device_updates(rule, parts));
            },
            "rule"_a, "parts"_a)
        .def("run", &DeviceUpdates::run, "weights"_a, "gradients"_a, "hypers"_a, "factor"_a, "skip"_a, "threads"_a);
    m.def("column_energies", &column_energies, "matrix"_a, "rows"_a, "columns"_a, "energies"_a, "threads"_a,
          "Squared norms of a matrix' columns into fp32 [columns].");
    m.def("pack_columns", &pack_columns, "matrix"_a, "columns"_a, "n"_a, "rows"_a, "limit"_a, "packed"_a, "threads"_a,
          "Copy columns out of a matrix into [n, rows].");
    m.def("scatter_columns", &scatter_columns, "matrix"_a, "columns"_a, "n"_a, "rows"_a, "limit"_a, "source"_a,
          "source_dtype"_a, "threads"_a, "Write [n, rows], in fp32 or the matrix' dtype, into columns of a matrix.");
    nb::class_<zenflow::Bucket>(m, "Bucket", "Weights of one dtype, and where their columns go in two flat buffers.")
        .def(
            "__init__",
            [](zenflow::Bucket* self, const std::string& dtype, bool transposed,
               const std::vector<BucketPartArgument>& parts) {
                new (self) zenflow::Bucket(make_bucket(dtype, transposed, parts));
            },
            "dtype"_a, "transposed"_a, "parts"_a)
        .def("pack", &pack_bucket, "gradients"_a, "sent"_a, "kept"_a, "energies"_a, "threads"_a)
        .def("show", &show_bucket, "weights"_a, "sent"_a, "threads"_a);
    m.def(
        "end_helpers", [] { zenflow::Team::of_process().end(); }, nb::call_guard<nb::gil_scoped_release>(),
        "End the threads beside the callers of the functions above, for good.");

    nb::class_<zenflow::Engine>(m, "Engine", "Threads that update the deferred columns of weights.")
        .def(nb::init<const std::vector<int>&>(), "cpus"_a)
        .def_prop_ro("threads", [](zenflow::Engine& engine) { return engine.pool().threads(); })
        .def_prop_ro("alive", [](zenflow::Engine& engine) { return engine.pool().alive(); })
        .def("allocate", &allocate, "nbytes"_a, "interval_bytes"_a)
        .def("register", &add, "rule"_a, "columns"_a, "rows"_a, "master"_a, "moments"_a, "count"_a)
        .def("update", &submit_update, "weight"_a, "parts"_a, nb::kw_only(), "mean"_a.none(), "weights"_a.none(),
             "packed"_a.none(), "coast"_a = 0.0F)
        .def("read", &submit_read, "weight"_a, "first"_a, "targets"_a, "weights"_a, "dtype"_a, "keep"_a)
        .def("unpack", &submit_unpack, "weight"_a, "slots"_a, "packed"_a)
        .def(
            "poll", [](zenflow::Engine& engine, std::uint64_t ticket) { return engine.pool().poll(ticket); },
            "ticket"_a)
        .def("wait", &wait, "ticket"_a, "timeout_s"_a)
        .def("stop", &zenflow::Engine::stop, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &zenflow::Engine::close, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "inject",
            [](zenflow::Engine& engine, const std::string& kind, std::uint64_t pieces, double seconds,
               std::uint64_t seed) { engine.pool().faults().arm(fault_of(kind), pieces, seconds, seed); },
            "kind"_a, "pieces"_a = 0, "seconds"_a = 0.0, "seed"_a = 0);
}
