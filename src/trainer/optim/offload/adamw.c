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
    float *param;
    const float *grad;
    float *exp_avg, *exp_avg_sq;
    uint16_t *rounded; /* bfloat16, or NULL */
    float *step;       /* takes `count` */
    int64_t size;
    float decay;      /* 1 - lr * weight_decay */
    float weight;     /* 1 - beta1, below 0.5 */
    float beta2, rest2; /* beta2, 1 - beta2 */
    float correction; /* sqrt(1 - beta2^step) */
    float eps;
    float move;       /* -lr / (1 - beta1^step) */
    float count;      /* of this update, from 1 */
} Tensor;

static inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* The second moment as torch's vectors compute it, and as its loop over the last n % 8 elements does. */
#define BODY __builtin_fmaf(rest2 * g, g, v * beta2)
#define TAIL __builtin_fmaf(v, beta2, (rest2 * g) * g)

#define LOOP(SECOND_MOMENT, STORE_ROUNDED)                                                 \
    for (int64_t i = 0; i < size; i++) {                                                   \
        float g = grad[i] * factor, m = exp_avg[i], v = exp_avg_sq[i];                     \
        m = __builtin_fmaf(weight, g - m, m);                                              \
        v = SECOND_MOMENT;                                                                 \
        float p = param[i] * decay + (move * m) / (sqrtf(v) / correction + eps);           \
        exp_avg[i] = m, exp_avg_sq[i] = v, param[i] = p;                                   \
        STORE_ROUNDED;                                                                     \
    }

/* `size` elements from `first` on. Inlined where `size` and `is_tail` are constants. */
static inline __attribute__((always_inline)) void piece(const Tensor *t, float factor, int64_t first, int64_t size,
                                                        int is_tail) {
    float *restrict param = t->param + first;
    const float *restrict grad = t->grad + first;
    float *restrict exp_avg = t->exp_avg + first, *restrict exp_avg_sq = t->exp_avg_sq + first;
    uint16_t *restrict rounded = t->rounded ? t->rounded + first : NULL;
    const float decay = t->decay, weight = t->weight, beta2 = t->beta2, rest2 = t->rest2;
    const float correction = t->correction, eps = t->eps, move = t->move;
    if (is_tail && rounded)
        LOOP(TAIL, rounded[i] = to_bfloat16(p))
    else if (is_tail)
        LOOP(TAIL, )
    else if (rounded)
        LOOP(BODY, rounded[i] = to_bfloat16(p))
    else
        LOOP(BODY, )
}

/* A block is four cache lines of each float array. Asking for the block AHEAD elements further on saves time
 * (`python -m benchmarks offload`): the processor's own prefetching stops at the end of each page, and four arrays end theirs at once. */
enum { BLOCK = 64, LINE = 16, AHEAD = 512 };

static inline __attribute__((always_inline)) void fetch(const Tensor *t, int64_t first) {
    for (int64_t i = first; i < first + BLOCK; i += LINE) {
        __builtin_prefetch(t->param + i, 1);
        __builtin_prefetch(t->grad + i, 0);
        __builtin_prefetch(t->exp_avg + i, 1);
        __builtin_prefetch(t->exp_avg_sq + i, 1);
    }
    if (t->rounded) {
        __builtin_prefetch(t->rounded + first, 1);
        __builtin_prefetch(t->rounded + first + BLOCK / 2, 1);
    }
}

static void step(const Tensor *tensor, float factor, int64_t first, int64_t last) {
    const Tensor t = *tensor; /* a copy, which the stores below cannot change */
    for (; first + BLOCK <= last; first += BLOCK) {
        fetch(&t, first + AHEAD);
        piece(&t, factor, first, BLOCK, 0);
    }
    piece(&t, factor, first, last - first, 0);
}

/* One worker's share of a step: of each tensor the worker-th of `workers` equal parts. */
static void share(const Tensor *tensors, int64_t count, float factor, int64_t worker, int64_t workers) {
    for (int64_t k = 0; k < count; k++) {
        const Tensor *t = &tensors[k];
        const int64_t blocks = t->size / 8;
        step(t, factor, blocks * worker / workers * 8, blocks * (worker + 1) / workers * 8);
        if (worker == workers - 1) {
            piece(t, factor, blocks * 8, t->size - blocks * 8, 1);
            *t->step = t->count;
        }
    }
}

/* A step. Gradients are multiplied by `factor` as they are read (1 changes no bit) and not stored: that would cost an eighth
 * of the step's memory traffic. The threads are OpenMP's, as torch's are: others would find every core taken by those,
 * which wait for their next work without going to sleep. */
void trainer_adamw(const Tensor *tensors, int64_t count, float factor, int64_t workers) {
#pragma omp parallel for num_threads(workers) schedule(static, 1) if (workers > 1)
    for (int64_t worker = 0; worker < workers; worker++)
        share(tensors, count, factor, worker, workers);
}
