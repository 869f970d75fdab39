/* The loss of one step and all its gradients, in one pass over the samples of each class.
 *
 * With few classes, operator overhead dominates in ATen. Here a block of LANES samples of one class passes through the
 * whole computation while it is in cache. The formulas are those of torch_impl; log_odds.py defines the log-odds,
 * P[k|j], d, and the separable and direct forms of the sums.
 */
#include "native.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "grouping.h"
#include "lanes.h"
#include "multiply.h"

struct workspace {
    int64_t width; /* vectors per row of classes; see multiply.h */
    /* per step */
    lanes *weight;      /* (d, l): centred */
    lanes *grad_weight; /* (d, l): half of ∂loss/∂W */
    /* per class */
    lanes *product;     /* (d, l): T = W Σ, transposed */
    lanes *gram;        /* (l, l): G = W Σ Wᵀ, transposed; later ∂loss/∂G */
    lanes *pairs;       /* (l, l), a vector each: Σ d_j P[k|j] over the samples, lane by lane */
    float *rows;        /* (l, d): T */
    float *interaction; /* (l, l): λ G[j, k] */
    float *kernel;      /* (l, l): exp(-λ G[j, k]), zero for k = j */
    float *scale;       /* (l, l): factor from the difference of logits to the probit margin x_jk/√2 */
    float *half;        /* (l,): (λ/2) g_j, where g is the diagonal of G */
    float least;        /* below this sum of exponentials, the separable form is inaccurate */
    /* per block: a vector for each class or pair of classes, with a sample in each lane */
    lanes *exponentials; /* (l, l): [j, k] proportional to P[k|j] */
    lanes *shares;       /* (l,): exp(z_k + (λ/2) g_k), scaled to a maximum of one */
    lanes *sums;         /* (l,): Σ_k of the exponentials */
    lanes *largest;      /* (l,): log of the divisor of the exponentials */
    lanes *logits;       /* (l,) */
    lanes *probit;       /* (l,): probabilities of the weak view */
    lanes *weights;      /* (l,): weight of logsigmoid(±log_odds) in the term of the rows */
    lanes *slopes;       /* (l,): ∂term/∂log_odds */
    lanes *grad;         /* (l,): ∂loss/∂logits */
    void *memory;
};

static enum outcome allocate(struct workspace *work, int64_t l, int64_t d)
{
    int64_t width = work->width = width_of(l);
    struct {
        lanes **tile;
        int64_t size;
    } tiles[] = {{&work->weight, d * width}, {&work->grad_weight, d * width}, {&work->product, d * width},
                 {&work->gram, l * width},   {&work->pairs, l * l},           {&work->exponentials, l * l},
                 {&work->shares, l},         {&work->sums, l},                {&work->largest, l},
                 {&work->logits, l},         {&work->probit, l},              {&work->weights, l},
                 {&work->slopes, l},         {&work->grad, l}};
    struct {
        float **matrix;
        int64_t size;
    } matrices[] = {{&work->rows, l * d}, {&work->interaction, l * l}, {&work->kernel, l * l}, {&work->scale, l * l},
                    {&work->half, l}};
    size_t bytes = 0;
    for (size_t i = 0; i < sizeof tiles / sizeof *tiles; ++i)
        bytes += (size_t)tiles[i].size * sizeof(lanes);
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; ++i)
        bytes += (size_t)matrices[i].size * sizeof(float);
    work->memory = aligned_alloc(sizeof(lanes), (bytes + sizeof(lanes) - 1) / sizeof(lanes) * sizeof(lanes));
    if (work->memory == NULL)
        return NO_MEMORY;
    lanes *tile = work->memory;
    for (size_t i = 0; i < sizeof tiles / sizeof *tiles; tile += tiles[i++].size)
        *tiles[i].tile = tile;
    float *matrix = (float *)tile;
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; matrix += matrices[i++].size)
        *matrices[i].matrix = matrix;
    return DONE;
}

/* The samples of a vector; lanes beyond `filled` repeat the last one and must have zero weight. */
struct block {
    int64_t sample[LANES];
    int filled;
};

