/* The semantic cross-entropy of a labelled batch, as derived in torch_impl/cross_entropy.py: for each class y the
 * products (w_k - w_y)ᵀ Σ_y and the column q_k = (w_k - w_y)ᵀ Σ_y (w_k - w_y), then its samples in blocks, then the
 * gradient of q into that of W. In matrix products lanes are classes, in blocks they are samples. */
#include "native.h"

#include <float.h>
#include <math.h>

#include "grouping.h"
#include "lanes.h"
#include "multiply.h"

struct column_workspace {
    int64_t width;      /* vectors in a row of l classes */
    lanes *weight;      /* (d, l): Wᵀ */
    lanes *difference;  /* (d, l): w_k - w_y */
    lanes *product;     /* (d, l): Σ_y (w_k - w_y) */
    lanes *grad_weight; /* (d, l): ∂loss/∂Wᵀ / 2 */
    lanes *quadratic;   /* (l,): q */
    lanes *exponents;   /* (l) vectors of samples */
    lanes *pulled;      /* (l) vectors of samples: Σ factor t P_k */
    void *memory;
};

static enum outcome allocate_columns(struct column_workspace *work, int64_t l, int64_t d)
{
    int64_t width = work->width = width_of(l), matrix = d * width;
    lanes *next = work->memory = aligned_alloc(sizeof(lanes), (size_t)(4 * matrix + width + 2 * l) * sizeof(lanes));
    if (next == NULL)
        return NO_MEMORY;
    memset(next, 0, (size_t)(4 * matrix) * sizeof(lanes));
    work->weight = next;
    work->difference = next + matrix;
    work->product = next + 2 * matrix;
    work->grad_weight = next + 3 * matrix;
    work->quadratic = next + 4 * matrix;
    work->exponents = work->quadratic + width;
    work->pulled = work->exponents + l;
    return DONE;
}

static void compute_column(const struct batch *batch, int64_t y, struct column_workspace *work)
{
    int64_t d = batch->num_features, width = work->width;
    const float *covariance = batch->covariance + y * d * (batch->diagonal ? 1 : d);
    for (int64_t c = 0; c < d; ++c)
        for (int64_t at = 0; at < width; ++at)
            work->difference[c * width + at] = work->weight[c * width + at] - batch->weight[y * d + c];
    if (batch->diagonal)
        for (int64_t c = 0; c < d; ++c)
            for (int64_t at = 0; at < width; ++at)
                work->product[c * width + at] = work->difference[c * width + at] * covariance[c];
    else
        multiply(work->product, work->difference, (struct matrix){covariance, d, d, d}, width, 0);
    for (int64_t at = 0; at < width; ++at) {
        lanes sum = all(0.0f);
        for (int64_t c = 0; c < d; ++c)
            sum += work->difference[c * width + at] * work->product[c * width + at];
        work->quadratic[at] = sum;
    }
}

