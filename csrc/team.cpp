#include "team.hpp"

#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <memory>
#include <system_error>

#include "thread.hpp"

namespace zenflow {
namespace {

std::atomic<Team*> current{nullptr};

class DefaultRounding {
public:
    DefaultRounding() {
        std::fegetenv(&before_);
        use_default_rounding();
    }
    ~DefaultRounding() { std::fesetenv(&before_); }
    DefaultRounding(const DefaultRounding&) = delete;
    DefaultRounding& operator=(const DefaultRounding&) = delete;

private:
    std::fenv_t before_;
};

}  // namespace

Team::Team() : process_(getpid()) {}

Team& Team::of_process() {
    Team* team = current.load();
    while (team == nullptr || team->process_ != getpid()) {
        std::unique_ptr<Team> made(new Team);
        if (current.compare_exchange_strong(team, made.get())) return *made.release();  // never destroyed
    }
    return *team;
}

void Team::share(std::size_t threads, Job& job) {
    const DefaultRounding rounding;
    const std::size_t wanted = std::min(threads, job.pieces);
    std::unique_lock caller(callers_, std::defer_lock);
    if (wanted < 2 || !caller.try_lock()) return job.do_pieces();
    {
        const std::lock_guard lock(mutex_);
        grow(wanted - 1);
        job_ = &job;
        places_ = wanted - 1;
    }
    wake_.notify_all();
    job.do_pieces();
    std::unique_lock lock(mutex_);
    job_ = nullptr;
    done_.wait(lock, [&] { return inside_ == 0; });
}

void Team::grow(std::size_t helpers) {
    try {
        while (!ended_ && helpers_.size() < helpers) helpers_.emplace_back(&Team::help, this);
    } catch (const std::system_error&) {
        // fewer then
    }
}

void Team::help() {
    name_thread("zenflow-kernels");
    use_default_rounding();
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return ended_ || (job_ != nullptr && places_ > 0); });
        if (ended_) return;
        Job& job = *job_;
        --places_;
        ++inside_;
        lock.unlock();
        job.do_pieces();
        lock.lock();
        if (--inside_ == 0) done_.notify_all();
    }
}

void Team::end() {
    std::vector<std::thread> helpers;
    {
        const std::lock_guard lock(mutex_);
        ended_ = true;
        helpers.swap(helpers_);
    }
    wake_.notify_all();
    for (auto& helper : helpers) helper.join();
}

}  // namespace zenflow
