/* Fused multiply-add, which numpy lacks. */
#include <math.h>
#include <stdint.h>

void fma32(const float *a, const float *b, const float *c, float *result, int64_t count) {
  for (int64_t i = 0; i < count; i++) result[i] = fmaf(a[i], b[i], c[i]);
}

void fma64(const double *a, const double *b, const double *c, double *result, int64_t count) {
  for (int64_t i = 0; i < count; i++) result[i] = fma(a[i], b[i], c[i]);
}