static struct block take(const struct grouping *groups, int64_t start, int64_t stop)
{
    struct block block = {.filled = stop - start < LANES ? (int)(stop - start) : LANES};
    for (int i = 0; i < LANES; ++i)
        block.sample[i] = groups->order[start + (i < block.filled ? i : block.filled - 1)];
    return block;
}

static void load(lanes *tile, const float *rows, const struct block *block, int64_t l)
{
    for (int i = 0; i < LANES; ++i)
        for (int64_t k = 0; k < l; ++k)
            tile[k][i] = rows[block->sample[i] * l + k];
}

static void store(const lanes *tile, float *rows, const struct block *block, int64_t l, int add)
{
    for (int i = 0; i < block->filled; ++i) {
        float *row = rows + block->sample[i] * l;
        for (int64_t k = 0; k < l; ++k)
            row[k] = add ? row[k] + tile[k][i] : tile[k][i];
    }
}

/* Probabilities p̂_j = 1 / (1 + Σ_{k≠j} Φ(-x_jk) / Φ(x_jk)) of the logits. x is antisymmetric, so the ratio of (k, j)
 * is the reciprocal of that of (j, k). Logits of -inf are made finite, as their difference must not be NaN. */
static void probit_block(int64_t l, struct workspace *work)
{
    lanes *logits = work->logits, *probit = work->probit;
    for (int64_t j = 0; j < l; ++j) {
        logits[j] = select(logits[j] < -FLT_MAX, all(-FLT_MAX), logits[j]);
        probit[j] = all(1.0f);
    }
    for (int64_t j = 0; j < l; ++j) {
        for (int64_t k = j + 1; k < l; ++k) {
            struct ratio ratio = normal_ratio((logits[j] - logits[k]) * work->scale[j * l + k]);
            probit[j] += ratio.value;
            probit[k] += ratio.reciprocal;
        }
        probit[j] = 1.0f / probit[j];
    }
}

/* Writes confidence, prediction and mask of the instances, and sets the weights to their negated pseudo-targets divided
 * by the batch size. Pseudo-targets are the normalised probabilities of the candidates or, if all of these underflow,
 * the softmax of the candidate logits. */
static void choose_targets(const struct step *step, const struct block *block, struct workspace *work)
{
    int64_t l = step->num_classes;
    const lanes *probit = work->probit, *logits = work->logits;
    memset(work->weights, 0, (size_t)l * sizeof(lanes));
    for (int i = 0; i < block->filled; ++i) {
        int64_t instance = block->sample[i], best = 0;
        const uint8_t *candidates = step->candidates + instance * l;
        float mass = 0.0f, largest = -INFINITY, total = 0.0f;
        for (int64_t j = 0; j < l; ++j) {
            best = probit[j][i] > probit[best][i] ? j : best;
            mass += candidates[j] ? probit[j][i] : 0.0f;
            largest = candidates[j] && logits[j][i] > largest ? logits[j][i] : largest;
        }
        step->confidence[instance] = probit[best][i];
        step->prediction[instance] = best;
        step->mask[instance] =
            probit[best][i] >= step->thresholds[best] && (candidates[best] || !step->argmax_in_candidates);
        if (!step->mask[instance])
            continue;
        for (int64_t j = 0; j < l; ++j)
            if (candidates[j])
                total += work->weights[j][i] = mass < FLT_MIN ? expf(logits[j][i] - largest) : probit[j][i];
        for (int64_t j = 0; j < l; ++j)
            work->weights[j][i] /= -total * (float)step->num_unlabeled;
    }
}

/* Sets the weights to the negated one-hot labels divided by the batch size. */
static void choose_labels(const struct step *step, const struct block *block, struct workspace *work)
{
    memset(work->weights, 0, (size_t)step->num_classes * sizeof(lanes));
    for (int i = 0; i < block->filled; ++i)
        work->weights[step->labels[block->sample[i]]][i] = -1.0f / (float)step->num_labeled;
}

/* Sets the weights to the indicators of non-candidate classes divided by the batch size. */
static void choose_outside(const struct step *step, const struct block *block, const uint8_t *candidates,
                           struct workspace *work)
{
    int64_t l = step->num_classes;
    int64_t count = step->num_unlabeled + (step->labeled_candidates ? step->num_labeled : 0);
    for (int i = 0; i < LANES; ++i)
        for (int64_t k = 0; k < l; ++k) {
            int outside = i < block->filled && !candidates[block->sample[i] * l + k];
            work->weights[k][i] = outside ? 1.0f / (float)count : 0.0f;
        }
}

