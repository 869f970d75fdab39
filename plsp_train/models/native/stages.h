/* The convolution stages of LeNet-5, forward and backward. A stage is a 5×5 convolution, 2×2 max-pooling and a ReLU:
 *
 *   images (C, 32, 32) -> (6, 28, 28) -> middle (6, 14, 14) -> (16, 10, 10) -> features (16, 5, 5)
 *
 * A vector holds one element of LANES images, which form a group. It is full whatever the number of channels; vectors of
 * channels would be mostly empty with 1 and 6 of them. Images are transposed into this layout and features out of it.
 */
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "native.h"

#define UNROLL _Pragma("GCC unroll 8")
#define ROLLED _Pragma("GCC unroll 1")
/* Sums of a block of outputs must stay in registers. Inlined into one function, or with all taps unrolled, the loops below
 * spill and take up to 1.5 times as long. */
#define APART static __attribute__((noinline))
/* Keeps compilers from carrying vectors over to the next tap, which needs more registers than there are. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))

/* The origin of a pooled element is its place in the 2×2 window; NONE if the ReLU is closed. */
enum { NONE = 4 };

/* A gradient of the second convolution has rows of WIDE elements, of which BORDER on either side are zero: what a tap
 * beyond the edge reads. */
enum { BORDER = KERNEL - 1, ROWS = 2 * LAST_SIDE, WIDE = ROWS + 2 * BORDER };

/* Output channels of either stage that are computed together, in four sums each. */
enum { BLOCK1 = 3, BLOCK2 = 2 };

struct work {
    lanes images[MOST_CHANNELS * IMAGE_SIDE * IMAGE_SIDE], features[FEATURES];
    lanes grad_last[LAST * ROWS * WIDE], grad_middle[MIDDLE * MIDDLE_AREA], grad_first[2 * 4 * MIDDLE_AREA];
    lanes grad_weight1[MIDDLE * MOST_CHANNELS * TAPS], grad_bias1[MIDDLE];
    lanes grad_weight2[LAST * MIDDLE * TAPS], grad_bias2[LAST];
    float taps1[MIDDLE * MOST_CHANNELS * TAPS], taps2[LAST * MIDDLE * TAPS];
};

static struct work *new_work(void)
{
    struct work *work = aligned_alloc(64, (sizeof *work + 63) / 64 * 64);
    if (work != NULL)
        memset(work, 0, sizeof *work);
    return work;
}

/* Transposes rows `first` to first + LANES of a (num_rows, size) matrix; rows beyond the end are zero. */
INLINE void load_group(const float *rows, int64_t num_rows, int64_t first, int64_t size, int64_t from, int64_t count,
                       lanes *to)
{
    const float *row = rows + first * size + from;
    for (int64_t i = 0; i < count; ++i) {
        lanes element = {0};
        if (first + LANES <= num_rows)
            for (int lane = 0; lane < LANES; ++lane)
                element[lane] = row[lane * size + i];
        else
            for (int lane = 0; first + lane < num_rows; ++lane)
                element[lane] = row[lane * size + i];
        to[i] = element;
    }
}

static void load_images(const struct stages *net, int64_t first, lanes *images)
{
    const int64_t side = net->side, border = (IMAGE_SIDE - side) / 2, size = net->num_channels * side * side;
    for (int64_t row = 0; row < net->num_channels * side; ++row) {
        const int64_t padded_row = row / side * IMAGE_SIDE + row % side + border;
        load_group(net->images, net->num_images, first, size, row * side, side, images + padded_row * IMAGE_SIDE + border);
    }
}

/* `block` output channels of a stage, from in (num_in, in_side, in_side). taps is (num_in, 5, 5, block). */
INLINE void convolve_and_pool(const lanes *in, int num_in, int in_side, const float *taps, const float *bias,
                              const int block, lanes *out, lane_bits *origins)
{
    const int side = (in_side - KERNEL + 1) / 2;
    for (int y = 0; y < side; ++y)
        for (int x = 0; x < side; ++x) {
            lanes sum[4][BLOCK1];
            for (int place = 0; place < 4; ++place)
                for (int o = 0; o < block; ++o)
                    sum[place][o] = all(bias[o]);
            const float *tap = taps;
            for (int c = 0; c < num_in; ++c)
                for (int ky = 0; ky < KERNEL; ++ky) {
                    const lanes *row = in + (c * in_side + 2 * y + ky) * in_side + 2 * x;
                    ROLLED for (int kx = 0; kx < KERNEL; ++kx, ++row, tap += block) {
                        OPAQUE(row);
                        UNROLL for (int place = 0; place < 4; ++place)
                            UNROLL for (int o = 0; o < block; ++o)
                                sum[place][o] += tap[o] * row[place / 2 * in_side + place % 2];
                    }
                }
            for (int o = 0; o < block; ++o) {
                lanes best = sum[0][o];
                lane_bits origin = {0};
                for (int place = 1; place < 4; ++place) {
                    lane_bits wins = ~(sum[place][o] <= best); /* so that NaN wins */
                    best = select(wins, sum[place][o], best);
                    origin = (wins & place) | (~wins & origin);
                }
                lane_bits closed = best <= 0.0f;
                out[(o * side + y) * side + x] = select(closed, all(0.0f), best);
                origins[(o * side + y) * side + x] = (closed & NONE) | (~closed & origin);
            }
        }
}

