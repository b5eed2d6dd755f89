/* AdamW with torch's fused CPU kernel's arithmetic, rounding for rounding (ATen/native/cpu/FusedAdamKernel.cpp), plus
 * what would else be passes of their own: the clipping factor before, and the weights rounded to bfloat16 after.
 *
 * Compile with -ffp-contract=off: every fused multiply-add is written out, so that the bits depend neither on the
 * compiler nor on the width of its vectors. torch's own kernel treats the last n % 8 elements of a tensor differently
 * (there the compiler contracted the second moment the other way round), and so does this one.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float *param, *grad, *exp_avg, *exp_avg_sq;
    uint16_t *rounded; /* bfloat16, or NULL */
    int64_t size;
    float decay;      /* 1 - lr * weight_decay */
    float weight;     /* 1 - beta1, below 0.5 */
    float beta2, rest2; /* beta2, 1 - beta2 */
    float correction; /* sqrt(1 - beta2^step) */
    float eps;
    float move;       /* -lr / (1 - beta1^step) */
} Tensor;

static inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define LOOP(first, last, SECOND_MOMENT, STORE_GRAD, STORE_ROUNDED)                        \
    for (int64_t i = first; i < last; i++) {                                               \
        float g = grad[i] * factor, m = exp_avg[i], v = exp_avg_sq[i];                     \
        m = __builtin_fmaf(weight, g - m, m);                                              \
        v = SECOND_MOMENT;                                                                 \
        float p = param[i] * decay + (move * m) / (sqrtf(v) / correction + eps);           \
        STORE_GRAD;                                                                        \
        exp_avg[i] = m, exp_avg_sq[i] = v, param[i] = p;                                   \
        STORE_ROUNDED;                                                                     \
    }

#define BODY __builtin_fmaf(rest2 * g, g, v * beta2)
#define TAIL __builtin_fmaf(v, beta2, (rest2 * g) * g)

/* Elements [first, last) of a tensor, in one of the two forms. */
#define RANGE(SECOND_MOMENT)                                                               \
    if (rounded && scaled)                                                                 \
        LOOP(first, last, SECOND_MOMENT, grad[i] = g, rounded[i] = to_bfloat16(p))         \
    else if (rounded)                                                                      \
        LOOP(first, last, SECOND_MOMENT, , rounded[i] = to_bfloat16(p))                    \
    else if (scaled)                                                                       \
        LOOP(first, last, SECOND_MOMENT, grad[i] = g, )                                    \
    else                                                                                   \
        LOOP(first, last, SECOND_MOMENT, , )

static void step(const Tensor *t, float factor, int scaled, int64_t first, int64_t last, int is_tail) {
    float *restrict param = t->param, *restrict grad = t->grad;
    float *restrict exp_avg = t->exp_avg, *restrict exp_avg_sq = t->exp_avg_sq;
    uint16_t *restrict rounded = t->rounded;
    const float decay = t->decay, weight = t->weight, beta2 = t->beta2, rest2 = t->rest2;
    const float correction = t->correction, eps = t->eps, move = t->move;
    if (is_tail) {
        RANGE(TAIL)
    } else {
        RANGE(BODY)
    }
}

/* One worker's share of a step: of each tensor the worker-th of `workers` equal parts. Gradients are multiplied by
 * `factor` and stored so if `scaled`; else factor is 1. */
void trainer_adamw(const Tensor *tensors, int64_t count, float factor, int scaled, int64_t worker, int64_t workers) {
    for (int64_t k = 0; k < count; k++) {
        const Tensor *t = &tensors[k];
        const int64_t blocks = t->size / 8;
        step(t, factor, scaled, blocks * worker / workers * 8, blocks * (worker + 1) / workers * 8, 0);
        if (worker == workers - 1)
            step(t, factor, scaled, blocks * 8, t->size, 1);
    }
}