/* Exponentials and sums in the separable form, with l exponentials per row; returns whether they are accurate. */
static int separable_sums(int64_t l, struct workspace *work)
{
    lanes largest = work->logits[0] + work->half[0], smallest_sum = all(INFINITY);
    for (int64_t k = 1; k < l; ++k)
        largest = larger(work->logits[k] + work->half[k], largest);
    for (int64_t k = 0; k < l; ++k)
        work->shares[k] = exp_below(work->logits[k] + work->half[k] - largest);
    for (int64_t j = 0; j < l; ++j) {
        lanes sum = all(0.0f);
        for (int64_t k = 0; k < l; ++k)
            sum += work->exponentials[j * l + k] = work->shares[k] * work->kernel[j * l + k];
        smallest_sum = smaller(sum, smallest_sum);
        work->largest[j] = largest;
        work->sums[j] = sum;
    }
    int trusted = 1;
    for (int i = 0; i < LANES; ++i)
        trusted &= !(smallest_sum[i] < work->least);
    return trusted;
}

/* The same in the direct form, which is safe for all logits and interactions. Without a class k != j whose logit is not
 * -inf, the sum is FLT_MIN instead of zero. */
static void direct_sums(int64_t l, struct workspace *work)
{
    for (int64_t j = 0; j < l; ++j) {
        lanes *exponentials = work->exponentials + j * l, largest = all(-FLT_MAX), sum = all(0.0f);
        for (int64_t k = 0; k < l; ++k) {
            lanes exponent = work->logits[k] + (work->half[k] - work->interaction[j * l + k]);
            exponentials[k] = k == j ? all(-INFINITY) : exponent;
            largest = larger(exponentials[k], largest);
        }
        for (int64_t k = 0; k < l; ++k)
            sum += exponentials[k] = exp_below(exponentials[k] - largest);
        work->largest[j] = largest;
        work->sums[j] = select(sum < FLT_MIN, all(FLT_MIN), sum);
    }
}

/* Log-odds o_j = z_j - logsumexp_{k≠j}(z_k + (λ/2) Q[k, j]). Returns Σ weight · logsigmoid(sign · o). Its slopes are
 * multiplied by sign, as a term with sign -1 is subtracted from the loss. */
static double log_odds_block(int64_t l, float sign, struct workspace *work)
{
    if (!(work->least < 1.0f && separable_sums(l, work)))
        direct_sums(l, work);
    lanes terms = all(0.0f);
    for (int64_t j = 0; j < l; ++j) {
        lanes log_odds = work->logits[j] - work->half[j] - (work->largest[j] + log_positive(work->sums[j]));
        lanes signed_log_odds = sign * log_odds, negative_part = smaller(signed_log_odds, all(0.0f));
        negative_part = select(negative_part < -FLT_MAX, all(-FLT_MAX), negative_part); /* finite for weights of zero */
        lanes tail = exp_below(smaller(signed_log_odds, -signed_log_odds));
        terms += work->weights[j] * (negative_part - log1p_unit(tail));
        work->slopes[j] = work->weights[j] * select(signed_log_odds < 0.0f, all(1.0f), tail) / (1.0f + tail);
    }
    double term = 0.0;
    for (int i = 0; i < LANES; ++i)
        term += terms[i];
    return term;
}

/* ∂loss/∂z_k = d_k - Σ_{j≠k} d_j P[k|j], where d = factor · slopes; accumulates d_j P[k|j] in the pairs. */
static void pull_block(int64_t l, float factor, struct workspace *work)
{
    for (int64_t j = 0; j < l; ++j)
        work->grad[j] = factor * work->slopes[j];
    for (int64_t j = 0; j < l; ++j) {
        lanes share = factor * work->slopes[j] / work->sums[j];
        for (int64_t k = 0; k < l; ++k) {
            lanes pulled = share * work->exponentials[j * l + k];
            work->grad[k] -= pulled;
            work->pairs[j * l + k] += pulled;
        }
    }
}