APART void first_stage(const lanes *images, int num_channels, const float *taps, const float *bias, lanes *out,
                       lane_bits *origins)
{
    convolve_and_pool(images, num_channels, IMAGE_SIDE, taps, bias, BLOCK1, out, origins);
}

APART void second_stage(const lanes *middle, const float *taps, const float *bias, lanes *out, lane_bits *origins)
{
    convolve_and_pool(middle, MIDDLE, MIDDLE_SIDE, taps, bias, BLOCK2, out, origins);
}

/* (num_out, num_taps) -> (num_out / block, num_taps, block): neighbours are used together. */
static void group_taps(const float *weight, int num_out, int num_taps, int block, float *taps)
{
    for (int o = 0; o < num_out; ++o)
        for (int tap = 0; tap < num_taps; ++tap)
            taps[(o / block * num_taps + tap) * block + o % block] = weight[o * num_taps + tap];
}

int VERSION(stages_forward)(const struct stages *net)
{
    struct work *work = new_work();
    if (work == NULL)
        return 0;
    const int num_channels = (int)net->num_channels;
    group_taps(net->weight1, MIDDLE, num_channels * TAPS, BLOCK1, work->taps1);
    group_taps(net->weight2, LAST, MIDDLE * TAPS, BLOCK2, work->taps2);
    lanes *middle = (lanes *)net->middle;
    lane_bits *origins1 = (lane_bits *)net->origins1, *origins2 = (lane_bits *)net->origins2;
    for (int64_t first = 0; first < net->num_images; first += LANES) {
        load_images(net, first, work->images);
        for (int o = 0; o < MIDDLE; o += BLOCK1)
            first_stage(work->images, num_channels, work->taps1 + o * num_channels * TAPS, net->bias1 + o,
                        middle + o * MIDDLE_AREA, origins1 + o * MIDDLE_AREA);
        for (int o = 0; o < LAST; o += BLOCK2)
            second_stage(middle, work->taps2 + o * MIDDLE * TAPS, net->bias2 + o, work->features + o * LAST_AREA,
                         origins2 + o * LAST_AREA);
        for (int64_t lane = 0; lane < LANES && first + lane < net->num_images; ++lane)
            for (int i = 0; i < FEATURES; ++i)
                net->features[(first + lane) * FEATURES + i] = work->features[i][lane];
        if (net->num_groups > 1) {
            middle += MIDDLE * MIDDLE_AREA;
            origins1 += MIDDLE * MIDDLE_AREA;
            origins2 += FEATURES;
        }
    }
    free(work);
    return 1;
}

/* Moves the gradient of a pooled channel to the origins, in rows of `stride` elements; returns the gradient of its bias. */
INLINE lanes unpool(const lanes *grad, const lane_bits *origins, int side, int stride, lanes *to)
{
    lanes sum = {0};
    for (int y = 0; y < side; ++y)
        for (int x = 0; x < side; ++x) {
            lane_bits origin = origins[y * side + x];
            lanes value = grad[y * side + x];
            for (int place = 0; place < 4; ++place)
                to[(2 * y + place / 2) * stride + 2 * x + place % 2] = select(origin == place, value, all(0.0f));
            sum += select(origin == NONE, all(0.0f), value);
        }
    return sum;
}

/* Adds the gradients of the weights of two output channels, from those of their convolution: channels of grad are
 * `channel` elements apart, rows `stride`. */
INLINE void add_weight_gradients(const lanes *in, int num_in, int in_side, const lanes *grad, int channel, int stride,
                                 lanes *grad_weight)
{
    const int side = in_side - KERNEL + 1;
    for (int c = 0; c < num_in; ++c)
        for (int ky = 0; ky < KERNEL; ++ky) {
            lanes sum[2][KERNEL] = {{{0}}};
            for (int y = 0; y < side; ++y) {
                const lanes *row = in + (c * in_side + y + ky) * in_side, *upstream = grad + y * stride;
                for (int x = 0; x < side; ++x)
                    UNROLL for (int kx = 0; kx < KERNEL; ++kx) {
                        sum[0][kx] += upstream[x] * row[x + kx];
                        sum[1][kx] += upstream[channel + x] * row[x + kx];
                    }
            }
            for (int o = 0; o < 2; ++o)
                for (int kx = 0; kx < KERNEL; ++kx)
                    grad_weight[(o * num_in + c) * TAPS + ky * KERNEL + kx] += sum[o][kx];
        }
}

