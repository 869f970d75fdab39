/* Samples grouped by class. */
#ifndef PLSP_GROUPING_H
#define PLSP_GROUPING_H

#include <stdlib.h>
#include <string.h>

#include "native.h"

static int all_below(const int64_t *numbers, int64_t count, int64_t limit)
{
    int below = 1;
    for (int64_t i = 0; i < count; ++i)
        below &= numbers[i] >= 0 && numbers[i] < limit;
    return below;
}

/* Sample indices sorted by class: those of class y are order[starts[y]] to order[starts[y + 1] - 1]. */
struct grouping {
    int64_t *order, *starts;
};

/* Returns `bad` if a class is out of range. The caller frees groups->order. */
static enum outcome group_by_class(struct grouping *groups, const int64_t *classes, int64_t count, int64_t num_classes,
                                   enum outcome bad)
{
    if (!all_below(classes, count, num_classes))
        return bad;
    groups->order = malloc((size_t)(count + num_classes + 1) * sizeof(int64_t));
    if (groups->order == NULL)
        return NO_MEMORY;
    int64_t *starts = groups->starts = groups->order + count;
    memset(starts, 0, (size_t)(num_classes + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < count; ++i)
        ++starts[classes[i]];
    for (int64_t y = 1; y <= num_classes; ++y)
        starts[y] += starts[y - 1];
    for (int64_t i = count - 1; i >= 0; --i)
        groups->order[--starts[classes[i]]] = i;
    return DONE;
}

#endif
