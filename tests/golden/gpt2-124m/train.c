/* train.c -- gpt2-124m in training, as zgen planned it; do not edit it: regenerate it.
 *
 * Model      124,439,808 parameters, width 768, vocabulary 50257
 * Ranks      2 ranks; ZeRO stage 3: optimizer states, gradients and parameters are sharded over 2
 *            ranks; 121,344 parameters are persistent: whole on each rank; prefetch distance 1
 * Numbers    f32; optimizer AdamW; seed 1
 * Step       4 sequences of 256 tokens: 1 micro-batch of 2 on each rank
 * Recipe     all settings that determine the weights' bits: recipe_lines below
 * Memory     a rank's arena: 1.67 GiB on cpu; 1.99 GiB on sm_80, sm_90, sm_100; 300.52 MiB more
 *            over MPI; about 1.02 GiB beside it on a GPU
 * Wire       a rank receives 746,541,632 bytes in a training step, in 42 collectives
 * Build      as out/train.c: ninja out/train or out/train-mpi for a CPU, ninja out/train-cuda for
 *            GPUs
 * Run        out/train --data tokens.bin --steps 1000; out/train --help has all options
 * From       zgen 0.2.0: zgen gpt2-124m.yaml --set zero.stage=3 --set cluster.ranks=2
 * Plan       cf97c6481218e0e3a0bd8ebe1421262d57e545f119e304b0e659b0801840a3e8, the SHA-256 of the
 *            plan that `--emit plan` writes
 */
#include <stddef.h>
#include <stdint.h>
#include "zk.h"
#include "zr.h"

#if ZK_ABI != 26 || ZR_ABI != 28
#error "generated for another version of the runtime or of the kernels: regenerate it"
#endif
enum { CTL_BYTES = 128 }; /* room for a zk_ctl */
_Static_assert(ZK_SUMS == 72 && ZK_VOCAB == 8 &&
               sizeof(zk_ctl) <= CTL_BYTES && offsetof(zk_ctl, leaves) == 72 &&
               offsetof(zk_ctl, scale) == 80, "sizes in zk.h as planned");

/* ---- dimensions */
enum {
    B = 2,     /* sequences of a micro-batch */
    T = 256,   /* tokens of a sequence */
    M = 512,   /* B * T: tokens of a micro-batch */
    C = 768,   /* the model's width */
    V = 50257, /* size of the vocabulary, in tokens */
    R = 50264, /* V rounded up: rows of the embedding, columns of logits */
    P = 1024,  /* positions */
    H = 12,    /* heads */
    G = 12,    /* key-value heads */
    D = 64,    /* elements of a head */
};

/* ---- memory: where slot i of each class of buffers lies, in bytes of its arena */
#define SLOT(at, bytes, i) (INT64_C(at) + INT64_C(bytes) * (i))
#define SIZE(class) (class(1) - class(0)) /* bytes of a slot */

/* of the arena; INBOX only on a GPU, and over MPI; WORKSPACE only on a GPU */
#define SUMS(i)             SLOT(0, 4096, i)               /* 2: norm, loss, tokens */
#define PARAM_EMBED(i)      SLOT(8192, 78778368, i)        /* 1: parameters */
#define GRAD_EMBED(i)       SLOT(78786560, 157556736, i)   /* 1: gradients */
#define PARAM_BLOCK(i)      SLOT(236343296, 14155776, i)   /* 12: parameters */
#define GRAD_BLOCK(i)       SLOT(406212608, 28311552, i)   /* 2: gradients */
#define PARAM_PERSISTENT(i) SLOT(462835712, 598016, i)     /* 1: parameters */
#define GRAD_PERSISTENT(i)  SLOT(463433728, 598016, i)     /* 1: gradients */
#define CTL(i)              SLOT(464031744, 4096, i)       /* 1: a step's constants */
#define TOKENS(i)           SLOT(464035840, 4096, i)       /* 1: tokens of a micro-batch */
#define TARGETS(i)          SLOT(464039936, 4096, i)       /* 1: their targets */
#define M_EMBED(i)          SLOT(464044032, 78778368, i)   /* 1: first moments */
#define V_EMBED(i)          SLOT(542822400, 78778368, i)   /* 1: second moments */
#define SUM_EMBED(i)        SLOT(621600768, 78778368, i)   /* 1: sums of gradients */
#define RING_EMBED(i)       SLOT(700379136, 157556736, i)  /* 1: gathered parameters */
#define M_BLOCK(i)          SLOT(857935872, 14155776, i)   /* 12: first moments */
#define V_BLOCK(i)          SLOT(1027805184, 14155776, i)  /* 12: second moments */
#define SUM_BLOCK(i)        SLOT(1197674496, 14155776, i)  /* 12: sums of gradients */
#define RING_BLOCK(i)       SLOT(1367543808, 28311552, i)  /* 2: gathered parameters */
#define M_PERSISTENT(i)     SLOT(1424166912, 299008, i)    /* 1: first moments */
#define V_PERSISTENT(i)     SLOT(1424465920, 299008, i)    /* 1: second moments */
#define SUM_PERSISTENT(i)   SLOT(1424764928, 299008, i)    /* 1: sums of gradients */
#define X(i)                SLOT(1425063936, 1572864, i)   /* 13: inputs of units */
#define DX(i)               SLOT(1445511168, 1572864, i)   /* 2: their gradients */
#define SAVE_BLOCK(i)       SLOT(1448656896, 23625728, i)  /* 12: saved for backward */
#define TMP(i)              SLOT(1732165632, 54624256, i)  /* 1: temporary values */
#define WORK(i)             SLOT(1786789888, 4743168, i)   /* 1: kernels' scratch */
#define INBOX(i)            SLOT(1791533056, 157556736, i) /* 2: received gradients */
#define WORKSPACE(i)        SLOT(2106646528, 33554432, i)  /* 1: scratch of launches */
/* of pinned memory of the host; PINNED_BATCH and PINNED_SCRATCH only on a GPU */
#define PINNED_BATCH(i)     SLOT(0, 4096, i)               /* 4: tokens on their way */
#define PINNED_SCRATCH(i)   SLOT(16384, 204800, i)         /* 1: results for the host */

/* ---- events. zr_record marks a place in a queue; zr_wait stops a queue until the newest record
 * issued before it is reached, and passes if there is none. FULL_C(i): the data of slot i of C is
 * there; FREE_C(i): the slot may be overwritten (FREE_RING(0): of every ring); UPDATED(0): the
 * parameters that the device updates are updated (others have a FULL_C); END_Q(0): queue Q has done
 * all that it was given before. Where a GPU replays a section as a graph (zr_replay), the section
 * begins after all earlier commands of all queues, and a wait for them has no effect */
#define END_MAIN(i) (0 + (int)(i))
#define END_SUM(i) (1 + (int)(i))
#define FREE_GRAD_BLOCK(i) (2 + (int)(i))
#define FREE_GRAD_EMBED(i) (4 + (int)(i))
#define FREE_GRAD_PERSISTENT(i) (5 + (int)(i))
#define FREE_INBOX(i) (6 + (int)(i))
#define FREE_RING(i) (8 + (int)(i))
#define FULL_GRAD_BLOCK(i) (9 + (int)(i))
#define FULL_GRAD_EMBED(i) (11 + (int)(i))
#define FULL_GRAD_PERSISTENT(i) (12 + (int)(i))
#define FULL_INBOX(i) (13 + (int)(i))
#define FULL_PARAM_PERSISTENT(i) (15 + (int)(i))
#define FULL_RING_BLOCK(i) (16 + (int)(i))
#define FULL_RING_EMBED(i) (18 + (int)(i))
#define UPDATED(i) (19 + (int)(i))

/* ---- groups of ranks */
enum { GROUP_ALL };

/* ---- launches: one for each kernel and shape (beside it), with a row for each target. tile: rows,
 * elements or (of shards) blocks of 1024 elements of a task on a CPU; on a GPU each kernel defines
 * it. part: x, y and z of each grid on a GPU, threads of a block, bytes of shared memory. The
 * kernel or library chooses the values that a row leaves out */
enum { CPU, SM_80, SM_90, SM_100, COLUMNS };
#define LAUNCH(name) static const zk_launch name[COLUMNS]

