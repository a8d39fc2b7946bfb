/* zr_products.c -- the order of a CPU's bf16 products. */
#include "zr_checkpoint.h"
#include "zr_fail.h"
#include "zr_memory.h"
#include "zr_options.h"
#include "zr_products.h"
#include "zr_queue.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include <string.h>

/* Return the order that is fastest if every rank supports it. */
static int fastest_order(zr *z)
{
    uint64_t sum[2] = {z->p->products(z->queue[ZR_MAIN].k, -1) == ZR_TILES};
    zr_total(z, sum);
    return sum[0] == (uint64_t)z->ranks ? ZR_TILES : ZR_PAIRS;
}

void zr_settle_order(zr *z)
{
    const char *given = z->o->products;
    z->order = -1;
    if (given && (!z->p->products || zr_is_gpu))
        zr_fail(z, ZR_USER, "--products %s: %s; leave it out", given,
                zr_is_gpu ? "a GPU's products have an order of their own"
                          : "products have two orders in bf16 alone, and this program has another "
                            "type");
    if (!z->p->products && z->p->type == ZR_BF16 && !zr_is_gpu)
        zr_fail(z, ZR_DISAGREE, "made by another version; generate it anew");
    if (!z->p->products) return;
    int past = zr_past_order(z);
    if (zr_is_gpu) {
        z->order = past; /* for a later run that resumes on a CPU */
        return;
    }
    int wanted = !given ? -1 : strcmp(given, zr_order_name(ZR_PAIRS)) ? ZR_TILES : ZR_PAIRS;
    if (wanted >= 0 && z->p->order >= 0 && wanted != z->p->order)
        zr_fail(
            z, ZR_USER,
            "--products %s: the program was made with train.products %s; leave it out, or generate "
            "with train.products auto",
            given, zr_order_name(z->p->order));
    z->order = z->p->order >= 0 ? z->p->order : wanted >= 0 ? wanted : past;
    if (z->order < 0) z->order = fastest_order(z);
    if (past >= 0 && past != z->order && !zr_accepts(z, "train.products"))
        zr_fail(z, ZR_DISAGREE,
                "%s %s: the run in %s sums products by %s; %s, or name another folder "
                "(--accept-change train.products: goes on, with other bits)",
                given ? "--products" : "train.products", zr_order_name(z->order), z->o->checkpoints,
                zr_order_name(past),
                given              ? "leave --products out"
                : past == ZR_PAIRS ? "generate with train.products pairs"
                                   : "generate with train.products tiles");
    z->p->products(z->queue[ZR_MAIN].k, z->order);
}
