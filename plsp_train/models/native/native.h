#ifndef PLSP_STAGES_NATIVE_H
#define PLSP_STAGES_NATIVE_H

#include <stdint.h>

/* Sizes of LeNet-5: images are padded to 32×32. */
enum {
    KERNEL = 5,
    TAPS = KERNEL * KERNEL,
    IMAGE_SIDE = 32,
    MOST_CHANNELS = 3,
    MIDDLE = 6, /* channels after the first stage */
    MIDDLE_SIDE = (IMAGE_SIDE - KERNEL + 1) / 2,
    MIDDLE_AREA = MIDDLE_SIDE * MIDDLE_SIDE,
    LAST = 16, /* channels after the second stage */
    LAST_SIDE = (MIDDLE_SIDE - KERNEL + 1) / 2,
    LAST_AREA = LAST_SIDE * LAST_SIDE,
    FEATURES = LAST * LAST_AREA
};

/* Written once, as X(type, name); the struct below and the unpacking in module.c expand it. N images of C channels and
 * S×S pixels, S = 28 or 32, in groups of `lanes` images. All arrays are dense. The backward pass reads what the forward
 * pass wrote to `middle` and the origins: G is the number of groups, or 1 if there will be no backward pass. */
#define STAGES(X)                                                                          \
    X(const float, images)        /* (N, C, S, S) */                                       \
    X(const float, weight1)       /* (6, C, 5, 5) */                                       \
    X(const float, bias1)         /* (6,) */                                               \
    X(const float, weight2)       /* (16, 6, 5, 5) */                                      \
    X(const float, bias2)         /* (16,) */                                              \
    X(float, middle)              /* (G, 6, 14, 14, lanes): output of the first stage */   \
    X(int32_t, origins1)          /* (G, 6, 14, 14, lanes): origins of its elements */     \
    X(int32_t, origins2)          /* (G, 16, 5, 5, lanes): the same of the second stage */ \
    X(float, features)            /* (N, 400): output of the second stage */               \
    X(const float, grad_features) /* (N, 400); this and all below: backward only */        \
    X(float, grad_weight1)        /* as weight1 */                                         \
    X(float, grad_bias1)          /* as bias1 */                                           \
    X(float, grad_weight2)        /* as weight2 */                                         \
    X(float, grad_bias2)          /* as bias2 */

#define MEMBER(type, name) type *name;

struct stages {
    long long num_images, num_channels, side, num_groups; /* N, C, S, G */
    STAGES(MEMBER)
};

/* Both return false if there is no memory. Compiled once per instruction set, by a file that defines LANES, the floats
 * in a register, and VERSION, which names its functions. */
#define DECLARE(version)                                    \
    int stages_forward_##version(const struct stages *net); \
    int stages_backward_##version(const struct stages *net);

DECLARE(baseline)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
#endif

#endif
