// ZENFLOW_CLONES: compiles a function once more for each newer instruction set and picks one when the module is loaded.
#pragma once

#include <cstdlib>  // defines __GLIBC__

// GCC resolves the clones with an ifunc, which needs glibc.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(ZENFLOW_NO_CLONES)
#define ZENFLOW_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ZENFLOW_CLONES
#endif
