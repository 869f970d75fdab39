#ifndef PLSP_NATIVE_H
#define PLSP_NATIVE_H

#include <stdint.h>

/* Every list of arrays is written once, as X(type, name); the structs below and the unpacking in module.c expand it.
 * All arrays are dense. Bl + Bu samples, l classes, d features. */

/* The arrays of Step, in the order of step.py. */
#define STEP_INPUTS(X)                                                                     \
    X(const float, labeled_logits)       /* (Bl, l) */                                     \
    X(const float, weak_logits)          /* (Bu, l) */                                     \
    X(const float, strong_logits)        /* (Bu, l) */                                     \
    X(const float, weight)               /* (l, d) */                                      \
    X(const float, covariance)           /* (l, d, d), or (l, d) if it is diagonal */      \
    X(const int64_t, labels)             /* (Bl,) */                                       \
    X(const uint8_t, candidates)         /* (Bu, l) */                                     \
    X(const int64_t, pseudo_labels)      /* (Bu,), or NULL: choose them */                 \
    X(const uint8_t, labeled_candidates) /* (Bl, l) or NULL */                             \
    X(const float, thresholds)           /* (l,) */

/* The arrays of StepResult, likewise. Arrays not requested are NULL; every element of the others is written. */
#define STEP_OUTPUTS(X)                                                                    \
    X(float, total)           /* (1,) */                                                   \
    X(float, terms)           /* (3,): supervised, consistency, complementary */           \
    X(float, grad_logits)     /* (Bl + 2 Bu, l) or NULL: labelled, strong, weak */         \
    X(float, grad_weight)     /* (l, d) or NULL */                                         \
    X(int64_t, chosen_labels) /* (Bu,), or NULL if there are pseudo_labels */              \
    X(float, confidence)      /* (Bu,) */                                                  \
    X(int64_t, prediction)    /* (Bu,) */                                                  \
    X(uint8_t, mask)          /* (Bu,) */

/* Running statistics of l classes, and a batch of N samples. */
#define STATISTICS(X)                                                            \
    X(float, covariance)     /* (l, d, d), or (l, d) if it is diagonal */        \
    X(float, mean)           /* (l, d) */                                        \
    X(int64_t, count)        /* (l,) */                                          \
    X(int64_t, skipped)      /* (l,): samples that were not finite */            \
    X(const float, features) /* (N, d) */                                        \
    X(const int64_t, labels) /* (N,) */

/* A labelled batch of N samples and its results. Arrays not requested are NULL. */
#define BATCH(X)                                                                                       \
    X(const float, logits)       /* (N, l) */                                                          \
    X(const float, weight)       /* (l, d) */                                                          \
    X(const float, covariance)   /* (l, d, d), or (l, d) if it is diagonal */                          \
    X(const int64_t, labels)     /* (N,) */                                                            \
    X(const float, class_weight) /* (l,), or NULL: all one */                                          \
    X(const float, factors)      /* (N,): weights of the losses in the scalar that is differentiated */ \
    X(float, losses)             /* (N,) */                                                            \
    X(float, grad_logits)        /* (N, l) or NULL */                                                  \
    X(float, grad_weight)        /* (l, d) or NULL */

#define MEMBER(type, name) type *name;

enum term { SUPERVISED, CONSISTENCY, COMPLEMENTARY };

/* Gradients are those of the loss Σ upstream · terms. */
struct step {
    long long num_labeled, num_unlabeled, num_classes, num_features;
    float strength, ss_weight, beta, upstream[3];
    int diagonal, argmax_in_candidates;
    STEP_INPUTS(MEMBER)
    STEP_OUTPUTS(MEMBER)
};

struct statistics {
    long long num_classes, num_features, num_samples;
    int diagonal;
    STATISTICS(MEMBER)
};

struct batch {
    long long num_classes, num_features, num_samples;
    float strength, label_smoothing;
    int diagonal;
    BATCH(MEMBER)
};

/* BAD_LABELS, BAD_PSEUDO_LABELS: a class number is out of range, and nothing was written. */
enum outcome { DONE, NO_MEMORY, BAD_LABELS, BAD_PSEUDO_LABELS };

/* Compiled once per instruction set, by a file that defines LANES, the floats in a register, and VERSION, which names
 * its functions. */
#define DECLARE(version)                                                      \
    enum outcome upper_bound_##version(const struct step *step);              \
    enum outcome covariance_update_##version(const struct statistics *state); \
    enum outcome cross_entropy_##version(const struct batch *batch);

DECLARE(baseline)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
#endif

/* The candidate with the highest z |z - 1| in each row of logits and candidates (N, l); ties go to the lowest class. */
void class_activation_labels(int64_t count, int64_t num_classes, const float *logits, const uint8_t *candidates,
                             int64_t *labels);

#endif
