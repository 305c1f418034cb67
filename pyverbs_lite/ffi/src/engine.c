/*
 * The requests of one connection: a slot table that completions are written into.
 *
 * A slot is one send-queue request in flight; its number is the request's wr_id. A receive's wr_id is the
 * number of its ring slot with PVL_RECV set, because of a failed completion nothing tells a send from a receive
 * but the wr_id. Arrived messages queue up in the order of their completions until Python takes them.
 *
 * Everything a completion says is in this memory before pvl_progress() returns, so an exception that the
 * interpreter raises at any moment loses nothing. One thread at a time may be in pvl_progress().
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>

#define PVL_RECV (1ULL << 63)
#define PVL_BATCH 32

#define PVL_FREE (-1)    /* slot status: nobody's */
#define PVL_PENDING (-2) /* slot status: posted, no completion seen; otherwise an enum ibv_wc_status */

struct pvl_slot {
    int32_t status;
    uint32_t vendor_err;
};

struct pvl_arrival {
    uint32_t slot;     /* of the receive ring */
    uint32_t byte_len; /* of the message, or of the RDMA write that brought the immediate */
    uint32_t imm;      /* in host order */
    int32_t has_imm;
    int32_t opcode;    /* enum ibv_wc_opcode */
};

struct pvl_engine {
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_comp_channel *channel;
    int peer_fd;

    uint32_t send_slots;
    uint32_t in_flight;
    struct pvl_slot *slots;

    uint32_t recv_slots;
    uint32_t recv_posted;
    uint32_t recv_size; /* bytes of one slot of the receive ring */
    uint32_t recv_lkey;
    uint64_t recv_addr;
    struct pvl_arrival *arrivals; /* a ring of recv_slots entries */
    uint64_t arrived;             /* how many came in, ever */
    uint64_t taken;               /* how many Python has taken, ever */

    int32_t cause; /* the first status that was neither SUCCESS nor a flush; 0 while there is none */
    uint32_t cause_vendor_err;
    uint64_t cause_wr_id;
    uint32_t flushed;

    int woke; /* PVL_WOKE_* of the last pvl_progress() that found nothing */
    int got;
    struct ibv_wc wc[PVL_BATCH];
};

static struct pvl_engine *pvl_engine_new(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_comp_channel *channel,
                                         uint32_t send_slots, uint32_t recv_slots)
{
    struct pvl_engine *engine = calloc(1, sizeof(*engine));

    if (!engine)
        return NULL;
    engine->slots = calloc(send_slots, sizeof(*engine->slots));
    engine->arrivals = calloc(recv_slots, sizeof(*engine->arrivals));
    if (!engine->slots || !engine->arrivals) {
        free(engine->slots);
        free(engine->arrivals);
        free(engine);
        return NULL;
    }
    engine->qp = qp;
    engine->cq = cq;
    engine->channel = channel;
    engine->peer_fd = -1;
    engine->send_slots = send_slots;
    engine->recv_slots = recv_slots;
    for (uint32_t i = 0; i < send_slots; i++)
        engine->slots[i].status = PVL_FREE;
    return engine;
}

static void pvl_engine_free(struct pvl_engine *engine)
{
    free(engine->slots);
    free(engine->arrivals);
    free(engine);
}

/* Post one slot of the receive ring; returns 0 or an errno. */
static int pvl_post_recv(struct pvl_engine *engine, uint32_t slot)
{
    struct ibv_sge sge = {
        .addr = engine->recv_addr + (uint64_t)slot * engine->recv_size,
        .length = engine->recv_size,
        .lkey = engine->recv_lkey,
    };
    struct ibv_recv_wr wr = {.wr_id = PVL_RECV | slot, .sg_list = &sge, .num_sge = 1}, *bad;
    int rc = ibv_post_recv(engine->qp, &wr, &bad);

    if (rc == 0)
        engine->recv_posted++;
    return rc;
}

/* Let go of the oldest message and post its slot again; returns 0 or an errno. */
static int pvl_take_arrival(struct pvl_engine *engine)
{
    uint32_t slot = engine->arrivals[engine->taken % engine->recv_slots].slot;

    engine->taken++;
    return pvl_post_recv(engine, slot);
}

/*
 * Post one request into a slot that is PVL_FREE; always signalled. Returns 0 or an errno.
 *
 * For an atomic, argument is the value to add or to compare with, and swap the value to store. imm is in host order.
 */
static int pvl_post_send(struct pvl_engine *engine, uint32_t slot, int opcode, unsigned int flags, uint64_t addr,
                         uint32_t length, uint32_t lkey, uint64_t remote_addr, uint32_t rkey, uint32_t imm,
                         uint64_t argument, uint64_t swap)
{
    struct ibv_sge sge = {.addr = addr, .length = length, .lkey = lkey};
    struct ibv_send_wr wr = {
        .wr_id = slot,
        .sg_list = &sge,
        .num_sge = length ? 1 : 0, /* no SGE at all is the portable zero-length request */
        .opcode = opcode,
        .send_flags = flags | IBV_SEND_SIGNALED,
    };
    struct ibv_send_wr *bad;
    int rc;

    switch (opcode) {
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        wr.wr.atomic.remote_addr = remote_addr;
        wr.wr.atomic.rkey = rkey;
        wr.wr.atomic.compare_add = argument;
        wr.wr.atomic.swap = swap;
        break;
    default:
        wr.wr.rdma.remote_addr = remote_addr;
        wr.wr.rdma.rkey = rkey;
        wr.imm_data = htonl(imm);
    }
    engine->slots[slot].status = PVL_PENDING;
    rc = ibv_post_send(engine->qp, &wr, &bad);
    if (rc)
        engine->slots[slot].status = PVL_FREE;
    else
        engine->in_flight++;
    return rc;
}

static void pvl_complete(struct pvl_engine *engine, const struct ibv_wc *wc)
{
    if (wc->status == IBV_WC_WR_FLUSH_ERR) {
        engine->flushed++;
    } else if (wc->status != IBV_WC_SUCCESS && engine->cause == 0) {
        engine->cause = wc->status;
        engine->cause_vendor_err = wc->vendor_err;
        engine->cause_wr_id = wc->wr_id;
    }
    if (!(wc->wr_id & PVL_RECV)) {
        engine->slots[wc->wr_id].status = wc->status;
        engine->slots[wc->wr_id].vendor_err = wc->vendor_err;
        engine->in_flight--;
        return;
    }
    engine->recv_posted--;
    if (wc->status == IBV_WC_SUCCESS)
        engine->arrivals[engine->arrived++ % engine->recv_slots] = (struct pvl_arrival){
            .slot = (uint32_t)wc->wr_id,
            .byte_len = wc->byte_len,
            .has_imm = !!(wc->wc_flags & IBV_WC_WITH_IMM),
            .imm = wc->wc_flags & IBV_WC_WITH_IMM ? ntohl(wc->imm_data) : 0,
            .opcode = wc->opcode,
        };
}

/* Wait for completions and enter them into the tables; returns 0 or a negative errno. See pvl_wait(). */
static int pvl_progress(struct pvl_engine *engine, int64_t spin_ns, int64_t timeout_ns)
{
    int rc;

    engine->got = 0;
    rc = pvl_wait(engine->cq, engine->channel, engine->peer_fd, engine->wc, PVL_BATCH, spin_ns, timeout_ns,
                  &engine->got, &engine->woke);
    for (int i = 0; i < engine->got; i++)
        pvl_complete(engine, &engine->wc[i]);
    return rc;
}
