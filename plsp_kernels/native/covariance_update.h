/* Running class statistics as derived from equation (17) in torch_impl/covariance_update.py: a scaled Σ plus the outer
 * products of the centred members and of the shift of the mean. The scale m/M is applied as 1 - m'/M, so a small update
 * is rounded only once, in the final addition. */
#include "native.h"

#include <math.h>

#include "grouping.h"
#include "lanes.h"
#include "multiply.h"

/* Moves the samples whose features are all finite to the front of `order`; returns their number. */
static int64_t keep_finite(const struct statistics *state, int64_t *order, int64_t count)
{
    const uint32_t exponent = 0x7f800000u; /* all ones in infinities and NaNs */
    int64_t d = state->num_features, kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        int finite = 1;
        for (int64_t c = 0; c < d; ++c) {
            uint32_t bits;
            memcpy(&bits, state->features + order[i] * d + c, sizeof bits);
            finite &= (bits & exponent) != exponent;
        }
        if (finite)
            order[kept++] = order[i];
    }
    return kept;
}

/* Updates class y with its members order[0] to order[count - 1]. Scratch: `rows` (count + 1, d), `outer` (d, d). */
static void update_class(const struct statistics *state, int64_t y, const int64_t *order, int64_t count, lanes *rows,
                         lanes *outer)
{
    int64_t d = state->num_features, width = width_of(d), stride = width * LANES;
    float *mean = state->mean + y * d, *shift = (float *)(rows + count * width);
    double old = (double)state->count[y], total = old + (double)count;
    float share = (float)(1.0 / total), shift_scale = (float)sqrt(old * (double)count / total), members = (float)count;
    memset(rows, 0, (size_t)((count + 1) * width) * sizeof(lanes));
    for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < d; ++c)
            shift[c] += state->features[order[i] * d + c];
    for (int64_t c = 0; c < d; ++c)
        shift[c] /= members;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < d; ++c)
            ((float *)rows)[i * stride + c] = state->features[order[i] * d + c] - shift[c];
    for (int64_t c = 0; c < d; ++c) {
        shift[c] -= mean[c];
        mean[c] += share * members * shift[c];
        shift[c] *= shift_scale;
    }
    state->count[y] += count;
    if (state->diagonal)
        for (int64_t c = 0; c < d; ++c) {
            float sum = 0.0f, *variance = state->covariance + y * d + c;
            for (int64_t i = 0; i <= count; ++i)
                sum += ((float *)rows)[i * stride + c] * ((float *)rows)[i * stride + c];
            *variance += share * (sum - members * *variance);
        }
    else {
        multiply(outer, rows, (struct matrix){(const float *)rows, stride, count + 1, d}, width, 0);
        for (int64_t a = 0; a < d; ++a)
            for (int64_t c = 0; c < d; ++c) {
                float *element = state->covariance + (y * d + a) * d + c;
                *element += share * (((float *)outer)[a * stride + c] - members * *element);
            }
    }
}

enum outcome VERSION(covariance_update)(const struct statistics *state)
{
    struct grouping groups = {0};
    lanes *rows = NULL;
    enum outcome outcome = group_by_class(&groups, state->labels, state->num_samples, state->num_classes, BAD_LABELS);
    if (outcome == DONE) {
        int64_t vectors = (state->num_samples + 1 + state->num_features) * width_of(state->num_features);
        rows = aligned_alloc(sizeof(lanes), (size_t)vectors * sizeof(lanes));
        outcome = rows == NULL ? NO_MEMORY : DONE;
    }
    for (int64_t y = 0; outcome == DONE && y < state->num_classes; ++y) {
        int64_t *order = groups.order + groups.starts[y], samples = groups.starts[y + 1] - groups.starts[y];
        int64_t members = keep_finite(state, order, samples);
        lanes *outer = rows + (state->num_samples + 1) * width_of(state->num_features);
        state->skipped[y] += samples - members;
        if (members > 0)
            update_class(state, y, order, members, rows, outer);
    }
    free(rows);
    free(groups.order);
    return outcome;
}
