#if defined(__x86_64__)
#if defined(__clang__) /* ignores GCC's pragma and would split vectors into 16-byte registers */
#pragma clang attribute push(__attribute__((target("avx512f,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,fma")
#endif
#define LANES 16
#define VERSION(name) name##_avx512
#include "stages.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