/* Centres the weight: differences of rows are unchanged, and Q suffers less cancellation. */
static void begin_step(const struct step *step, struct workspace *work)
{
    int64_t l = step->num_classes, d = step->num_features;
    memset(work->weight, 0, (size_t)(d * work->width) * sizeof(lanes));
    memset(work->grad_weight, 0, (size_t)(d * work->width) * sizeof(lanes));
    for (int64_t c = 0; c < d; ++c) {
        float *column = (float *)(work->weight + c * work->width), mean = 0.0f;
        for (int64_t j = 0; j < l; ++j)
            mean += step->weight[j * d + c];
        mean /= (float)l;
        for (int64_t j = 0; j < l; ++j)
            column[j] = step->weight[j * d + c] - mean;
    }
}

/* T = W Σ and G = T Wᵀ. */
static void compute_gram(const struct step *step, int64_t y, struct workspace *work)
{
    int64_t l = step->num_classes, d = step->num_features, width = work->width;
    const float *covariance = step->covariance + y * d * (step->diagonal ? 1 : d);
    if (step->diagonal)
        for (int64_t c = 0; c < d; ++c)
            for (int64_t at = 0; at < width; ++at)
                work->product[c * width + at] = work->weight[c * width + at] * covariance[c];
    else
        multiply(work->product, work->weight, (struct matrix){covariance, d, d, d}, width, 0);
    multiply(work->gram, work->product, (struct matrix){(const float *)work->weight, width * LANES, d, l}, width, 0);
    for (int64_t j = 0; j < l; ++j)
        for (int64_t c = 0; c < d; ++c)
            work->rows[j * d + c] = ((const float *)(work->product + c * width))[j];
}

static void begin_class(const struct step *step, int64_t y, struct workspace *work)
{
    int64_t l = step->num_classes, stride = work->width * LANES;
    const float *gram = (const float *)work->gram;
    float constant = 2.0f / (step->beta * step->beta), reach = 0.0f;
    compute_gram(step, y, work);
    for (int64_t j = 0; j < l; ++j) {
        float own = gram[j * stride + j];
        work->half[j] = 0.5f * step->strength * own;
        for (int64_t k = 0; k < l; ++k) {
            float pair = gram[k * stride + j], quadratic = (own + gram[k * stride + k]) - 2.0f * pair;
            quadratic = quadratic < 0.0f ? 0.0f : quadratic;
            float interaction = work->interaction[j * l + k] = step->strength * pair;
            reach = fabsf(interaction) > reach ? fabsf(interaction) : reach;
            work->kernel[j * l + k] = k == j ? 0.0f : expf(-interaction);
            work->scale[j * l + k] = 1.0f / sqrtf(constant + 2.0f * step->strength * quadratic);
        }
    }
    /* A share that underflowed is below exp(-87), and the kernel scales it by at most exp(reach): relative to a sum of
     * at least this size, its contribution is below epsilon. */
    work->least = expf(reach - 87.0f) / FLT_EPSILON;
    memset(work->pairs, 0, (size_t)(l * l) * sizeof(lanes));
}

/* Adds this class to ∂loss/∂W = 2 Σ_y H_y T_y, where H = ∂loss/∂G = diag(S 1) - S with S = D + Dᵀ and
 * D = ∂loss/∂Q = -(λ/2) Σ d_j P[k|j]. */
static void end_class(const struct step *step, struct workspace *work)
{
    int64_t l = step->num_classes, d = step->num_features, stride = work->width * LANES;
    float *grad_gram = (float *)work->gram;
    memset(grad_gram, 0, (size_t)(l * stride) * sizeof(float));
    for (int64_t j = 0; j < l; ++j)
        for (int64_t k = j + 1; k < l; ++k) {
            lanes both = work->pairs[j * l + k] + work->pairs[k * l + j];
            float sum = 0.0f;
            for (int i = 0; i < LANES; ++i)
                sum += both[i];
            sum *= 0.5f * step->strength;
            grad_gram[j * stride + k] = grad_gram[k * stride + j] = sum;
            grad_gram[j * stride + j] -= sum;
            grad_gram[k * stride + k] -= sum;
        }
    multiply(work->grad_weight, work->gram, (struct matrix){work->rows, d, l, d}, work->width, 1);
}

