/* update.h -- one optimizer step for one element, or for several side by side. g is the gradient
 * times `factor`, m and v the states:
 *
 *   AdamW, Adam  m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g*g; p -= lr*m*bias1/(sqrt(v*bias2) + eps)
 *   SGD          p -= lr*g; with momentum m = b1*m + g, p -= lr*m; Nesterov p -= lr*(g + b1*m)
 *   Lion         p -= lr * sign(b1*m + (1-b1)*g); m = b2*m + (1-b2)*g
 *   Adagrad      v += g*g; p -= lr * g / (sqrt(v) + eps)
 *
 * AdamW and Lion first shrink p by lr * decay; the others add decay * p to g.
 *
 * The includer defines first: `lanes`, a float or a vector of them; lanes_set(x), x in each;
 * lanes_fma(a, b, c); lanes_sqrt(x); lanes_sign(x), which is 1, 0 or -1; and ZK_LANES, the
 * qualifiers of a function of lanes.
 *
 * Invariants
 *  1. Only IEEE multiplication, division, square root and explicit FMA in f32 are used, so any
 *     target that has these gives the same bits.
 *  2. A rule reads and writes the states that its row in gen/zg/facts/ops.py lists; the others are
 *     0.
 */
#ifndef ZK_UPDATE_H
#define ZK_UPDATE_H
#include "scalar.h"

/* Return the Philox key for stochastic rounding in a step. The counter is (element / 4, key of the
 * tensor) and word element % 4 is the element's: its lower half rounds m, its upper half v. With
 * ZK_SECOND in the counter, the lower half of the word rounds p. */
#define ZK_SECOND (UINT64_C(1) << 63)
ZK_BOTH uint64_t update_seed(const zk_ctl *ctl, const zk_recipe *r)
{
    return r->seed + (uint64_t)ctl->step * UINT64_C(0xd1342543de82ef95);
}

/* values of zk_recipe.rule: rows of gen/zg/facts/ops.py */
enum { ZK_ADAMW, ZK_ADAM, ZK_SGD, ZK_MOMENTUM, ZK_NESTEROV, ZK_LION, ZK_ADAGRAD };

/* Constants of a step that are the same for all tensors. */
typedef struct step {
    int32_t rule;
    float factor, beta1, rest1, beta2, rest2, bias1, bias2, eps;
} step;

ZK_BOTH step step_of(const zk_ctl *ctl, const zk_recipe *r)
{
    // clang-format off
    step s = {r->rule, ctl->factor, (float)ctl->beta1, (float)(1 - ctl->beta1), (float)r->beta2,
              (float)(1 - r->beta2), ctl->bias1, ctl->bias2, (float)r->eps};
    // clang-format on
    return s;
}

/* Constants of a tensor: its learning rate, its weight decay, and -lr * decay. */
typedef struct pull {
    float lr, decay, shrink;
} pull;

ZK_BOTH pull pull_of(const zk_ctl *ctl, const zk_span *span)
{
    float lr = (float)((double)ctl->lr * span->rate);
    pull own = {lr, (float)span->decay, (float)(-(double)lr * span->decay)};
    return own;
}

/* Adam (Kingma and Ba, 2015). */
ZK_LANES lanes update_adam(const step *s, float lr, lanes p, lanes *m, lanes *v, lanes g)
{
    *m = lanes_fma(lanes_set(s->beta1), *m, s->rest1 * g);
    *v = lanes_fma(lanes_set(s->beta2), *v, s->rest2 * (g * g));
    lanes move = *m * s->bias1 / (lanes_sqrt(*v * s->bias2) + s->eps);
    return lanes_fma(lanes_set(-lr), move, p);
}

/* PyTorch's SGD with momentum, without dampening. ahead: Nesterov's. */
ZK_LANES lanes update_momentum(const step *s, float lr, lanes p, lanes *m, lanes g, int ahead)
{
    lanes beta = lanes_set(s->beta1);
    *m = lanes_fma(beta, *m, g);
    return lanes_fma(lanes_set(-lr), ahead ? lanes_fma(beta, *m, g) : *m, p);
}

/* Lion (Chen and others, 2023). */
ZK_LANES lanes update_lion(const step *s, float lr, lanes p, lanes *m, lanes g)
{
    lanes mean = lanes_fma(lanes_set(s->beta1), *m, s->rest1 * g);
    *m = lanes_fma(lanes_set(s->beta2), *m, s->rest2 * g);
    return lanes_fma(lanes_set(-lr), lanes_sign(mean), p);
}

/* Adagrad (Duchi and others, 2011). */
ZK_LANES lanes update_adagrad(const step *s, float lr, lanes p, lanes *v, lanes g)
{
    *v = lanes_fma(g, g, *v);
    return lanes_fma(lanes_set(-lr), g / (lanes_sqrt(*v) + s->eps), p);
}

/* Return the new p. Weight decay shrinks p itself (AdamW, Lion) or is added to the gradient. */
ZK_LANES lanes update(const step *s, const pull *own, lanes p, lanes *m, lanes *v, lanes g)
{
    g = g * s->factor;
    lanes shrunk = lanes_fma(lanes_set(own->shrink), p, p);
    lanes pulled = lanes_fma(lanes_set(own->decay), p, g);
    switch (s->rule) {
    case ZK_ADAMW: return update_adam(s, own->lr, shrunk, m, v, g);
    case ZK_ADAM: return update_adam(s, own->lr, p, m, v, pulled);
    case ZK_SGD: return lanes_fma(lanes_set(-own->lr), pulled, p);
    case ZK_MOMENTUM: return update_momentum(s, own->lr, p, m, pulled, 0);
    case ZK_NESTEROV: return update_momentum(s, own->lr, p, m, pulled, 1);
    case ZK_LION: return update_lion(s, own->lr, shrunk, m, g);
    default: return update_adagrad(s, own->lr, p, v, pulled);
    }
}

#endif