/* The losses and gradients of up to LANES samples of class y. */
static void compute_samples(const struct batch *batch, int64_t y, const int64_t *order, int64_t count,
                            struct column_workspace *work)
{
    int64_t l = batch->num_classes;
    const float *quadratic = (const float *)work->quadratic;
    float share = batch->label_smoothing / (float)l, spread = 0.0f;
    float own = batch->class_weight ? batch->class_weight[y] : 1.0f;
    lanes factor = all(0.0f), own_logit = all(0.0f), smoothed = all(0.0f), largest = all(-FLT_MAX), sum = all(0.0f);
    for (int64_t k = 0; k < l; ++k) {
        lanes z = all(0.0f);
        float weight = batch->class_weight ? batch->class_weight[k] : 1.0f;
        for (int64_t i = 0; i < count; ++i)
            z[i] = batch->logits[order[i] * l + k];
        work->exponents[k] = z + 0.5f * batch->strength * quadratic[k];
        if (k == y)
            own_logit = z;
        else
            largest = larger(work->exponents[k], largest);
        spread += share * weight;
        if (share * weight > 0.0f)
            smoothed += share * weight * z;
    }
    float total = (1.0f - batch->label_smoothing) * own + spread;
    for (int64_t k = 0; k < l; ++k)
        sum += work->exponents[k] = k == y ? all(0.0f) : exp_below(work->exponents[k] - largest);
    sum = select(sum < FLT_MIN, all(FLT_MIN), sum); /* every other class is excluded */
    lanes log_odds = own_logit - (largest + log_positive(sum));
    lanes tail = exp_below(smaller(log_odds, -log_odds));
    lanes loss = total * (log1p_unit(tail) - smaller(log_odds, all(0.0f)));
    if (share > 0.0f)
        loss += spread * own_logit - smoothed;
    lanes rest = select(log_odds < 0.0f, all(1.0f), tail) / (1.0f + tail); /* 1 - p */
    for (int64_t i = 0; i < count; ++i) {
        factor[i] = batch->factors[order[i]];
        batch->losses[order[i]] = loss[i];
    }
    lanes scale = factor * total * rest / sum;
    for (int64_t k = 0; k < l; ++k) {
        lanes pulled = scale * work->exponents[k];
        float weight = batch->class_weight ? batch->class_weight[k] : 1.0f;
        work->pulled[k] += pulled;
        if (batch->grad_logits == NULL)
            continue;
        lanes gradient = k == y ? factor * (spread - total * rest) : pulled;
        gradient -= factor * (share * weight);
        for (int64_t i = 0; i < count; ++i)
            batch->grad_logits[order[i] * l + k] = gradient[i];
    }
}

/* Adds class y to ∂loss/∂W / 2: a_k Σ_y (w_k - w_y) to row k, minus their sum to row y, a_k = ∂loss/∂q_k. */
static void add_weight_gradient(const struct batch *batch, int64_t y, struct column_workspace *work)
{
    int64_t l = batch->num_classes, d = batch->num_features, width = work->width;
    float *grad = (float *)work->quadratic;
    memset(grad, 0, (size_t)width * sizeof(lanes));
    for (int64_t k = 0; k < l; ++k)
        for (int i = 0; i < LANES; ++i)
            grad[k] += 0.5f * batch->strength * work->pulled[k][i];
    for (int64_t c = 0; c < d; ++c) {
        lanes sum = all(0.0f);
        for (int64_t at = 0; at < width; ++at) {
            lanes change = work->quadratic[at] * work->product[c * width + at];
            work->grad_weight[c * width + at] += change;
            sum += change;
        }
        for (int i = 0; i < LANES; ++i)
            ((float *)(work->grad_weight + c * width))[y] -= sum[i];
    }
}

enum outcome VERSION(cross_entropy)(const struct batch *batch)
{
    int64_t l = batch->num_classes, d = batch->num_features;
    struct column_workspace work = {0};
    struct grouping groups = {0};
    enum outcome outcome = group_by_class(&groups, batch->labels, batch->num_samples, l, BAD_LABELS);
    if (outcome == DONE)
        outcome = allocate_columns(&work, l, d);
    if (outcome == DONE) {
        for (int64_t c = 0; c < d; ++c)
            for (int64_t k = 0; k < l; ++k)
                ((float *)(work.weight + c * work.width))[k] = batch->weight[k * d + c];
        for (int64_t y = 0; y < l; ++y) {
            int64_t start = groups.starts[y], stop = groups.starts[y + 1];
            if (start == stop)
                continue;
            compute_column(batch, y, &work);
            memset(work.pulled, 0, (size_t)l * sizeof(lanes));
            for (; start < stop; start += LANES)
                compute_samples(batch, y, groups.order + start, stop - start < LANES ? stop - start : LANES, &work);
            if (batch->grad_weight)
                add_weight_gradient(batch, y, &work);
        }
        if (batch->grad_weight)
            for (int64_t k = 0; k < l; ++k)
                for (int64_t c = 0; c < d; ++c)
                    batch->grad_weight[k * d + c] = 2.0f * ((const float *)(work.grad_weight + c * work.width))[k];
    }
    free(work.memory);
    free(groups.order);
    return outcome;
}
