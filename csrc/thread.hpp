// The calling thread: where it runs, what it is called, how it rounds.
#pragma once

namespace zenflow {

// Keep the calling thread on one core; -1, or a core that the process may not use (any more), leaves it where it is.
void run_on(int cpu);

// Name the calling thread (15 characters at most are kept), for debuggers and `top`.
void name_thread(const char* name);

// Round to nearest and keep denormals, whatever the thread that created this one has set.
void use_default_rounding();

}  // namespace zenflow
