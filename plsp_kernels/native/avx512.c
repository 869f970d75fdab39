#if defined(__x86_64__)
#pragma GCC target("avx512f,fma")
#define LANES 16
#define VERSION(name) name##_avx512
#include "covariance_update.h"
#include "upper_bound.h"
#endif
