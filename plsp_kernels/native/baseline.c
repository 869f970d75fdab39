/* 16 bytes are a register of every x86-64 and every 64-bit ARM processor. */
#define LANES 4
#define VERSION(name) name##_baseline
#include "covariance_update.h"
#include "upper_bound.h"
