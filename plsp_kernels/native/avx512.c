#if defined(__x86_64__)
#pragma GCC target("avx512f,fma")
#define LANES 16
#define NAME upper_bound_avx512
#include "one_pass.h"
#endif