LAUNCH(L_embed_fwd_0) = { /* B, T, C */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{512, 1, 1, 192, 0}}},
};
LAUNCH(L_embed_bwd_0) = { /* M, R, C, add = 1 */
    [CPU] = {.tile = {16}},
    [SM_80] = {.part = {{216, 1, 1, 512, 932}, {6283, 6, 1, 256, 0}}},
    [SM_90] = {.part = {{264, 1, 1, 512, 764}, {6283, 6, 1, 256, 0}}},
    [SM_100] = {.part = {{296, 1, 1, 512, 680}, {6283, 6, 1, 256, 0}}},
};
LAUNCH(L_position_bwd_0) = { /* B, T, C, P */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{1024, 1, 1, 192, 0}}},
};
LAUNCH(L_layernorm_fwd_0) = { /* M, C */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.tile = {64, 4}, .part = {{512, 1, 1, 64, 0}}},
};
LAUNCH(L_linear_fwd_0); /* M, 3 * C, C, ZK_IN_OUT */
LAUNCH(L_attention_fwd_0) = { /* B, T, H, G, D */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.tile = {0, 64}, .part = {{4, 12, 2, 256, 69632}}},
};
LAUNCH(L_linear_fwd_1); /* M, C, C, ZK_IN_OUT */
LAUNCH(L_linear_fwd_2); /* M, 4 * C, C, ZK_IN_OUT */
LAUNCH(L_gelu_fwd_0) = { /* M * 4 * C, ZK_GELU_TANH */
    [CPU] = {.tile = {8192}},
    [SM_80 ... SM_100] = {.part = {{1536, 1, 1, 256, 0}}},
};
LAUNCH(L_linear_fwd_3); /* M, C, 4 * C, ZK_IN_OUT */
LAUNCH(L_add_0) = { /* M * C */
    [CPU] = {.tile = {8192}},
    [SM_80 ... SM_100] = {.part = {{384, 1, 1, 256, 0}}},
};
LAUNCH(L_linear_bwd_x_0); /* M, C, 4 * C, ZK_IN_OUT */
LAUNCH(L_linear_bwd_w_0); /* M, C, 4 * C, ZK_IN_OUT, full = 0, carry = 0 */
LAUNCH(L_linear_bwd_b_0) = { /* M, C */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{6, 16, 1, 256, 0}, {6, 1, 1, 128, 0}}},
};
LAUNCH(L_gelu_bwd_0) = { /* M * 4 * C, ZK_GELU_TANH */
    [CPU] = {.tile = {8192}},
    [SM_80 ... SM_100] = {.part = {{1536, 1, 1, 256, 0}}},
};
LAUNCH(L_linear_bwd_x_1); /* M, 4 * C, C, ZK_IN_OUT */
LAUNCH(L_linear_bwd_w_1); /* M, 4 * C, C, ZK_IN_OUT, full = 0, carry = 0 */
LAUNCH(L_linear_bwd_b_1) = { /* M, 4 * C */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{24, 16, 1, 256, 0}, {24, 1, 1, 128, 0}}},
};
LAUNCH(L_layernorm_bwd_0) = { /* M, C */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.tile = {64, 4}, .part = {{64, 1, 1, 64, 0}, {24, 2, 1, 1024, 0}}},
};
LAUNCH(L_linear_bwd_x_2); /* M, C, C, ZK_IN_OUT */
LAUNCH(L_linear_bwd_w_2); /* M, C, C, ZK_IN_OUT, full = 0, carry = 0 */
LAUNCH(L_attention_bwd_0) = { /* B, T, H, G, D */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.tile = {0, 64},
        .part = {{768, 1, 1, 256, 0}, {4, 12, 2, 256, 69632}, {4, 12, 2, 256, 69632}}},
};
LAUNCH(L_linear_bwd_x_3); /* M, 3 * C, C, ZK_IN_OUT */
LAUNCH(L_linear_bwd_w_3); /* M, 3 * C, C, ZK_IN_OUT, full = 0, carry = 0 */
LAUNCH(L_linear_bwd_b_2) = { /* M, 3 * C */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{18, 16, 1, 256, 0}, {18, 1, 1, 128, 0}}},
};
LAUNCH(L_linear_fwd_4); /* M / 2, R, C, ZK_OUT_IN */
LAUNCH(L_cross_entropy_0) = { /* M / 2, V, M */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{256, 1, 1, 512, 0}}},
};
LAUNCH(L_linear_bwd_x_4); /* M / 2, R, C, ZK_OUT_IN */
LAUNCH(L_linear_bwd_w_4); /* M / 2, R, C, ZK_OUT_IN, full = 1 */
LAUNCH(L_loss_sum_0) = { /* M */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{1, 1, 1, 512, 0}}},
};
LAUNCH(L_pick_0) = { /* M, C */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{1, 1, 1, 256, 0}}},
};
LAUNCH(L_linear_fwd_5); /* M = 1, R, C, ZK_OUT_IN */
LAUNCH(L_push_0) = { /* SHARD_EMBED */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{4096, 1, 1, 256, 0}}},
};
LAUNCH(L_square_sum_0) = { /* SHARD_EMBED */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{602, 1, 1, 128, 0}}},
};
LAUNCH(L_update_0) = { /* SHARD_EMBED */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{2405, 1, 1, 256, 0}}},
};
LAUNCH(L_init_0) = { /* SHARD_EMBED */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{2405, 1, 1, 256, 0}}},
};
LAUNCH(L_hash_0) = { /* SHARD_EMBED */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{151, 1, 1, 128, 0}}},
};
LAUNCH(L_push_1) = { /* SHARD_BLOCK */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{3456, 1, 1, 256, 0}}},
};
LAUNCH(L_square_sum_1) = { /* SHARD_BLOCK */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{108, 1, 1, 128, 0}}},
};
LAUNCH(L_update_1) = { /* SHARD_BLOCK */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{432, 1, 1, 256, 0}}},
};
LAUNCH(L_init_1) = { /* SHARD_BLOCK */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{432, 1, 1, 256, 0}}},
};
LAUNCH(L_hash_1) = { /* SHARD_BLOCK */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{27, 1, 1, 128, 0}}},
};
LAUNCH(L_push_2) = { /* SHARD_PERSISTENT */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{73, 1, 1, 256, 0}}},
};
LAUNCH(L_square_sum_2) = { /* SHARD_PERSISTENT */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{3, 1, 1, 128, 0}}},
};
LAUNCH(L_update_2) = { /* SHARD_PERSISTENT */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{10, 1, 1, 256, 0}}},
};
LAUNCH(L_init_2) = { /* SHARD_PERSISTENT */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{10, 1, 1, 256, 0}}},
};
LAUNCH(L_hash_2) = { /* SHARD_PERSISTENT */
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{1, 1, 1, 128, 0}}},
};
LAUNCH(L_begin_0) = {
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{1, 1, 1, 96, 0}}},
};
LAUNCH(L_count_0) = {
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{1, 1, 1, 32, 0}}},
};
LAUNCH(L_factor_0) = {
    [CPU] = {.tile = {16}},
    [SM_80 ... SM_100] = {.part = {{1, 1, 1, 32, 0}}},
};

/* ---- flat buffers of parameters, in elements */
enum {
    FLAT_EMBED = 39389184,    /* of an instance; instances: 1 */
    SHARD_EMBED = 19694592,   /* of a shard */
    FLAT_BLOCK = 7077888,     /* of an instance; instances: 12 */
    SHARD_BLOCK = 3538944,    /* of a shard */
    FLAT_PERSISTENT = 149504, /* of an instance; instances: 1 */
    SHARD_PERSISTENT = 74752, /* of a shard */
    PERSISTENT_BLOCK = 12288, /* of it, for each block */
};

/* ---- tensors of each flat (zk_span): at, elems, count, stride, key, key_stride; initial mean and
 * standard deviation, factor of the learning rate, weight decay. Elements between tensors are
 * padding, on which no tensor depends */
static const zk_span spans_embed[] = {
    {0, 38597376, 1, 0, 0, 2, /* wte.weight */
     0.0f, 0x1.47ae147ae147bp-6f /* 0.02 */, 1.0, 0x1.999999999999ap-4 /* 0.1 */},
    {38602752, 786432, 1, 0, 1, 2, /* wpe.weight */
     0.0f, 0x1.47ae147ae147bp-7f /* 0.01 */, 1.0, 0x1.999999999999ap-4 /* 0.1 */},
};
static const zk_span spans_block[] = {
    {0, 1769472, 12, 7077888, 4, 12, /* h.{l}.attn.c_attn.weight */
     0.0f, 0x1.47ae147ae147bp-6f /* 0.02 */, 1.0, 0x1.999999999999ap-4 /* 0.1 */},
    {1769472, 589824, 12, 7077888, 6, 12, /* h.{l}.attn.c_proj.weight */
     0.0f, 0x1.0b8cb28fd8cf5p-8f /* 0.00408248 */, 1.0, 0x1.999999999999ap-4 /* 0.1 */},
    {2359296, 2359296, 12, 7077888, 10, 12, /* h.{l}.mlp.c_fc.weight */
     0.0f, 0x1.47ae147ae147bp-6f /* 0.02 */, 1.0, 0x1.999999999999ap-4 /* 0.1 */},
    {4718592, 2359296, 12, 7077888, 12, 12, /* h.{l}.mlp.c_proj.weight */
     0.0f, 0x1.0b8cb28fd8cf5p-8f /* 0.00408248 */, 1.0, 0x1.999999999999ap-4 /* 0.1 */},
};
static const zk_span spans_persistent[] = {
    {0, 768, 12, 12288, 2, 12, /* h.{l}.ln_1.weight */
     1.0f, 0.0f, 1.0, 0.0},
    {1024, 768, 12, 12288, 3, 12, /* h.{l}.ln_1.bias */
     0.0f, 0.0f, 1.0, 0.0},
    {2048, 2304, 12, 12288, 5, 12, /* h.{l}.attn.c_attn.bias */
     0.0f, 0.0f, 1.0, 0.0},
    {5120, 768, 12, 12288, 7, 12, /* h.{l}.attn.c_proj.bias */
     0.0f, 0.0f, 1.0, 0.0},
    {6144, 768, 12, 12288, 8, 12, /* h.{l}.ln_2.weight */
     1.0f, 0.0f, 1.0, 0.0},
    {7168, 768, 12, 12288, 9, 12, /* h.{l}.ln_2.bias */
     0.0f, 0.0f, 1.0, 0.0},
    {8192, 3072, 12, 12288, 11, 12, /* h.{l}.mlp.c_fc.bias */
     0.0f, 0.0f, 1.0, 0.0},
    {11264, 768, 12, 12288, 13, 12, /* h.{l}.mlp.c_proj.bias */
     0.0f, 0.0f, 1.0, 0.0},
    {147456, 768, 1, 0, 146, 2, /* ln_f.weight */
     1.0f, 0.0f, 1.0, 0.0},
    {148480, 768, 1, 0, 147, 2, /* ln_f.bias */
     0.0f, 0.0f, 1.0, 0.0},
};

