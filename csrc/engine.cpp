#include "engine.hpp"

#include <unistd.h>

#include <stdexcept>
#include <utility>

namespace zenflow {

Engine::Engine(const std::vector<int>& cpus) : pool_(std::make_unique<Pool>(cpus)), process_(getpid()) {}

Engine::~Engine() {
    if (forked()) static_cast<void>(pool_.release());
}

void Engine::stop() {
    if (!forked()) pool_->stop();
}

void Engine::close() {
    if (!forked()) pool_->close();
}

bool Engine::forked() const {
    return getpid() != process_;
}

Pages Engine::allocate(std::size_t bytes, std::size_t interval_bytes) {
    Pages pages = map_pages(bytes);
    touch_pages(pages.get(), bytes, interval_bytes, pool_->cpus());
    return pages;
}

Engine::Weight Engine::add(const Columns& columns) {
    const std::lock_guard lock(mutex_);
    weights_.push_back(columns);
    return weights_.size() - 1;
}

Pool::Ticket Engine::update(Weight weight, std::vector<Part> parts, std::optional<Hyper> mean, Result result) {
    return pool_->submit(std::make_unique<Update>(columns_of(weight), std::move(parts), mean, result));
}

Pool::Ticket Engine::read(Weight weight, std::size_t first, std::size_t targets, const std::byte* weights, Dtype dtype,
                          bool keep) {
    return pool_->submit(std::make_unique<ReadMasters>(columns_of(weight), first, targets, weights, dtype, keep));
}

Pool::Ticket Engine::unpack(Weight weight, std::vector<std::int64_t> slots, const std::byte* packed) {
    return pool_->submit(std::make_unique<Unpack>(columns_of(weight), std::move(slots), packed));
}

Columns Engine::columns_of(Weight weight) {
    const std::lock_guard lock(mutex_);
    if (weight >= weights_.size()) throw std::invalid_argument("no weight has this number");
    return weights_[weight];
}

}  // namespace zenflow
