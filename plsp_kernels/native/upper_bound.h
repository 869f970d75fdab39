#ifndef PLSP_UPPER_BOUND_H
#define PLSP_UPPER_BOUND_H

#include <stdint.h>

/* One step, as torch_impl.upper_bound describes it. All arrays are dense; N = Bl + 2 Bu, and Bl more rows if there are
 * labelled candidates. Outputs that are not wanted are NULL, each element of the others is written. */
struct step {
    int64_t num_labeled, num_unlabeled, num_classes, num_slots;
    const float *rows;                 /* (N, l): labelled, strong, weak, labelled again */
    const float *gram;                 /* (U, l, l) */
    const int64_t *slots;              /* (N,) */
    const int64_t *labels;             /* (Bl,) */
    const uint8_t *candidates;         /* (Bu, l) */
    const uint8_t *labeled_candidates; /* (Bl, l) or NULL */
    const float *thresholds;           /* (l,) */
    float strength, ss_weight, beta;
    int argmax_in_candidates;
    float *values;       /* (4,): total, supervised, consistency, complementary */
    float *odds;         /* (N, l) */
    float *grad_odds;    /* (N, l) */
    float *grad_rows;    /* (N, l) or NULL */
    float *grad_gram;    /* (U, l, l) or NULL */
    float *confidence;   /* (Bu,) */
    int64_t *prediction; /* (Bu,) */
    uint8_t *mask;       /* (Bu,) */
};

/* OUT_OF_RANGE: a label is no class, or a slot has no Gram matrix; nothing was written. */
enum outcome { DONE, NO_MEMORY, OUT_OF_RANGE };

enum outcome upper_bound_baseline(const struct step *step);
#if defined(__x86_64__)
enum outcome upper_bound_avx2(const struct step *step);
enum outcome upper_bound_avx512(const struct step *step);
#endif

#endif
