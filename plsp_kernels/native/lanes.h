/* Vectors of LANES samples.
 *
 * Samples of one class share all per-pair coefficients, so a block of samples vectorises for any number of classes.
 * Uses the vector extensions of GCC and Clang. The functions below are accurate to a few ulp, flush subnormal results
 * to zero and propagate NaN.
 */
#ifndef PLSP_LANES_H
#define PLSP_LANES_H

#include <stdint.h>

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t lane_bits __attribute__((vector_size(LANES * sizeof(int32_t))));

#define INLINE static inline __attribute__((always_inline))

/* `yes` where a comparison holds, `no` elsewhere. */
INLINE lanes select(lane_bits holds, lanes yes, lanes no)
{
    return (lanes)((holds & (lane_bits)yes) | (~holds & (lane_bits)no));
}

INLINE lanes all(float value)
{
    return value - (lanes){0.0f};
}

INLINE lanes larger(lanes a, lanes b)
{
    return select(a > b, a, b);
}

INLINE lanes smaller(lanes a, lanes b)
{
    return select(a < b, a, b);
}

/* Nearest integer for |x| < 2^22: adding 1.5 · 2^23 rounds off the fraction. */
INLINE lanes nearest(lanes x)
{
    return (x + 12582912.0f) - 12582912.0f;
}

/* 2^n exp(r) for integers -126 <= n <= 126 and |r| <= log(2)/2. The polynomial is a least-squares fit at Chebyshev
 * nodes, relative error 1.1e-8. */
INLINE lanes scaled_exp(lanes n, lanes r)
{
    lanes p = all(0.001393373321629692f);
    p = p * r + 0.008363235384630375f;
    p = p * r + 0.04166646416731262f;
    p = p * r + 0.16666576643547143f;
    p = p * r + 0.5000000013543259f;
    lanes power = (lanes)((__builtin_convertvector(n, lane_bits) + 127) << 23);
    return power * (p * r * r + r + 1.0f);
}

/* log 2 in two parts (Cody-Waite): products of the short part with small integers are exact. */
#define LOG2_SHORT 0.693359375f
#define LOG2_REST (-2.1219444005469058e-4f)
#define LOG2_RECIPROCAL 1.4426950408889634f

/* exp(x) for x <= 0. */
INLINE lanes exp_below(lanes x)
{
    lane_bits underflows = x < -87.0f;
    lanes bounded = select(underflows, all(-87.0f), x);
    lanes n = nearest(bounded * LOG2_RECIPROCAL);
    lanes result = scaled_exp(n, (bounded - n * LOG2_SHORT) - n * LOG2_REST);
    return select(underflows, all(0.0f), result);
}

/* 2 atanh(s) for 0 <= s <= 1/3, fitted like scaled_exp, relative error 4e-10. */
INLINE lanes twice_atanh(lanes s)
{
    lanes u = s * s, p = all(0.23244415889955838f);
    p = p * u + 0.21702271260984157f;
    p = p * u + 0.2859264557198353f;
    p = p * u + 0.3999970020461817f;
    p = p * u + 0.6666666734081601f;
    return p * u * s + 2.0f * s;
}

/* log(x) for normal x: x = 2^n f with 1 <= f < 2, and log f = 2 atanh((f - 1) / (f + 1)). */
INLINE lanes log_positive(lanes x)
{
    lane_bits bits = (lane_bits)x;
    lanes n = __builtin_convertvector((bits >> 23) - 127, lanes);
    lanes f = (lanes)((bits & 0x007fffff) | 0x3f800000);
    lanes result = n * LOG2_SHORT + (n * LOG2_REST + twice_atanh((f - 1.0f) / (f + 1.0f)));
    return select(x == x, result, x);
}

/* log(1 + t) for 0 <= t <= 1. */
INLINE lanes log1p_unit(lanes t)
{
    return twice_atanh(t / (2.0f + t));
}

/* Φ(-x) / Φ(x) and its reciprocal for x = √2 · margin.
 *
 * Φ(-√2 y) = exp(-y²) erfcx(y) / 2, and (1 + 2y) erfcx(y) is smooth in t = (y - 3) / (y + 3) on all of [0, ∞): its
 * Chebyshev interpolant in t, truncated at degree 11, relative error 1.7e-7. Rounding y² in exp(-y²) would cost y² ulp;
 * with s = y rounded to 1/32 the square s² is exact, and y² - s² = (y - s)(y + s) is small.
 */
struct ratio {
    lanes value, reciprocal;
};

INLINE struct ratio normal_ratio(lanes margin)
{
    lane_bits negative = margin < 0.0f;
    lanes size = select(negative, -margin, margin);
    lane_bits underflows = size > 9.2f; /* Φ(-x) is below the smallest normal number */
    lanes y = select(underflows, all(9.2f), size);
    lanes t = (y - 3.0f) / (y + 3.0f), p = 7.731024224076895e-05f * t - 9.254516686923966e-05f;
    p = p * t - 0.0007264536790340485f;
    p = p * t + 0.001875079123772353f;
    p = p * t + 0.0024991168696069477f;
    p = p * t - 0.02376357643949504f;
    p = p * t + 0.06831656777114085f;
    p = p * t - 0.1192752752822409f;
    p = p * t + 0.1296441143440814f;
    p = p * t - 0.047562156927520076f;
    p = p * t - 0.1356210694002736f;
    p = p * t + 1.2530080563677553f;
    lanes s = nearest(y * 32.0f) * 0.03125f, n = nearest(y * y * LOG2_RECIPROCAL);
    lanes remainder = (n * LOG2_SHORT - s * s) + n * LOG2_REST - (y - s) * (y + s);
    lanes tail = select(underflows, all(0.0f), p * scaled_exp(-n, remainder)); /* (2 + 4y) Φ(-√2 y) */
    lanes rest = (2.0f + 4.0f * y) - tail;                                     /* (2 + 4y) Φ(√2 y) */
    lanes below = tail / rest, above = rest / tail;
    return (struct ratio){select(negative, above, below), select(negative, below, above)};
}

#endif