/* ---- recipe; phases of rate and momentum: until, origin, span, from, to, curve, stairs */
static const zk_recipe recipe = {
    .rate = {
        {100, 0, 100, 0.0, 0x1.3a92a30553261p-12 /* 0.0003 */, ZK_LINE, 0},
        {2000, 100, 1900, 0x1.3a92a30553261p-12 /* 0.0003 */, 0x1.f75104d551d69p-16 /* 3e-05 */,
            ZK_COSINE, 0},
        {0, 0, 1, 0x1.f75104d551d69p-16 /* 3e-05 */, 0x1.f75104d551d69p-16 /* 3e-05 */, ZK_LINE, 0},
    },
    .momentum = {
        {0, 0, 1, 0x1.ccccccccccccdp-1 /* 0.9 */, 0x1.ccccccccccccdp-1 /* 0.9 */, ZK_LINE, 0},
    },
    .beta2 = 0x1.e666666666666p-1 /* 0.95 */,
    .eps = 0x1.5798ee2308c3ap-27 /* 1e-08 */,
    .clip = 1.0,
    .rule = 0 /* AdamW */,
    .moments = ZK_F32,
    .rows = 512,
    .seed = 1,
};

/* ---- functions: the kernel calls of a unit's forward and backward, of sums and of the optimizer.
 * k: the queue's kernels, a: the arena, i: the operands of the call; AT(n): operand n, a place in
 * the arena; HOST(n): operand n, a pointer */
#define FN(name) static void name(UNUSED zr *z, void *k, UNUSED void *a, \
                             UNUSED const int64_t *i)
#define UNUSED __attribute__((unused))
#define AT(n) zr_at(z, k, a, i, n, __func__)
#define HOST(n) ((void *)(intptr_t)i[n])
#define LEN(array) ((int64_t)(sizeof array / sizeof *array))
#define RANK ((int64_t)zr_rank(z))

/* ---- embed */
/* byte offsets from w (parameters) and dw (gradients) */
enum {
    WTE_W = 0,         /* (R, C) */
    WPE_W = 154411008, /* (P, C) */
};

/* forward of embed: w -> y (B, T, C) */
FN(fwd_embed)
{
    void *w = AT(0), *y = AT(1), *tokens = a + TOKENS(0);
    zk_embed_fwd(k, L_embed_fwd_0, y, tokens, w + WTE_W, w + WPE_W, B, T, C);
}

/* backward of embed: dy (M, C) -> dw */
FN(bwd_embed)
{
    void *dy = AT(0), *dw = AT(1), *tokens = a + TOKENS(0), *work = a + WORK(0);
    zk_embed_bwd(k, L_embed_bwd_0, dw + WTE_W, dy, tokens, work, M, R, C, 1 /* add */);
    zk_position_bwd(k, L_position_bwd_0, dw + WPE_W, dy, B, T, C, P);
}

/* ---- block */
/* byte offsets from w (parameters) and dw (gradients) */
enum {
    C_ATTN_W = 0,            /* (C, 3 * C) */
    ATTN_C_PROJ_W = 7077888, /* (C, C) */
    C_FC_W = 9437184,        /* (C, 4 * C) */
    MLP_C_PROJ_W = 18874368, /* (4 * C, C) */
};
/* byte offsets from p (parameters) and dp (gradients) */
enum {
    LN_1_W = 0,            /* (C) */
    LN_1_B = 4096,         /* (C) */
    C_ATTN_B = 8192,       /* (3 * C) */
    ATTN_C_PROJ_B = 20480, /* (C) */
    LN_2_W = 24576,        /* (C) */
    LN_2_B = 28672,        /* (C) */
    C_FC_B = 32768,        /* (4 * C) */
    MLP_C_PROJ_B = 45056,  /* (C) */
};
/* byte offsets from s (saved for backward) */
enum {
    LN_1 = 0,                /* (M, C) */
    LN_1_STAT = 1572864,     /* (M, 2) f32 */
    C_ATTN = 1576960,        /* (M, 3 * C) */
    ATTENTION = 6295552,     /* (M, H, D) */
    ATTENTION_LSE = 7868416, /* (B, H, T) f32 */
    RESIDUAL = 7892992,      /* (M, C) */
    LN_2 = 9465856,          /* (M, C) */
    LN_2_STAT = 11038720,    /* (M, 2) f32 */
    C_FC = 11042816,         /* (M, 4 * C) */
    GELU = 17334272,         /* (M, 4 * C) */
};

/* forward of block: w, p, x (M, C) -> y (M, C), s */
FN(fwd_block)
{
    enum {
        ATTN_C_PROJ = 0,          /* (M, C) */
        MLP_C_PROJ = ATTN_C_PROJ, /* (M, C) */
    };
    void *w = AT(0), *p = AT(1), *x = AT(2), *y = AT(3), *s = AT(4), *tmp = a + TMP(0);
    zk_layernorm_fwd(k, L_layernorm_fwd_0, s + LN_1, s + LN_1_STAT, NULL, x, NULL, p + LN_1_W,
        p + LN_1_B, M, C, (float)1e-05 /* eps */);
    zk_linear_fwd(k, L_linear_fwd_0, s + C_ATTN, s + LN_1, w + C_ATTN_W, p + C_ATTN_B, M, 3 * C, C,
        ZK_IN_OUT);
    zk_attention_fwd(k, L_attention_fwd_0, s + ATTENTION, s + ATTENTION_LSE, s + C_ATTN, B, T, H, G,
        D, (float)0.125 /* scale */);
    zk_linear_fwd(k, L_linear_fwd_1, tmp + ATTN_C_PROJ, s + ATTENTION, w + ATTN_C_PROJ_W,
        p + ATTN_C_PROJ_B, M, C, C, ZK_IN_OUT);
    zk_layernorm_fwd(k, L_layernorm_fwd_0, s + LN_2, s + LN_2_STAT, s + RESIDUAL, x,
        tmp + ATTN_C_PROJ, p + LN_2_W, p + LN_2_B, M, C, (float)1e-05 /* eps */);
    zk_linear_fwd(k, L_linear_fwd_2, s + C_FC, s + LN_2, w + C_FC_W, p + C_FC_B, M, 4 * C, C,
        ZK_IN_OUT);
    zk_gelu_fwd(k, L_gelu_fwd_0, s + GELU, s + C_FC, M * 4 * C, ZK_GELU_TANH);
    zk_linear_fwd(k, L_linear_fwd_3, tmp + MLP_C_PROJ, s + GELU, w + MLP_C_PROJ_W, p + MLP_C_PROJ_B,
        M, C, 4 * C, ZK_IN_OUT);
    zk_add(k, L_add_0, y, s + RESIDUAL, tmp + MLP_C_PROJ, M * C);
}

