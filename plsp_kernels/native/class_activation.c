#include "native.h"

#include <math.h>

void class_activation_labels(int64_t count, int64_t num_classes, const float *logits, const uint8_t *candidates,
                             int64_t *labels)
{
    for (int64_t i = 0; i < count; ++i) {
        const float *z = logits + i * num_classes;
        const uint8_t *inside = candidates + i * num_classes;
        int64_t best = -1;
        float highest = 0.0f;
        for (int64_t j = 0; j < num_classes; ++j) {
            float value = z[j] * fabsf(z[j] - 1.0f);
            if (inside[j] && (best < 0 || value > highest))
                best = j, highest = value;
        }
        labels[i] = best < 0 ? 0 : best;
    }
}
