/*
 * Where messages arrive: memory cut into slots, and the queue that the slots are posted to.
 *
 * A ring is one connection's own and is posted to its QP. A pool belongs to an SRQ that several connections take their
 * receives from. Nothing else knows where a slot lies or what it is posted to.
 */
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
};

static void *pvl_slot_memory(const struct pvl_receives *receives, uint32_t slot)
{
    return (void *)(uintptr_t)(receives->addr + (uint64_t)slot * receives->stride);
}

/* Post one slot as a receive; returns 0 or an errno. */
static int pvl_post_slot(const struct pvl_receives *receives, uint32_t slot)
{
    struct ibv_sge sge = {
        .addr = receives->addr + (uint64_t)slot * receives->stride,
        .length = receives->size,
        .lkey = receives->lkey,
    };
    struct ibv_recv_wr wr = {.wr_id = PVL_RECV | slot, .sg_list = &sge, .num_sge = 1}, *bad;

    return receives->srq ? ibv_post_srq_recv(receives->srq, &wr, &bad) : ibv_post_recv(receives->qp, &wr, &bad);
}