/* backward of block: w, p, x (M, C), dy (M, C), s -> dx (M, C), dw, dp */
FN(bwd_block)
{
    enum {
        D_GELU = 0,           /* (M, 4 * C) */
        D_C_FC = D_GELU,      /* (M, 4 * C) */
        D_LN_2 = 6291456,     /* (M, C) */
        D_RESIDUAL = 4718592, /* (M, C) */
        D_ATTENTION = D_LN_2, /* (M, C) */
        D_C_ATTN = D_GELU,    /* (M, 3 * C) */
        D_LN_1 = D_LN_2,      /* (M, C) */
    };
    void *w = AT(0), *p = AT(1), *x = AT(2), *dy = AT(3), *s = AT(4), *dx = AT(5), *dw = AT(6),
        *dp = AT(7), *tmp = a + TMP(0), *work = a + WORK(0);
    zk_linear_bwd_x(k, L_linear_bwd_x_0, tmp + D_GELU, dy, w + MLP_C_PROJ_W, M, C, 4 * C,
        ZK_IN_OUT);
    zk_linear_bwd_w(k, L_linear_bwd_w_0, dw + MLP_C_PROJ_W, dy, s + GELU, M, C, 4 * C, ZK_IN_OUT,
        0 /* full */, 0 /* carry */);
    zk_linear_bwd_b(k, L_linear_bwd_b_0, dp + MLP_C_PROJ_B, dy, M, C);
    zk_gelu_bwd(k, L_gelu_bwd_0, tmp + D_C_FC, tmp + D_GELU, s + C_FC, M * 4 * C, ZK_GELU_TANH);
    zk_linear_bwd_x(k, L_linear_bwd_x_1, tmp + D_LN_2, tmp + D_C_FC, w + C_FC_W, M, 4 * C, C,
        ZK_IN_OUT);
    zk_linear_bwd_w(k, L_linear_bwd_w_1, dw + C_FC_W, tmp + D_C_FC, s + LN_2, M, 4 * C, C,
        ZK_IN_OUT, 0 /* full */, 0 /* carry */);
    zk_linear_bwd_b(k, L_linear_bwd_b_1, dp + C_FC_B, tmp + D_C_FC, M, 4 * C);
    zk_layernorm_bwd(k, L_layernorm_bwd_0, tmp + D_RESIDUAL, dp + LN_2_W, dp + LN_2_B, tmp + D_LN_2,
        dy, s + RESIDUAL, s + LN_2_STAT, p + LN_2_W, work, M, C);
    zk_linear_bwd_x(k, L_linear_bwd_x_2, tmp + D_ATTENTION, tmp + D_RESIDUAL, w + ATTN_C_PROJ_W, M,
        C, C, ZK_IN_OUT);
    zk_linear_bwd_w(k, L_linear_bwd_w_2, dw + ATTN_C_PROJ_W, tmp + D_RESIDUAL, s + ATTENTION, M, C,
        C, ZK_IN_OUT, 0 /* full */, 0 /* carry */);
    zk_linear_bwd_b(k, L_linear_bwd_b_0, dp + ATTN_C_PROJ_B, tmp + D_RESIDUAL, M, C);
    zk_attention_bwd(k, L_attention_bwd_0, tmp + D_C_ATTN, tmp + D_ATTENTION, s + ATTENTION,
        s + C_ATTN, s + ATTENTION_LSE, work, B, T, H, G, D, (float)0.125 /* scale */);
    zk_linear_bwd_x(k, L_linear_bwd_x_3, tmp + D_LN_1, tmp + D_C_ATTN, w + C_ATTN_W, M, 3 * C, C,
        ZK_IN_OUT);
    zk_linear_bwd_w(k, L_linear_bwd_w_3, dw + C_ATTN_W, tmp + D_C_ATTN, s + LN_1, M, 3 * C, C,
        ZK_IN_OUT, 0 /* full */, 0 /* carry */);
    zk_linear_bwd_b(k, L_linear_bwd_b_2, dp + C_ATTN_B, tmp + D_C_ATTN, M, 3 * C);
    zk_layernorm_bwd(k, L_layernorm_bwd_0, dx, dp + LN_1_W, dp + LN_1_B, tmp + D_LN_1,
        tmp + D_RESIDUAL, x, s + LN_1_STAT, p + LN_1_W, work, M, C);
}

/* ---- head */
/* byte offsets from p (parameters) and dp (gradients) */
enum {
    LN_F_W = 589824, /* (C) */
    LN_F_B = 593920, /* (C) */
};

/* forward, loss and backward of head: w, p, x (M, C) -> dx (M, C), dw, dp */
FN(train_head)
{
    enum {
        LN_F = 51470336,              /* (M, C) */
        LN_F_STAT = 54616064,         /* (M, 2) f32 */
        LOGITS = 0,                   /* (M / 2, R) */
        LOSS = 54620160,              /* (M) f32 */
        D_LN_F = 53043200,            /* (M, C) */
        LN_F_STRIDE = 786432,         /* (M / 2, C) */
        LOSS_STRIDE = 1024,           /* (M / 2) f32 */
        TARGETS_STRIDE = LOSS_STRIDE, /* (M / 2) i32 */
        D_LN_F_STRIDE = LN_F_STRIDE,  /* (M / 2, C) */
    };
    void *w = AT(0), *p = AT(1), *x = AT(2), *dx = AT(3), *dw = AT(4), *dp = AT(5),
        *sums = a + SUMS(0), *targets = a + TARGETS(0), *tmp = a + TMP(0), *work = a + WORK(0);
    zk_layernorm_fwd(k, L_layernorm_fwd_0, tmp + LN_F, tmp + LN_F_STAT, NULL, x, NULL, p + LN_F_W,
        p + LN_F_B, M, C, (float)1e-05 /* eps */);
    for (int64_t c = 0; c < 2; c++) {
        zk_linear_fwd(k, L_linear_fwd_4, tmp + LOGITS, tmp + LN_F + c * LN_F_STRIDE, w + WTE_W,
            NULL, M / 2, R, C, ZK_OUT_IN);
        zk_cross_entropy(k, L_cross_entropy_0, tmp + LOSS + c * LOSS_STRIDE, tmp + LOGITS,
            tmp + LOGITS, targets + c * TARGETS_STRIDE, NULL, M / 2, V, M);
        zk_linear_bwd_x(k, L_linear_bwd_x_4, tmp + D_LN_F + c * D_LN_F_STRIDE, tmp + LOGITS,
            w + WTE_W, M / 2, R, C, ZK_OUT_IN);
        zk_linear_bwd_w(k, L_linear_bwd_w_4, dw + WTE_W, tmp + LOGITS, tmp + LN_F + c * LN_F_STRIDE,
            M / 2, R, C, ZK_OUT_IN, 1 /* full */, c);
    }
    zk_loss_sum(k, L_loss_sum_0, sums, tmp + LOSS, targets, M);
    zk_layernorm_bwd(k, L_layernorm_bwd_0, dx, dp + LN_F_W, dp + LN_F_B, tmp + D_LN_F, NULL, x,
        tmp + LN_F_STAT, p + LN_F_W, work, M, C);
}

/* forward and loss of head: w, p, x (M, C) */
FN(eval_head)
{
    enum {
        LN_F = 51470336,              /* (M, C) */
        LN_F_STAT = 0,                /* (M, 2) f32 */
        LOGITS = LN_F_STAT,           /* (M / 2, R) */
        LOSS = 53043200,              /* (M) f32 */
        ROW = 201088,                 /* (C) */
        DRAWN = LN_F_STAT,            /* (1, R) */
        LN_F_STRIDE = 786432,         /* (M / 2, C) */
        LOSS_STRIDE = 1024,           /* (M / 2) f32 */
        TARGETS_STRIDE = LOSS_STRIDE, /* (M / 2) i32 */
    };
    void *w = AT(0), *p = AT(1), *x = AT(2), *sums = a + SUMS(0), *targets = a + TARGETS(0),
        *tmp = a + TMP(0);
    zk_layernorm_fwd(k, L_layernorm_fwd_0, tmp + LN_F, tmp + LN_F_STAT, NULL, x, NULL, p + LN_F_W,
        p + LN_F_B, M, C, (float)1e-05 /* eps */);
    for (int64_t c = 0; c < 2; c++) {
        zk_linear_fwd(k, L_linear_fwd_4, tmp + LOGITS, tmp + LN_F + c * LN_F_STRIDE, w + WTE_W,
            NULL, M / 2, R, C, ZK_OUT_IN);
        zk_cross_entropy(k, L_cross_entropy_0, tmp + LOSS + c * LOSS_STRIDE, NULL, tmp + LOGITS,
            targets + c * TARGETS_STRIDE, NULL, M / 2, V, M);
    }
    zk_loss_sum(k, L_loss_sum_0, sums, tmp + LOSS, targets, M);
    zk_pick(k, L_pick_0, tmp + ROW, tmp + LN_F, targets, M, C);
    zk_linear_fwd(k, L_linear_fwd_5, tmp + DRAWN, tmp + ROW, w + WTE_W, NULL, 1 /* M */, R, C,
        ZK_OUT_IN);
}

/* adds the ranks' gradients of embed: sources -> node; n elements */
FN(sum_embed)
{
    void *node = AT(1), *ctl = a + CTL(0);
    const void *const *sources = zr_sources(z, i[0]);
    int64_t n = i[2];
    zk_push(k, L_push_0, node, SHARD_EMBED, sources, 2 /* count */, 0 /* full */, n, ctl,
        2 /* total */, 0 /* mask */, 2 /* block */);
}

