#include "thread.hpp"

#include <cfenv>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace zenflow {

void run_on(int cpu) {
#if defined(__linux__)
    if (cpu < 0 || cpu >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<unsigned>(cpu), &set);
    static_cast<void>(pthread_setaffinity_np(pthread_self(), sizeof set, &set));
#else
    static_cast<void>(cpu);
#endif
}

void name_thread(const char* name) {
#if defined(__linux__)
    static_cast<void>(pthread_setname_np(pthread_self(), name));
#else
    static_cast<void>(name);
#endif
}

void use_default_rounding() {
    std::fesetenv(FE_DFL_ENV);  // a new thread inherits flush-to-zero from its creator
}

}  // namespace zenflow
