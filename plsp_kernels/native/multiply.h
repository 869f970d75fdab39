/* Products of small matrices.
 *
 * A matrix (a, n) of lanes has a rows of `width` vectors, zero-padded beyond n: products need no remainder loop.
 */
#ifndef PLSP_MULTIPLY_H
#define PLSP_MULTIPLY_H

#include "lanes.h"

static int64_t width_of(int64_t n)
{
    return (n + LANES - 1) / LANES;
}

/* (depth, n) floats, rows `stride` apart. */
struct matrix {
    const float *start;
    int64_t stride, depth, n;
};

/* One vector of `count` rows of multiply. Independent sums hide the latency of the additions. */
INLINE void multiply_rows(lanes *out, const lanes *left, struct matrix right, int64_t width, int count, int add)
{
    lanes sums[8];
    for (int i = 0; i < count; ++i)
        sums[i] = add ? out[i * width] : all(0.0f);
    for (int64_t a = 0; a < right.depth; ++a)
        for (int i = 0; i < count; ++i)
            sums[i] += left[a * width] * right.start[a * right.stride + i];
    for (int i = 0; i < count; ++i)
        out[i * width] = sums[i];
}

/* out (n, l) = rightᵀ left with left (depth, l); accumulates into out if `add`. */
static void multiply(lanes *out, const lanes *left, struct matrix right, int64_t width, int add)
{
    for (int64_t at = 0; at < width; ++at) {
        struct matrix columns = right;
        lanes *rows = out + at;
        for (; columns.n >= 8; columns.n -= 8, columns.start += 8, rows += 8 * width)
            multiply_rows(rows, left + at, columns, width, 8, add);
        for (; columns.n >= 4; columns.n -= 4, columns.start += 4, rows += 4 * width)
            multiply_rows(rows, left + at, columns, width, 4, add);
        for (; columns.n > 0; columns.n -= 1, columns.start += 1, rows += width)
            multiply_rows(rows, left + at, columns, width, 1, add);
    }
}

#endif