/* square of the gradient norm of embed: g; SHARD_EMBED elements */
FN(norm_embed)
{
    void *g = AT(0), *sums = a + SUMS(0);
    int64_t l = i[1];
    zk_square_sum(k, L_square_sum_0, sums, g, spans_embed, LEN(spans_embed),
        l * FLAT_EMBED + RANK * SHARD_EMBED, SHARD_EMBED, 1 /* full */);
}

/* optimizer step of embed: g -> p, m, v; SHARD_EMBED elements */
FN(update_embed)
{
    void *g = AT(0), *p = AT(1), *m = AT(2), *v = AT(3), *ctl = a + CTL(0);
    int64_t l = i[4];
    zk_update(k, L_update_0, ctl, &recipe, NULL, p, m, v, g, spans_embed, LEN(spans_embed),
        l * FLAT_EMBED + RANK * SHARD_EMBED, SHARD_EMBED, 1 /* full */);
}

/* initial values of embed -> p; SHARD_EMBED elements */
FN(init_embed)
{
    void *p = AT(0);
    int64_t l = i[1];
    zk_init(k, L_init_0, p, spans_embed, LEN(spans_embed), l * FLAT_EMBED + RANK * SHARD_EMBED,
        SHARD_EMBED, 1 /* seed */, 1 /* full */);
}

/* hash of embed: p; SHARD_EMBED elements */
FN(hash_embed)
{
    void *p = AT(0), *out = HOST(2);
    int64_t l = i[1];
    zk_hash(k, L_hash_0, out, p, spans_embed, LEN(spans_embed), l * FLAT_EMBED + RANK * SHARD_EMBED,
        SHARD_EMBED, 1 /* full */);
}

/* adds the ranks' gradients of block: sources -> node; n elements */
FN(sum_block)
{
    void *node = AT(1), *ctl = a + CTL(0);
    const void *const *sources = zr_sources(z, i[0]);
    int64_t n = i[2];
    zk_push(k, L_push_1, node, SHARD_BLOCK, sources, 2 /* count */, 0 /* full */, n, ctl,
        2 /* total */, 0 /* mask */, 2 /* block */);
}

/* square of the gradient norm of block: g; SHARD_BLOCK elements */
FN(norm_block)
{
    void *g = AT(0), *sums = a + SUMS(0);
    int64_t l = i[1];
    zk_square_sum(k, L_square_sum_1, sums, g, spans_block, LEN(spans_block),
        l * FLAT_BLOCK + RANK * SHARD_BLOCK, SHARD_BLOCK, 1 /* full */);
}

/* optimizer step of block: g -> p, m, v; SHARD_BLOCK elements */
FN(update_block)
{
    void *g = AT(0), *p = AT(1), *m = AT(2), *v = AT(3), *ctl = a + CTL(0);
    int64_t l = i[4];
    zk_update(k, L_update_1, ctl, &recipe, NULL, p, m, v, g, spans_block, LEN(spans_block),
        l * FLAT_BLOCK + RANK * SHARD_BLOCK, SHARD_BLOCK, 1 /* full */);
}

/* initial values of block -> p; SHARD_BLOCK elements */
FN(init_block)
{
    void *p = AT(0);
    int64_t l = i[1];
    zk_init(k, L_init_1, p, spans_block, LEN(spans_block), l * FLAT_BLOCK + RANK * SHARD_BLOCK,
        SHARD_BLOCK, 1 /* seed */, 1 /* full */);
}

/* hash of block: p; SHARD_BLOCK elements */
FN(hash_block)
{
    void *p = AT(0), *out = HOST(2);
    int64_t l = i[1];
    zk_hash(k, L_hash_1, out, p, spans_block, LEN(spans_block), l * FLAT_BLOCK + RANK * SHARD_BLOCK,
        SHARD_BLOCK, 1 /* full */);
}

/* adds the ranks' gradients of persistent: sources -> node; n elements */
FN(sum_persistent)
{
    void *node = AT(1), *ctl = a + CTL(0);
    const void *const *sources = zr_sources(z, i[0]);
    int64_t n = i[2];
    zk_push(k, L_push_2, node, SHARD_PERSISTENT, sources, 2 /* count */, 0 /* full */, n, ctl,
        2 /* total */, 0 /* mask */, 2 /* block */);
}

/* square of the gradient norm of persistent: g; SHARD_PERSISTENT elements */
FN(norm_persistent)
{
    void *g = AT(0), *sums = a + SUMS(0);
    int64_t l = i[1];
    zk_square_sum(k, L_square_sum_2, sums, g, spans_persistent, LEN(spans_persistent),
        l * FLAT_PERSISTENT + RANK * SHARD_PERSISTENT, SHARD_PERSISTENT, 1 /* full */);
}

/* optimizer step of persistent: g -> p, m, v; SHARD_PERSISTENT elements */
FN(update_persistent)
{
    void *g = AT(0), *p = AT(1), *m = AT(2), *v = AT(3), *ctl = a + CTL(0);
    int64_t l = i[4];
    zk_update(k, L_update_2, ctl, &recipe, NULL, p + RANK * 4 * SHARD_PERSISTENT, m, v, g,
        spans_persistent, LEN(spans_persistent), l * FLAT_PERSISTENT + RANK * SHARD_PERSISTENT,
        SHARD_PERSISTENT, 1 /* full */);
}

/* initial values of persistent -> p; SHARD_PERSISTENT elements */
FN(init_persistent)
{
    void *p = AT(0);
    int64_t l = i[1];
    zk_init(k, L_init_2, p + RANK * 4 * SHARD_PERSISTENT, spans_persistent, LEN(spans_persistent),
        l * FLAT_PERSISTENT + RANK * SHARD_PERSISTENT, SHARD_PERSISTENT, 1 /* seed */,
        1 /* full */);
}

/* hash of persistent: p; SHARD_PERSISTENT elements */
FN(hash_persistent)
{
    void *p = AT(0), *out = HOST(2);
    int64_t l = i[1];
    zk_hash(k, L_hash_2, out, p + RANK * 4 * SHARD_PERSISTENT, spans_persistent,
        LEN(spans_persistent), l * FLAT_PERSISTENT + RANK * SHARD_PERSISTENT, SHARD_PERSISTENT,
        1 /* full */);
}

/* begins a step: learning rate, clear sums -> ctl, sums */
FN(next)
{
    void *ctl = AT(0), *sums = AT(1);
    zk_begin(k, L_begin_0, ctl, sums, &recipe);
}

/* counts gradients -> ctl */
FN(count)
{
    void *ctl = AT(0);
    zk_count(k, L_count_0, ctl, 2 /* leaves */);
}

/* factor of the gradients, from norm, clipping and loss scale: total -> ctl */
FN(factor)
{
    void *total = AT(0), *ctl = AT(1);
    zk_factor(k, L_factor_0, ctl, total, &recipe);
}


/* ---- commands with their waits and records. l: the unit; slot, slot2: slots that units take in
 * turn; at: where a piece begins in its buffer; n: its elements. NAME_now is NAME without its
 * waits. zr_last(P): the last use of slot P, whose data is dead afterwards */

/* All-gathers PARAM_PERSISTENT. Waits until ZR_MAIN is done with all it was given before; then
 * PARAM_PERSISTENT is full. */
static void gather_persistent(zr *z)
{
    zr_wait(z, ZR_GATHER, END_MAIN(0));
    zr_gather(z, ZR_GATHER, GROUP_ALL, PARAM_PERSISTENT(0), 4 * SHARD_PERSISTENT,
        PARAM_PERSISTENT(0), 4 * SHARD_PERSISTENT, 4 * SHARD_PERSISTENT);
    zr_record(z, ZR_GATHER, FULL_PARAM_PERSISTENT(0));
}

/* All-gathers PARAM_EMBED to RING_EMBED. Waits until RING is free; then RING_EMBED is full. */
static void gather_embed(zr *z)
{
    zr_wait(z, ZR_GATHER, FREE_RING(0));
    zr_gather(z, ZR_GATHER, GROUP_ALL, PARAM_EMBED(0), 0, RING_EMBED(0), 4 * SHARD_EMBED,
        4 * SHARD_EMBED);
    zr_record(z, ZR_GATHER, FULL_RING_EMBED(0));
}

/* All-gathers PARAM_BLOCK to RING_BLOCK; then RING_BLOCK is full. */
static void gather_block_now(zr *z, int64_t l, int64_t slot)
{
    zr_gather(z, ZR_GATHER, GROUP_ALL, PARAM_BLOCK(l), 0, RING_BLOCK(slot), 4 * SHARD_BLOCK,
        4 * SHARD_BLOCK);
    zr_record(z, ZR_GATHER, FULL_RING_BLOCK(slot));
}

