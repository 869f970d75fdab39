#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define LANES 8
#define VERSION(name) name##_avx2
#include "covariance_update.h"
#include "upper_bound.h"
#endif
