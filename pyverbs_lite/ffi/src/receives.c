/*
 * Where messages arrive: memory cut into slots, and the queue that the slots are posted to.
 *
 * A ring is one connection's own and is posted to its QP. A pool belongs to an SRQ that several connections take their
 * receives from. Nothing else knows where a slot lies or what it is posted to.
 *
 * Of a pool, each connection may use a share, which is what it grants its peer; as many slots circulate as there are
 * shares: they are posted, or hold a message. Slots that once circulate go on to when a connection ends, for the next.
 * What is in the middle of a message when its QP ends is lost: no completion tells of it. So a connection that does not
 * end in order puts one slot more into circulation, up to a number that is made good when nobody is there.
 */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <infiniband/verbs.h>

#define PVL_RECV (1ULL << 63) /* in the wr_id of a receive, beside the number of its slot */

struct pvl_receives {
    struct ibv_qp *qp;
    struct ibv_srq *srq; /* of a pool; NULL: it is a ring, and qp's */
    uint64_t addr;
    uint32_t lkey;
    uint32_t size;   /* bytes that one receive takes */
    uint32_t stride; /* bytes from one slot to the next */
    uint32_t slots;

    /* Of a pool, and under its lock, which is taken after an engine's. */
    pthread_mutex_t lock;
    uint32_t *lkeys;   /* of each block of slots, which is registered by itself */
    uint32_t block;    /* slots of one block */
    uint32_t ready;    /* slots that are registered: from the first on */
    uint32_t out;      /* slots that circulate: from the first on */
    uint32_t shares;   /* slots that the connections which are there may use */
    uint32_t lost;     /* slots that may have been lost */
    uint32_t members;
    uint32_t lent;     /* slots whose message a caller looks at */
};

/* How many slots that may have been lost are made up for. */
#define PVL_POOL_LOST 64

static void *pvl_slot_memory(const struct pvl_receives *receives, uint32_t slot)
{
    return (void *)(uintptr_t)(receives->addr + (uint64_t)slot * receives->stride);
}

/* Whether the receives are several connections'. */
static int pvl_pooled(const struct pvl_receives *receives)
{
    return receives->lkeys != NULL;
}

/* What is posted for one slot. */
struct pvl_posting {
    struct ibv_sge sge;
    struct ibv_recv_wr wr;
};

static inline struct ibv_recv_wr *pvl_posting(const struct pvl_receives *receives, uint32_t slot, uint32_t lkey,
                                              struct pvl_posting *posting)
{
    posting->sge = (struct ibv_sge){
        .addr = receives->addr + (uint64_t)slot * receives->stride,
        .length = receives->size,
        .lkey = lkey,
    };
    posting->wr = (struct ibv_recv_wr){.wr_id = PVL_RECV | slot, .sg_list = &posting->sge, .num_sge = 1};
    return &posting->wr;
}

/* Post one slot of a ring as a receive; returns 0 or an errno. */
static inline int pvl_post_own(const struct pvl_receives *ring, uint32_t slot)
{
    struct pvl_posting posting;
    struct ibv_recv_wr *bad;

    return ibv_post_recv(ring->qp, pvl_posting(ring, slot, ring->lkey, &posting), &bad);
}

/* Post one slot of a pool, under its lock; returns 0, also where the pool is closed, or an errno. */
static int pvl_post_shared(const struct pvl_receives *pool, uint32_t slot)
{
    struct pvl_posting posting;
    struct ibv_recv_wr *bad, *wr = pvl_posting(pool, slot, pool->lkeys[slot / pool->block], &posting);

    return pool->srq ? ibv_post_srq_recv(pool->srq, wr, &bad) : 0;
}

/* Post one slot of either kind; returns 0, also where a pool is closed, or an errno. */
static int pvl_post_slot(struct pvl_receives *receives, uint32_t slot)
{
    int rc;

    if (!pvl_pooled(receives))
        return pvl_post_own(receives, slot);
    pthread_mutex_lock(&receives->lock);
    rc = pvl_post_shared(receives, slot);
    pthread_mutex_unlock(&receives->lock);
    return rc;
}

/*
 * Let one more connection use a share of a pool; its slots must be registered.
 *
 * Returns 0 or an errno: ENOBUFS where more slots have to be registered before, ENOMEM where there are none.
 */
static int pvl_pool_join(struct pvl_receives *pool, uint32_t share)
{
    uint32_t due;
    int rc = 0;

    pthread_mutex_lock(&pool->lock);
    due = pool->shares + share + pool->lost;
    if (due > pool->slots) /* what makes up for the lost is what there is room for */
        due = pool->shares + share;
    if (due > pool->slots)
        rc = ENOMEM;
    else if (due > pool->ready && due > pool->out)
        rc = ENOBUFS;
    if (!pool->srq)
        rc = ESHUTDOWN;
    while (rc == 0 && pool->out < due) {
        rc = pvl_post_shared(pool, pool->out);
        pool->out += !rc;
    }
    if (rc == 0) {
        pool->shares += share;
        pool->members++;
    }
    pthread_mutex_unlock(&pool->lock);
    return rc < 0 ? -rc : rc; /* some drivers negate it */
}

static void pvl_pool_leave(struct pvl_receives *pool, uint32_t share, int in_order)
{
    pthread_mutex_lock(&pool->lock);
    pool->shares -= share;
    pool->members--;
    if (!in_order && pool->lost < PVL_POOL_LOST)
        pool->lost++;
    pthread_mutex_unlock(&pool->lock);
}

static void pvl_pool_init(struct pvl_receives *pool)
{
    pthread_mutex_init(&pool->lock, NULL);
}

/* Begin anew with another SRQ, to which nothing is posted; or with none: then nothing will be posted any more. */
static void pvl_pool_reset(struct pvl_receives *pool, struct ibv_srq *srq)
{
    pthread_mutex_lock(&pool->lock);
    pool->srq = srq;
    pool->out = pool->lost = 0;
    pthread_mutex_unlock(&pool->lock);
}

static void pvl_pool_lend(struct pvl_receives *pool, int slots)
{
    pthread_mutex_lock(&pool->lock);
    pool->lent += (uint32_t)slots;
    pthread_mutex_unlock(&pool->lock);
}