/* All-gathers PARAM_BLOCK to RING_BLOCK. Waits until RING is free; then RING_BLOCK is full. */
static void gather_block(zr *z, int64_t l, int64_t slot)
{
    zr_wait(z, ZR_GATHER, FREE_RING(0));
    gather_block_now(z, l, slot);
}

/* Calls fwd_block. Waits until PARAM_PERSISTENT and RING_BLOCK are full; then RING is free. */
static void run_fwd_block(zr *z, int64_t l, int64_t slot)
{
    zr_waits(z, ZR_MAIN, FULL_PARAM_PERSISTENT(0), FULL_RING_BLOCK(slot));
    zr_call(z, ZR_MAIN, fwd_block, zr_last(RING_BLOCK(slot)),
        PARAM_PERSISTENT(0) + 4 * l * PERSISTENT_BLOCK, X(l), X(1 + l), SAVE_BLOCK(l));
    zr_record(z, ZR_MAIN, FREE_RING(0));
}

/* Calls bwd_block. Waits until RING_BLOCK is full and GRAD_BLOCK is free; then RING is free and
 * GRAD_BLOCK is full. */
static void run_bwd_block(zr *z, int64_t l, int64_t slot, int64_t dx)
{
    zr_waits(z, ZR_MAIN, FULL_RING_BLOCK(slot), FREE_GRAD_BLOCK(slot));
    zr_call(z, ZR_MAIN, bwd_block, zr_last(RING_BLOCK(slot)),
        PARAM_PERSISTENT(0) + 4 * l * PERSISTENT_BLOCK, zr_last(X(l)), zr_last(DX(slot)),
        zr_last(SAVE_BLOCK(l)), DX(dx), GRAD_BLOCK(slot),
        GRAD_PERSISTENT(0) + 4 * l * PERSISTENT_BLOCK);
    zr_record(z, ZR_MAIN, FREE_RING(0));
    zr_record(z, ZR_MAIN, FULL_GRAD_BLOCK(slot));
}

/* Sends each rank its part of GRAD_BLOCK, calls sum_block and waits until all ranks have read
 * GRAD_BLOCK. Waits until GRAD_BLOCK is full and INBOX is free; then INBOX and GRAD_BLOCK are
 * free. */
static void reduce_block(zr *z, int64_t l, int64_t slot)
{
    zr_waits(z, ZR_REDUCE, FULL_GRAD_BLOCK(slot), FREE_INBOX(slot));
    zr_alltoall(z, ZR_REDUCE, GROUP_ALL, GRAD_BLOCK(slot), 4 * SHARD_BLOCK, INBOX(slot),
        4 * SHARD_BLOCK);
    zr_before(z, ZR_REDUCE, ZR_SUM, FULL_INBOX(slot));
    zr_call(z, ZR_SUM, sum_block, INBOX(slot), SUM_BLOCK(l), SHARD_BLOCK);
    zr_done(z, ZR_SUM, GROUP_ALL, INBOX(slot), zr_last(GRAD_BLOCK(slot)));
    zr_record(z, ZR_SUM, FREE_INBOX(slot));
    zr_record(z, ZR_SUM, FREE_GRAD_BLOCK(slot));
}

/* Sends each rank its part of GRAD_PERSISTENT, calls sum_persistent and waits until all ranks
 * have read GRAD_PERSISTENT. Waits until GRAD_PERSISTENT is full and INBOX is free; then INBOX
 * and GRAD_PERSISTENT are free. */
static void reduce_persistent(zr *z)
{
    zr_waits(z, ZR_REDUCE, FULL_GRAD_PERSISTENT(0), FREE_INBOX(0));
    zr_alltoall(z, ZR_REDUCE, GROUP_ALL, GRAD_PERSISTENT(0), 4 * SHARD_PERSISTENT, INBOX(0),
        4 * SHARD_PERSISTENT);
    zr_before(z, ZR_REDUCE, ZR_SUM, FULL_INBOX(0));
    zr_call(z, ZR_SUM, sum_persistent, INBOX(0), SUM_PERSISTENT(0), SHARD_PERSISTENT);
    zr_done(z, ZR_SUM, GROUP_ALL, INBOX(0), zr_last(GRAD_PERSISTENT(0)));
    zr_record(z, ZR_SUM, FREE_INBOX(0));
    zr_record(z, ZR_SUM, FREE_GRAD_PERSISTENT(0));
}

/* Sends each rank its part of GRAD_EMBED, calls sum_embed and waits until all ranks have read
 * GRAD_EMBED. Waits until GRAD_EMBED is full and INBOX is free; then INBOX and GRAD_EMBED are
 * free. */
static void reduce_embed(zr *z)
{
    zr_waits(z, ZR_REDUCE, FULL_GRAD_EMBED(0), FREE_INBOX(1));
    zr_alltoall(z, ZR_REDUCE, GROUP_ALL, GRAD_EMBED(0), 4 * SHARD_EMBED, INBOX(1), 4 * SHARD_EMBED);
    zr_before(z, ZR_REDUCE, ZR_SUM, FULL_INBOX(1));
    zr_call(z, ZR_SUM, sum_embed, INBOX(1), SUM_EMBED(0), SHARD_EMBED);
    zr_done(z, ZR_SUM, GROUP_ALL, INBOX(1), zr_last(GRAD_EMBED(0)));
    zr_record(z, ZR_SUM, FREE_INBOX(1));
    zr_record(z, ZR_SUM, FREE_GRAD_EMBED(0));
}

/* ---- the plan's steps, in order of issue */
/* initial weights */
static void init(zr *z)
{
    zr_call(z, ZR_MAIN, init_embed, PARAM_EMBED(0), 0);
    for (int64_t i = 0; i < 12; i++)
        zr_call(z, ZR_MAIN, init_block, PARAM_BLOCK(i), i);
    zr_call(z, ZR_MAIN, init_persistent, PARAM_PERSISTENT(0), 0);
}

/* parameters from masters, and tables, before the first step */
static void publish(zr *z)
{
    zr_record(z, ZR_MAIN, END_MAIN(0));
    gather_persistent(z);
    zr_record(z, ZR_MAIN, UPDATED(0));
}

/* begin of a step: its constants; offloaded states start on their way to the device */
static void begin(zr *z)
{
    zr_call(z, ZR_MAIN, next, CTL(0), SUMS(0));
}

/* forward of a micro-batch, in training and evaluation */
static void forward(zr *z)
{
    zr_wait(z, ZR_GATHER, UPDATED(0));
    gather_embed(z);
    gather_block_now(z, 0, 0);
    zr_wait(z, ZR_MAIN, FULL_RING_EMBED(0));
    zr_call(z, ZR_MAIN, fwd_embed, zr_last(RING_EMBED(0)), X(0));
    zr_record(z, ZR_MAIN, FREE_RING(0));
    for (int64_t i = 0; i < 11; i++) {
        gather_block(z, 1 + i, (1 + i) % 2);
        run_fwd_block(z, i, i % 2);
    }
    gather_embed(z);
    run_fwd_block(z, 11, 1);
}

/* a micro-batch: its loss, and its gradients added to the sums */
static void micro_batch(zr *z)
{
    forward(z);
    gather_block(z, 11, 0);
    zr_waits(z, ZR_MAIN, FULL_PARAM_PERSISTENT(0), FULL_RING_EMBED(0), FREE_GRAD_EMBED(0),
        FREE_GRAD_PERSISTENT(0));
    zr_call(z, ZR_MAIN, train_head, zr_last(RING_EMBED(0)), PARAM_PERSISTENT(0), zr_last(X(12)),
        DX(0), GRAD_EMBED(0), GRAD_PERSISTENT(0));
    zr_record(z, ZR_MAIN, FREE_RING(0));
    for (int64_t i = 0; i < 11; i++) {
        gather_block(z, 10 - i, (1 + i) % 2);
        run_bwd_block(z, 11 - i, i % 2, (1 + i) % 2);
        reduce_block(z, 11 - i, i % 2);
    }
    run_bwd_block(z, 0, 1, 0);
    zr_record(z, ZR_MAIN, FULL_GRAD_PERSISTENT(0));
    reduce_block(z, 0, 1);
    reduce_persistent(z);
    zr_call(z, ZR_MAIN, bwd_embed, zr_last(DX(0)), GRAD_EMBED(0));
    zr_record(z, ZR_MAIN, FULL_GRAD_EMBED(0));
    reduce_embed(z);
    zr_call(z, ZR_SUM, count, CTL(0));
}

