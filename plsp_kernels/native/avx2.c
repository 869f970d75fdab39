#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define LANES 8
#define NAME upper_bound_avx2
#include "one_pass.h"
#endif
