/* Products of small matrices.
 *
 * A matrix (a, n) of lanes is a rows of `width` vectors, whose lanes beyond n are zero: products run without remainders.
 */
#ifndef PLSP_MULTIPLY_H
#define PLSP_MULTIPLY_H

#include "lanes.h"

static int64_t width_of(int64_t n)
{
    return (n + LANES - 1) / LANES;
}

/* One vector of `count` rows of out = rightᵀ left, or of their sum with out: sums run side by side, as a single one
 * would wait for itself. */
INLINE void multiply_columns(lanes *out, const lanes *left, const float *right, int64_t stride, int64_t depth,
                             int64_t width, int count, int add)
{
    lanes sums[8];
    for (int i = 0; i < count; ++i)
        sums[i] = add ? out[i * width] : all(0.0f);
    for (int64_t a = 0; a < depth; ++a)
        for (int i = 0; i < count; ++i)
            sums[i] += left[a * width] * right[a * stride + i];
    for (int i = 0; i < count; ++i)
        out[i * width] = sums[i];
}

/* out (n, l) = rightᵀ left for left (depth, l) of lanes and right (depth, n) of floats, whose rows are `stride` apart; added
 * to out if asked. */
static void multiply(lanes *out, const lanes *left, const float *right, int64_t stride, int64_t depth, int64_t n,
                     int64_t width, int add)
{
    for (int64_t at = 0; at < width; ++at) {
        int64_t c = 0;
        for (; c + 8 <= n; c += 8)
            multiply_columns(out + c * width + at, left + at, right + c, stride, depth, width, 8, add);
        for (; c + 4 <= n; c += 4)
            multiply_columns(out + c * width + at, left + at, right + c, stride, depth, width, 4, add);
        for (; c < n; ++c)
            multiply_columns(out + c * width + at, left + at, right + c, stride, depth, width, 1, add);
    }
}

#endif