/* norm, clipping, optimizer */
static void update(zr *z)
{
    zr_before(z, ZR_SUM, ZR_MAIN, END_SUM(0));
    zr_call(z, ZR_MAIN, norm_embed, SUM_EMBED(0), 0);
    for (int64_t i = 0; i < 12; i++)
        zr_call(z, ZR_MAIN, norm_block, SUM_BLOCK(i), i);
    zr_call(z, ZR_MAIN, norm_persistent, SUM_PERSISTENT(0), 0);
    zr_allreduce(z, ZR_MAIN, GROUP_ALL, SUMS(0), SUMS(1), ZK_SUMS);
    zr_call(z, ZR_MAIN, factor, SUMS(1), CTL(0));
    zr_call(z, ZR_MAIN, update_embed, SUM_EMBED(0), PARAM_EMBED(0), M_EMBED(0), V_EMBED(0), 0);
    zr_record(z, ZR_MAIN, END_MAIN(0));
    for (int64_t i = 0; i < 12; i++) {
        zr_call(z, ZR_MAIN, update_block, SUM_BLOCK(i), PARAM_BLOCK(i), M_BLOCK(i), V_BLOCK(i), i);
        zr_record(z, ZR_MAIN, END_MAIN(0));
    }
    zr_call(z, ZR_MAIN, update_persistent, SUM_PERSISTENT(0), PARAM_PERSISTENT(0), M_PERSISTENT(0),
        V_PERSISTENT(0), 0);
    zr_record(z, ZR_MAIN, END_MAIN(0));
    gather_persistent(z);
    zr_record(z, ZR_MAIN, UPDATED(0));
}

/* evaluation: the loss of a micro-batch */
static void eval(zr *z)
{
    forward(z);
    zr_waits(z, ZR_MAIN, FULL_PARAM_PERSISTENT(0), FULL_RING_EMBED(0));
    zr_call(z, ZR_MAIN, eval_head, zr_last(RING_EMBED(0)), PARAM_PERSISTENT(0), zr_last(X(12)));
    zr_record(z, ZR_MAIN, FREE_RING(0));
}

/* a training step */
static void step(zr *z)
{
    zr_replay(z, ZR_BEGIN, begin);
    for (int64_t g = 0; g < 1; g++) {
        zr_batch(z, RANK + 2 * g);
        zr_replay(z, ZR_MICRO_BATCH, micro_batch);
    }
    zr_replay(z, ZR_UPDATE, update);
}

/* ---- the program, for the runtime */
static void *open_kernels(int queue, void *stream, void *device, void *host, int column,
                          int threads, const char **why)
{
    return queue == ZR_HOST ? zk_host_open(ZK_F32, column, threads, why)
                            : zk_open(stream, device, host, ZK_F32, column, threads, why);
}

static void close_kernels(int queue, void *k) { queue == ZR_HOST ? zk_host_close(k) : zk_close(k); }
static uint64_t algorithms(void *k) { return zk_algorithms(k); }
static void probe(void *k, void *y, const void *x, const void *w, int64_t n)
{
    zk_probe(k, y, x, w, n);
}

static void total(zr *z) { zr_allreduce(z, ZR_MAIN, GROUP_ALL, SUMS(0), SUMS(1), ZK_SUMS); }
FN(report) { zk_report(k, a + CTL(0), HOST(0)); }
FN(clear) { zk_clear(k, a + SUMS(0)); }
FN(mean) { zk_mean(k, a + SUMS(1), HOST(0), HOST(1)); }

/* draws from the logits that eval_head leaves */
FN(sample)
{
    zr_draw *d = HOST(0);
    d->token = zk_sample(k, a + TMP(0), V, (float)d->temperature, d->top_k, d->top_p, d->u);
}

/* states of a run: the fields of zr_state in order */
static const zr_state states[] = {
    {"master", PARAM_EMBED(0), SIZE(PARAM_EMBED), SHARD_EMBED, 0, SHARD_EMBED, 0, 1, GROUP_ALL,
        ZR_MAIN, ZR_F32, hash_embed},
    {"exp_avg", M_EMBED(0), SIZE(M_EMBED), SHARD_EMBED, 0, SHARD_EMBED, 0, 1, GROUP_ALL, ZR_MAIN,
        ZR_F32, NULL},
    {"exp_avg_sq", V_EMBED(0), SIZE(V_EMBED), SHARD_EMBED, 0, SHARD_EMBED, 0, 1, GROUP_ALL, ZR_MAIN,
        ZR_F32, NULL},
    {"master", PARAM_BLOCK(0), SIZE(PARAM_BLOCK), SHARD_BLOCK, 0, SHARD_BLOCK, 1, 12, GROUP_ALL,
        ZR_MAIN, ZR_F32, hash_block},
    {"exp_avg", M_BLOCK(0), SIZE(M_BLOCK), SHARD_BLOCK, 0, SHARD_BLOCK, 1, 12, GROUP_ALL, ZR_MAIN,
        ZR_F32, NULL},
    {"exp_avg_sq", V_BLOCK(0), SIZE(V_BLOCK), SHARD_BLOCK, 0, SHARD_BLOCK, 1, 12, GROUP_ALL,
        ZR_MAIN, ZR_F32, NULL},
    {"master", PARAM_PERSISTENT(0), SIZE(PARAM_PERSISTENT), SHARD_PERSISTENT, 0, SHARD_PERSISTENT,
        2, 1, -1, ZR_MAIN, ZR_F32, hash_persistent},
    {"exp_avg", M_PERSISTENT(0), SIZE(M_PERSISTENT), SHARD_PERSISTENT, 0, SHARD_PERSISTENT, 2, 1,
        GROUP_ALL, ZR_MAIN, ZR_F32, NULL},
    {"exp_avg_sq", V_PERSISTENT(0), SIZE(V_PERSISTENT), SHARD_PERSISTENT, 0, SHARD_PERSISTENT, 2, 1,
        GROUP_ALL, ZR_MAIN, ZR_F32, NULL},
    {"step", CTL(0) + offsetof(zk_ctl, step), 0, 0, 0, 1, -1, 1, -1, ZR_MAIN, ZR_I64, NULL},
    {"applied", CTL(0) + offsetof(zk_ctl, applied), 0, 0, 0, 1, -1, 1, -1, ZR_MAIN, ZR_I64, NULL},
    {"skipped", CTL(0) + offsetof(zk_ctl, skipped), 0, 0, 0, 1, -1, 1, -1, ZR_MAIN, ZR_I64, NULL},
    {"scale", CTL(0) + offsetof(zk_ctl, scale), 0, 0, 0, 1, -1, 1, -1, ZR_MAIN, ZR_F64, NULL},
    {"clean", CTL(0) + offsetof(zk_ctl, clean), 0, 0, 0, 1, -1, 1, -1, ZR_MAIN, ZR_I64, NULL},
    {"hysteresis", CTL(0) + offsetof(zk_ctl, hysteresis), 0, 0, 0, 1, -1, 1, -1, ZR_MAIN, ZR_I64,
        NULL},
};

/* all settings that determine the bits of the weights, but for the order of bf16's products where
 * a run chooses it: a program resumes checkpoints with the same lines */
static const char *const recipe_lines[] = {
    "model.vocab: 50257",
    "model.width: 768",
    "model.names: \"gpt2\"",
    "model.units[0].embedding.tokens: \"wte\"",
    "model.units[0].embedding.positions: \"wpe\"",
    "model.units[0].embedding.context: 1024",
    "model.units[1].blocks: 12",
    "model.units[1].name: \"h.{l}\"",
    "model.units[1].ops[0].residual[0].layernorm.name: \"ln_1\"",
    "model.units[1].ops[0].residual[0].layernorm.eps: 1e-05",
    "model.units[1].ops[0].residual[0].layernorm.bias: true",
    "model.units[1].ops[0].residual[1].attention.name: \"attn\"",
    "model.units[1].ops[0].residual[1].attention.heads: 12",
    "model.units[1].ops[0].residual[1].attention.kv_heads: 12",
    "model.units[1].ops[0].residual[1].attention.head_dim: 64",
    "model.units[1].ops[0].residual[1].attention.bias: true",
    "model.units[1].ops[0].residual[1].attention.out_bias: true",
    "model.units[1].ops[0].residual[1].attention.rope: null",
    "model.units[1].ops[0].residual[1].attention.qk_norm: false",
    "model.units[1].ops[0].residual[1].attention.eps: 1e-06",
    "model.units[1].ops[1].residual[0].layernorm.name: \"ln_2\"",
    "model.units[1].ops[1].residual[0].layernorm.eps: 1e-05",
    "model.units[1].ops[1].residual[0].layernorm.bias: true",
    "model.units[1].ops[1].residual[1].linear.name: [\"mlp.c_fc\"]",
    "model.units[1].ops[1].residual[1].linear.out: [3072]",
    "model.units[1].ops[1].residual[1].linear.bias: true",
    "model.units[1].ops[1].residual[1].linear.tied: null",
    "model.units[1].ops[1].residual[2].gelu: \"tanh\"",
    "model.units[1].ops[1].residual[3].linear.name: [\"mlp.c_proj\"]",
    "model.units[1].ops[1].residual[3].linear.out: [768]",
    "model.units[1].ops[1].residual[3].linear.bias: true",
    "model.units[1].ops[1].residual[3].linear.tied: null",
    "model.units[2].head[0].layernorm.name: \"ln_f\"",
    "model.units[2].head[0].layernorm.eps: 1e-05",
    "model.units[2].head[0].layernorm.bias: true",
    "model.units[2].head[1].linear.name: []",
    "model.units[2].head[1].linear.out: [50257]",
    "model.units[2].head[1].linear.bias: false",
    "model.units[2].head[1].linear.tied: \"wte\"",
    "train.global_batch: 4",
    "train.micro_batch: 2",
    "train.sequence: 256",
    "train.optimizer.lr: 0.0003",
    "train.optimizer.type: \"AdamW\"",
    "train.optimizer.betas: [0.9, 0.95]",
    "train.optimizer.eps: 1e-08",
    "train.optimizer.weight_decay: 0.1",
    "train.optimizer.decay: \"matrices\"",
    "train.optimizer.clip: 1.0",
    "train.optimizer.moments: \"f32\"",
    "train.optimizer.masters: true",
    "train.optimizer.groups: []",
    "train.precision: \"f32\"",
    "train.loss_scale.scale: 0.0",
    "train.loss_scale.initial_scale_power: 16",
    "train.loss_scale.window: 1000",
    "train.loss_scale.hysteresis: 2",
    "train.loss_scale.consecutive_hysteresis: false",
    "train.loss_scale.min: 1.0",
    "train.schedule.type: \"cosine\"",
    "train.schedule.warmup: 100",
    "train.schedule.steps: 2000",
    "train.schedule.min_lr: 3e-05",
    "train.seed: 1",
    "train.sum.block: 16",
    "train.head_chunk: null",
    "train.reduction: \"exact\"",
    "train.sm_margin: 0",
    "data.ignore: 65535",
};

