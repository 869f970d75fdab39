/* Every x86-64 and 64-bit ARM processor has 16-byte registers. */
#define LANES 4
#define VERSION(name) name##_baseline
#include "covariance_update.h"
#include "cross_entropy.h"
#include "upper_bound.h"
