#define LANES 4
#define VERSION(name) name##_baseline
#include "stages.h"