APART void add_weight_gradients1(const lanes *images, int num_channels, const lanes *grad, lanes *grad_weight)
{
    add_weight_gradients(images, num_channels, IMAGE_SIDE, grad, 4 * MIDDLE_AREA, 2 * MIDDLE_SIDE, grad_weight);
}

APART void add_weight_gradients2(const lanes *middle, const lanes *grad, lanes *grad_weight)
{
    add_weight_gradients(middle, MIDDLE, MIDDLE_SIDE, grad, ROWS * WIDE, WIDE, grad_weight);
}

/* The gradient of the first stage's output. taps is (16, 5, 5, 6). */
APART void middle_gradient(const lanes *grad_last, const float *taps, lanes *grad_middle)
{
    for (int y = 0; y < MIDDLE_SIDE; ++y)
        for (int x = 0; x < MIDDLE_SIDE; x += 2) {
            lanes sum[2][MIDDLE] = {{{0}}};
            for (int o = 0; o < LAST; ++o)
                for (int ky = y < ROWS ? 0 : y - ROWS + 1; ky < KERNEL && ky <= y; ++ky) {
                    const lanes *upstream = grad_last + (o * ROWS + y - ky) * WIDE + BORDER + x;
                    const float *tap = taps + (o * TAPS + ky * KERNEL) * MIDDLE;
                    ROLLED for (int kx = 0; kx < KERNEL; ++kx, tap += MIDDLE)
                        UNROLL for (int c = 0; c < MIDDLE; ++c) {
                            sum[0][c] += tap[c] * upstream[-kx];
                            sum[1][c] += tap[c] * upstream[1 - kx];
                        }
                }
            for (int c = 0; c < MIDDLE; ++c) {
                grad_middle[c * MIDDLE_AREA + y * MIDDLE_SIDE + x] = sum[0][c];
                grad_middle[c * MIDDLE_AREA + y * MIDDLE_SIDE + x + 1] = sum[1][c];
            }
        }
}

static void add_lanes(const lanes *sums, int count, float *totals)
{
    for (int i = 0; i < count; ++i) {
        totals[i] = 0.0f;
        for (int lane = 0; lane < LANES; ++lane)
            totals[i] += sums[i][lane];
    }
}

int VERSION(stages_backward)(const struct stages *net)
{
    struct work *work = new_work();
    if (work == NULL)
        return 0;
    const int num_channels = (int)net->num_channels;
    for (int o = 0; o < LAST; ++o)
        group_taps(net->weight2 + o * MIDDLE * TAPS, MIDDLE, TAPS, MIDDLE, work->taps2 + o * MIDDLE * TAPS);
    const lanes *middle = (const lanes *)net->middle;
    const lane_bits *origins1 = (const lane_bits *)net->origins1, *origins2 = (const lane_bits *)net->origins2;
    for (int64_t first = 0; first < net->num_images; first += LANES) {
        load_group(net->grad_features, net->num_images, first, FEATURES, 0, FEATURES, work->features);
        for (int o = 0; o < LAST; ++o)
            work->grad_bias2[o] += unpool(work->features + o * LAST_AREA, origins2 + o * LAST_AREA, LAST_SIDE, WIDE,
                                          work->grad_last + o * ROWS * WIDE + BORDER);
        for (int o = 0; o < LAST; o += 2)
            add_weight_gradients2(middle, work->grad_last + o * ROWS * WIDE + BORDER,
                                  work->grad_weight2 + o * MIDDLE * TAPS);
        middle_gradient(work->grad_last, work->taps2, work->grad_middle);
        load_images(net, first, work->images);
        for (int c = 0; c < MIDDLE; c += 2) {
            for (int i = 0; i < 2; ++i)
                work->grad_bias1[c + i] +=
                    unpool(work->grad_middle + (c + i) * MIDDLE_AREA, origins1 + (c + i) * MIDDLE_AREA, MIDDLE_SIDE,
                           2 * MIDDLE_SIDE, work->grad_first + i * 4 * MIDDLE_AREA);
            add_weight_gradients1(work->images, num_channels, work->grad_first,
                                  work->grad_weight1 + c * num_channels * TAPS);
        }
        middle += MIDDLE * MIDDLE_AREA;
        origins1 += MIDDLE * MIDDLE_AREA;
        origins2 += FEATURES;
    }
    add_lanes(work->grad_weight1, MIDDLE * num_channels * TAPS, net->grad_weight1);
    add_lanes(work->grad_bias1, MIDDLE, net->grad_bias1);
    add_lanes(work->grad_weight2, LAST * MIDDLE * TAPS, net->grad_weight2);
    add_lanes(work->grad_bias2, LAST, net->grad_bias2);
    free(work);
    return 1;
}