/* Computes the rows of a block with given logits and weights, which contribute to one term, and stores their gradients
 * from `first_row` on or, if the samples have contributed to another term before, adds them. Returns the value of
 * log_odds_block. */
static double finish_rows(const struct step *step, const struct block *block, enum term term, int64_t first_row,
                          int add, struct workspace *work)
{
    int64_t l = step->num_classes;
    double value = log_odds_block(l, term == COMPLEMENTARY ? -1.0f : 1.0f, work);
    if (step->grad_logits || step->grad_weight)
        pull_block(l, step->upstream[term], work);
    if (step->grad_logits)
        store(work->grad, step->grad_logits + first_row * l, block, l, add);
    return value;
}

static void run(const struct step *step, const struct grouping *labeled, const struct grouping *unlabeled,
                struct workspace *work)
{
    int64_t l = step->num_classes, d = step->num_features;
    int64_t strong = step->num_labeled, weak = strong + step->num_unlabeled;
    double terms[3] = {0.0};
    begin_step(step, work);
    for (int64_t y = 0; y < l; ++y) {
        int64_t start = labeled->starts[y], stop = labeled->starts[y + 1];
        int64_t unlabeled_start = unlabeled->starts[y], unlabeled_stop = unlabeled->starts[y + 1];
        if (start == stop && unlabeled_start == unlabeled_stop)
            continue;
        begin_class(step, y, work);
        for (; start < stop; start += LANES) {
            struct block block = take(labeled, start, stop);
            load(work->logits, step->labeled_logits, &block, l);
            choose_labels(step, &block, work);
            terms[SUPERVISED] += finish_rows(step, &block, SUPERVISED, 0, 0, work);
            if (step->labeled_candidates) {
                choose_outside(step, &block, step->labeled_candidates, work);
                terms[COMPLEMENTARY] -= finish_rows(step, &block, COMPLEMENTARY, 0, 1, work);
            }
        }
        for (start = unlabeled_start, stop = unlabeled_stop; start < stop; start += LANES) {
            struct block block = take(unlabeled, start, stop);
            load(work->logits, step->weak_logits, &block, l);
            choose_outside(step, &block, step->candidates, work);
            terms[COMPLEMENTARY] -= finish_rows(step, &block, COMPLEMENTARY, weak, 0, work);
            probit_block(l, work);
            choose_targets(step, &block, work);
            load(work->logits, step->strong_logits, &block, l);
            terms[CONSISTENCY] += finish_rows(step, &block, CONSISTENCY, strong, 0, work);
        }
        if (step->grad_weight)
            end_class(step, work);
    }
    if (step->grad_weight)
        for (int64_t j = 0; j < l; ++j)
            for (int64_t c = 0; c < d; ++c)
                step->grad_weight[j * d + c] = 2.0f * ((const float *)(work->grad_weight + c * work->width))[j];
    *step->total = (float)(step->ss_weight * (terms[SUPERVISED] + terms[CONSISTENCY]) + terms[COMPLEMENTARY]);
    for (int i = 0; i < 3; ++i)
        step->terms[i] = (float)terms[i];
}

enum outcome VERSION(upper_bound)(const struct step *step)
{
    struct workspace work = {0};
    struct grouping labeled = {0}, unlabeled = {0};
    int64_t l = step->num_classes, count = step->num_unlabeled;
    const int64_t *pseudo_labels = step->chosen_labels ? step->chosen_labels : step->pseudo_labels;
    enum outcome outcome = group_by_class(&labeled, step->labels, step->num_labeled, l, BAD_LABELS);
    if (outcome == DONE && step->chosen_labels)
        class_activation_labels(count, l, step->weak_logits, step->candidates, step->chosen_labels);
    if (outcome == DONE)
        outcome = group_by_class(&unlabeled, pseudo_labels, count, l, BAD_PSEUDO_LABELS);
    if (outcome == DONE)
        outcome = allocate(&work, l, step->num_features);
    if (outcome == DONE)
        run(step, &labeled, &unlabeled, &work);
    free(work.memory);
    free(labeled.order);
    free(unlabeled.order);
    return outcome;
}
