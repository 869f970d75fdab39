#ifndef PLSP_NATIVE_H
#define PLSP_NATIVE_H

#include <stdint.h>

/* One step of Bl + Bu samples with l classes and d features; all arrays are dense. A row of logits is a labelled sample,
 * a strong view, a weak view or, if there are labelled candidates, a labelled sample again: N rows in this order.
 * Outputs that are not wanted are NULL, each element of the others is written. */
struct step {
    int64_t num_labeled, num_unlabeled, num_classes, num_features;
    const float *labeled, *strong, *weak; /* (Bl, l), (Bu, l), (Bu, l): logits */
    const float *weight;                  /* (l, d) */
    const float *covariance;              /* (l, d, d), or (l, d) if it is diagonal */
    const int64_t *labels;                /* (Bl,) */
    const int64_t *pseudo_labels;         /* (Bu,) */
    const uint8_t *candidates;            /* (Bu, l) */
    const uint8_t *labeled_candidates;    /* (Bl, l) or NULL */
    const float *thresholds;              /* (l,) */
    float strength, ss_weight, beta;
    int diagonal, argmax_in_candidates;
    float *values;       /* (4,): total, supervised, consistency, complementary */
    float *grad_rows;    /* (N, l) or NULL: of the total */
    float *grad_weight;  /* (l, d) or NULL: of the total */
    float *odds;         /* (N, l) */
    float *grad_odds;    /* (N, l): of the term that the row feeds */
    float *centred;      /* (l, d): the weight less its mean row */
    float *gram;         /* (l, l, l): G_y = W Σ_y Wᵀ of the centred weight, zero for classes without a sample */
    float *product;      /* (l, l, d) or NULL: T_y = W Σ_y, likewise */
    float *confidence;   /* (Bu,) */
    int64_t *prediction; /* (Bu,) */
    uint8_t *mask;       /* (Bu,) */
};

/* Running statistics of l classes and a batch of N samples with d features. */
struct statistics {
    int64_t num_classes, num_features, num_samples;
    float *covariance;     /* (l, d, d), or (l, d) if it is diagonal */
    float *mean;           /* (l, d) */
    int64_t *count;        /* (l,) */
    const float *features; /* (N, d) */
    const int64_t *labels; /* (N,) */
    int diagonal;
};

/* OUT_OF_RANGE: a label or pseudo-label is no class; nothing was written. */
enum outcome { DONE, NO_MEMORY, OUT_OF_RANGE };

/* The functions that are compiled for several kinds of processor: each such file says how many LANES a register of its
 * kind holds, and how its VERSION of a function is called. */
#define DECLARE(version)                                                     \
    enum outcome upper_bound_##version(const struct step *step);             \
    enum outcome covariance_update_##version(const struct statistics *state);

DECLARE(baseline)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
#endif

/* Each row's candidate of highest z |z - 1|, the first of equals: logits and candidates (N, l), labels (N,). */
void class_activation_labels(int64_t count, int64_t num_classes, const float *logits, const uint8_t *candidates,
                             int64_t *labels);

#endif