/* groups and their ranks */
static const zr_group groups[] = {{"all", 2}};

/* tensors of the weights' file: the fields of zr_tensor in order */
static const zr_tensor tensors[] = {
    {"wte.weight", 0, 0, {50257, 768}, 2, 0, 0, 1, 0},
    {"wpe.weight", 38602752, 0, {1024, 768}, 2, 0, 0, 1, 0},
    {"h.%d.ln_1.weight", 0, 12288, {768, 1}, 1, 2, 0, 12, 0},
    {"h.%d.ln_1.bias", 1024, 12288, {768, 1}, 1, 2, 0, 12, 0},
    {"h.%d.attn.c_attn.weight", 0, 0, {768, 2304}, 2, 1, 1, 12, 0},
    {"h.%d.attn.c_attn.bias", 2048, 12288, {2304, 1}, 1, 2, 0, 12, 0},
    {"h.%d.attn.c_proj.weight", 1769472, 0, {768, 768}, 2, 1, 1, 12, 0},
    {"h.%d.attn.c_proj.bias", 5120, 12288, {768, 1}, 1, 2, 0, 12, 0},
    {"h.%d.ln_2.weight", 6144, 12288, {768, 1}, 1, 2, 0, 12, 0},
    {"h.%d.ln_2.bias", 7168, 12288, {768, 1}, 1, 2, 0, 12, 0},
    {"h.%d.mlp.c_fc.weight", 2359296, 0, {768, 3072}, 2, 1, 1, 12, 0},
    {"h.%d.mlp.c_fc.bias", 8192, 12288, {3072, 1}, 1, 2, 0, 12, 0},
    {"h.%d.mlp.c_proj.weight", 4718592, 0, {3072, 768}, 2, 1, 1, 12, 0},
    {"h.%d.mlp.c_proj.bias", 11264, 12288, {768, 1}, 1, 2, 0, 12, 0},
    {"ln_f.weight", 147456, 0, {768, 1}, 1, 2, 0, 1, 0},
    {"ln_f.bias", 148480, 0, {768, 1}, 1, 2, 0, 1, 0},
};

/* functions as a profile lists them: part of a step, FLOPs of a call (backward as twice
 * forward, recomputation included), units (negative: from last to first), calls for each unit */
static const zr_function functions[] = {
    {"fwd_embed", "forward", 0.0, 0, 1},
    {"bwd_embed", "backward", 0.0, 0, 1},
    {"fwd_block", "forward", 7449083904.0, 12, 1},
    {"bwd_block", "backward", 14898167808.0, -12, 1},
    {"train_head", "head", 118587654144.0, 0, 1},
};

/* classes whose slots are dead after a last use: place, bytes of a slot, slots */
static const int64_t slots[][3] = {
    {GRAD_EMBED(0), SIZE(GRAD_EMBED), 1},
    {GRAD_BLOCK(0), SIZE(GRAD_BLOCK), 2},
    {GRAD_PERSISTENT(0), SIZE(GRAD_PERSISTENT), 1},
    {RING_EMBED(0), SIZE(RING_EMBED), 1},
    {RING_BLOCK(0), SIZE(RING_BLOCK), 2},
    {X(0), SIZE(X), 13},
    {DX(0), SIZE(DX), 2},
    {SAVE_BLOCK(0), SIZE(SAVE_BLOCK), 12},
};

/* targets: bytes of the arena, bytes reserved beside it for NCCL, predicted seconds of a step */
static const zr_column columns[] = {
    {"cpu", 1791533056, 0, 0},
    {"sm_80", 2140200960, 446693376, 0},
    {"sm_90", 2140200960, 446693376, 0},
    {"sm_100", 2140200960, 446693376, 0},
};

ZR_OWN_TEXT;

static const zr_program program = {
    .abi = ZR_ABI, .name = "gpt2-124m",
    .summary = "ZeRO 3, ranks 2, micro-batches 1 of 2 x 256 tokens, f32, prefetch 1",
    .plan = "cf97c6481218e0e3a0bd8ebe1421262d57e545f119e304b0e659b0801840a3e8",
    .layout = "24bd998e08e374d9231eb50c3347eeabeb54bdb447c8f0650bb4f59965c451cf",
    .text = zr_text, .text_end = zr_text_end,
    .memory =
        "arena of a rank, bytes: cpu 1791533056, sm_80 2140200960, sm_90 2140200960, sm_100 "
        "2140200960; beside it on a GPU about 1090938470; parts: parameters 463425536, "
        "optimizer state 497893376, gradients 463724544, activations 361734144, the rest "
        "4755456",
    .shared = 464031744, .hosted = 0, .commands = 252,
    .queues =
        1 << ZR_MAIN | 1 << ZR_GATHER | 1 << ZR_REDUCE | 1 << ZR_SUM,
    .workspace = WORKSPACE(0), .host = 221184, .pinned_scratch = PINNED_SCRATCH(0),
    .pinned_batch = PINNED_BATCH(0), .pinned_batch_step = SIZE(PINNED_BATCH),
    .pinned_batches = 4,
    .inbox = INBOX(0), .inbox_step = SIZE(INBOX), .inboxes = 2,
    .config =
        "{\n"
        "  \"architectures\": [\n"
        "    \"GPT2LMHeadModel\"\n"
        "  ],\n"
        "  \"model_type\": \"gpt2\",\n"
        "  \"n_layer\": 12,\n"
        "  \"n_embd\": 768,\n"
        "  \"vocab_size\": 50257,\n"
        "  \"tie_word_embeddings\": true,\n"
        "  \"n_positions\": 1024,\n"
        "  \"layer_norm_epsilon\": 1e-05,\n"
        "  \"n_head\": 12,\n"
        "  \"n_inner\": 3072,\n"
        "  \"activation_function\": \"gelu_new\",\n"
        "  \"attn_pdrop\": 0.0,\n"
        "  \"embd_pdrop\": 0.0,\n"
        "  \"resid_pdrop\": 0.0,\n"
        "  \"bos_token_id\": null,\n"
        "  \"eos_token_id\": null,\n"
        "  \"torch_dtype\": \"float32\"\n"
        "}\n",
    .ranks = 2, .events = 20, .micro_batches = 1,
    .batch = 2, .sequence = 256, .vocab = 50257,
    .ignore = 65535, .skips = 20,
    .tokens = TOKENS(0), .targets = TARGETS(0),
    .flops = 779053694976.0, /* 6 per parameter and token, and attention */
    .wire = 746541632, .messages = 42, /* bytes received, collectives */
    .type = ZR_F32,
    ZR_TABLE(columns), ZR_TABLE(groups), ZR_TABLE(states), ZR_TABLE(tensors), ZR_TABLE(functions),
    ZR_TABLE(slots), .recipe = recipe_lines,
    .nrecipe = sizeof recipe_lines / sizeof *recipe_lines,
    .open = open_kernels, .close = close_kernels, .target = zk_target, .object = zk_object,
    .overhead = zk_overhead, .gemms = zk_gemms, .algorithms = algorithms, .probe = probe,
    .init = init, .publish = publish, .step = step, .report = report, .clear = clear, .eval = eval,
    .total = total, .mean = mean, .sample = sample,
};

int main(int argc, char **argv) { return zr_main(argc, argv, &program); }
