/* 16 bytes are a register of every x86-64 and every 64-bit ARM processor. */
#define LANES 4
#define NAME upper_bound_baseline
#include "one_pass.h"
