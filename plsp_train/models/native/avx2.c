#if defined(__x86_64__)
#if defined(__clang__) /* ignores GCC's pragma and would split vectors into 16-byte registers */
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define LANES 8
#define VERSION(name) name##_avx2
#include "stages.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
