/*
 * The requests of one connection: a slot table that completions are written into.
 *
 * A slot is one send-queue request in flight, or a run of them; its number is in their wr_ids. A receive's wr_id is the
 * number of its ring slot with PVL_RECV set, because of a failed completion nothing tells a send from a receive
 * but the wr_id. Arrived messages queue up in the order of their completions until Python takes them.
 *
 * Any number of threads may be here at once. One of them polls, without the lock, and enters what it finds for
 * all; the others sleep until it has news or leaves. Every change of the tables happens under the lock and in
 * one call, so an exception that the interpreter raises at any moment (Ctrl-C) finds them whole.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define PVL_BATCH 32 /* completions taken at a time; requests behind one doorbell */
#define PVL_LINE 64  /* bytes of a cache line, on most machines; and of a page: */
#define PVL_PAGE 4096
#define PVL_HOT __attribute__((hot)) /* the linker puts these next to each other, in few pages */

/* What posting may come to, beside 0 and a positive errno. */
#define PVL_NO_SLOT (-1)   /* as many requests are in flight as there are slots */
#define PVL_STOPPED (-2)   /* pvl_stop() was called; pvl_move(): or the connection is over */
#define PVL_NO_CREDIT (-3) /* the peer has no receive for it now; see framing.c */
#define PVL_CLOSED (-4)    /* the memory is being deregistered */
#define PVL_PENDING (-5)   /* pvl_move(): posted, and not complete yet, or not well */
#define PVL_SEVERAL (-6)   /* pvl_move(): here that takes more than one request */

/* What taking a message may come to. */
#define PVL_NOTHING (-7) /* there is none */
#define PVL_LONG (-8)    /* pvl_recv(): it is longer than the box, and was left where it is */
#define PVL_MORE (-14)   /* pvl_recv(): there is more to it than its bytes, or its slot could not be posted again */
#define PVL_TURN (-15)   /* pvl_recv(): others come first, or the connection was over: nothing was taken */

/* What running a prepared operation may come to, beside. */
#define PVL_BUSY (-9)   /* another thread is in it */
#define PVL_LATE (-10)  /* what an earlier run posted is still in flight */
#define PVL_CHECK (-11) /* the peer had news, or the memory was registered anew: it has to be checked again */

#define PVL_UNUSUAL (-13) /* pvl_write() and its like: not what those are for */

/* What pvl_progress() waits for. */
#define PVL_UNTIL_FEW 0     /* at most `few` requests of the operation are in flight */
#define PVL_UNTIL_ARRIVAL 1 /* a message has arrived, or none can any more */
#define PVL_UNTIL_SLOT 2    /* a slot is free */
#define PVL_UNTIL_IDLE 3    /* nothing is in flight, receives included */
#define PVL_UNTIL_CREDIT 4  /* a slot is free, and the peer has a receive: for a message, or if `few` for control bytes */
#define PVL_UNTIL_CONTROL 5 /* control bytes have arrived, or nothing can any more */
#define PVL_UNTIL_SENT 6    /* nothing is in flight but receives and credits */
#define PVL_UNTIL_NEWS 7    /* the peer's news have been taken other than `few` times, or no more can come */

/*
 * Registered memory, and what keeps it registered: whoever deregisters it says so here first, then looks for users.
 *
 * One user is the owner; the others are requests in flight. Who is the last frees this.
 */
struct pvl_memory {
    uint32_t users;
    uint32_t closing; /* nobody may become a user any more */
    uint32_t lkey;
    uint32_t changes; /* how often it was registered anew */
    uint64_t addr;    /* as SGEs name it */
    uint64_t here;    /* as this process sees it; 0: it does not */
    uint64_t length;  /* so many bytes of it */
    struct ibv_pd *pd;
    uint32_t access;
};

/* One operation of a connection: what its requests have come to. Python owns it, until done equals posted. */
struct pvl_op {
    struct pvl_engine *engine; /* of one that is used by pvl_write() and its like */
    int32_t busy;              /* such a call is in it, or has left it to Python */
    uint32_t posted;
    uint32_t done;
    int32_t status; /* the first that was not SUCCESS, or 0 */
    uint32_t vendor_err;
    uint64_t wr_id;  /* of that one */
    uint64_t index;  /* its entry, where the operation is a list */
    uint32_t left;   /* 1 while a list has entries that are not posted yet */
    void *fetch;     /* where a staged read goes, or NULL */
    uint64_t result; /* what an atomic returned */
};

/* One request that an operation asks for; see pvl_post(). */
struct pvl_ask {
    int opcode;
    int staged;
    const void *source;
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
    uint64_t remote_addr;
    uint32_t rkey;
    uint32_t imm; /* in host order */
    uint64_t argument;
    uint64_t swap;
};

/* A run of requests of which the last is signalled; most often that is the only one. */
struct pvl_slot {
    struct pvl_op *op;         /* NULL: free */
    struct pvl_memory *memory; /* what it uses, where C counts that; or NULL */
    uint32_t length;
    int32_t opcode;
    int32_t staged;
    uint32_t count; /* the requests of the run */
    int32_t cut;    /* the signalled one was not accepted: each is on its own, and ends when the QP is flushed */
};

/*
 * The wr_id of a request: its slot, the entry of a list that it begins with, and PVL_QUIET if it is unsignalled, so that
 * it is heard of only if it fails. Nothing else is known of a failed completion.
 */
#define PVL_QUIET (1ULL << 62)
#define PVL_SLOT_BITS 24
#define PVL_INDEX_BITS 38

static uint64_t pvl_wr_id(uint32_t slot, uint64_t index)
{
    return slot | (index & ((1ULL << PVL_INDEX_BITS) - 1)) << PVL_SLOT_BITS;
}

static uint32_t pvl_slot_of(uint64_t wr_id)
{
    return wr_id & ((1U << PVL_SLOT_BITS) - 1);
}

static uint64_t pvl_index_of(uint64_t wr_id)
{
    return wr_id >> PVL_SLOT_BITS & ((1ULL << PVL_INDEX_BITS) - 1);
}

/* Room for a message that is taken out of the receive ring. Python owns this; one thread at a time uses it. */
struct pvl_box {
    struct pvl_engine *engine;
    uint32_t room;
    int32_t length; /* of the message in it; negative: there is none. For whoever was interrupted before he could see */
    uint32_t byte_len;
    uint32_t imm;
    int32_t has_imm;
    int32_t opcode;
    int32_t error; /* an errno: its slot could not be posted again */
    uint64_t number;
    char data[];
};

struct pvl_arrival {
    uint32_t slot;     /* of the receive ring */
    uint32_t byte_len; /* of the message, or of the RDMA write that brought the immediate */
    uint32_t imm;      /* in host order */
    int32_t has_imm;
    int32_t opcode;    /* enum ibv_wc_opcode */
};

/*
 * What an operation touches comes first, and so close together that it takes few cache lines: after a system call, which
 * posting is on some devices, each of them has to be fetched again.
 */
struct pvl_engine {
    pthread_mutex_t lock;
    int sleepers;   /* how many threads wait for news: without any, none is given */
    int polling;    /* a thread is in pvl_wait(), and the wc array is its own */
    int stopped;    /* no thread may touch the QP, the CQ and the PD any more */
    int over;       /* the QP is in ERR: receives are not posted again */
    int missed;     /* a look found a thread polling, and left what there is to it */
    uint32_t heard; /* how often Python has taken news of the peer */

    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct pvl_slot *slots;
    uint32_t *free; /* a stack of the numbers of free slots */
    uint32_t send_slots;
    uint32_t in_flight;
    uint32_t free_count;
    int poke_fd;            /* an eventfd of an event loop's, or -1: see look.c */
    struct pvl_list *lists; /* those with entries left to post: see pump.c */
    int64_t slice_ns;       /* how long a wait without a timeout may last */
    struct ibv_pd *pd;      /* what pvl_write() and its like are for: memory of this, */
    struct pvl_framing framing;
    struct pvl_stats stats;
    uint32_t max_piece; /* so much of it in one request, */
    uint32_t max_send;  /* so much in one message, */
    uint32_t max_reads; /* and reads, if not 0 */
    uint32_t max_inline;
    uint32_t cell_size;
    uint32_t cell_lkey;
    uint64_t cell_addr; /* one staging cell for each slot */
    struct ibv_wc wc[PVL_BATCH];

    struct pvl_receives *receives;
    uint32_t recv_slots;  /* how many of them this connection may use */
    uint32_t recv_posted; /* now; of a pool not 0 as long as there may be messages in the CQ */
    uint32_t share;       /* of a pool */
    int in_order;         /* the peer has said goodbye, so it was not in the middle of a message */
    uint32_t ring_mask;           /* the rings of what has arrived have one entry more, and at least recv_slots */
    struct pvl_arrival *arrivals; /* a ring */
    uint64_t arrived;             /* how many came in, ever */
    uint64_t taken;               /* how many Python has taken, ever */
    uint32_t reserved;            /* what arrives is another's first, as Python knows: pvl_recv() takes nothing */
    uint32_t lent;                /* taken, and not posted again until they are given back */
    uint32_t lendable;            /* so many at most: what is left keeps the messages flowing */

    int32_t cause; /* the first status that was neither SUCCESS nor a flush; 0 while there is none */
    uint32_t cause_vendor_err;
    uint64_t cause_wr_id;
    uint32_t flushed;

    pthread_cond_t news; /* something completed, or nobody polls any more */
    int registering;     /* how many threads are in pvl_register() */
    struct ibv_comp_channel *channel;
    int peer_fd;
    struct pvl_hub *hub; /* who reads the channel's events where several engines share it; or NULL. See hub.c */
    pthread_cond_t bell; /* the hub, or somebody else, has something for the thread that polls */
    int rung;            /* PVL_WOKE_*: what for, to the thread that polls */
    int told;            /* the same, to whoever turns the hub; apart, so that neither takes it from the other */
    int listens;         /* the hub will ring when the peer says something */
    int poked;           /* since the hub has looked */
    int collected;       /* it is among those of hub->rung */
    struct pvl_engine *next_rung;
    uint32_t seat;
    uint64_t key;
    int64_t spin_ns;  /* how long a wait may spin before it sleeps */

    struct ibv_send_wr *wrs; /* PVL_BATCH of them */
    struct ibv_sge *sges;    /* two of each */
    struct {
        int32_t opcode;
        uint32_t length;
    } *pieces; /* what they were made of, before headers */

    struct pvl_op own; /* of the requests that nobody waits for */
} __attribute__((aligned(PVL_LINE)));

static void pvl_pump(struct pvl_engine *engine);
static int pvl_list_run(struct pvl_engine *engine, struct pvl_list *list, uint64_t offset, int64_t timeout_ns);
static int pvl_repost(struct pvl_engine *engine, uint32_t slot, int kind);
static void pvl_arrive(struct pvl_engine *engine, const struct pvl_arrival *arrival);
static void pvl_unframe(struct pvl_engine *engine, uint32_t slot, uint32_t byte_len);
static void pvl_tell(struct pvl_engine *engine);
static void pvl_poke(struct pvl_engine *engine);
static void pvl_ring(struct pvl_engine *engine, int what);
static void pvl_hub_leave(struct pvl_engine *engine);
static int pvl_hub_wait(struct pvl_engine *engine, int64_t timeout_ns, int *got, int *woke);
static void pvl_dress(struct pvl_engine *engine, uint32_t slot, struct ibv_send_wr *wr, struct ibv_sge *sge, int opcode,
                      int staged, uint32_t imm, uint32_t length);

/* Describe memory, with its owner as its one user. */
static struct pvl_memory *pvl_memory_new(struct ibv_pd *pd, uint64_t addr, uint32_t lkey, uint32_t access)
{
    struct pvl_memory *memory = calloc(1, sizeof(*memory));

    if (memory)
        *memory = (struct pvl_memory){.users = 1, .pd = pd, .addr = addr, .lkey = lkey, .access = access};
    return memory;
}

static void pvl_memory_put(struct pvl_memory *memory)
{
    if (__atomic_sub_fetch(&memory->users, 1, __ATOMIC_ACQ_REL) == 0)
        free(memory);
}

/* Become a user, or say that it is too late: each side enters itself first, then looks for the other. */
static int pvl_memory_get(struct pvl_memory *memory)
{
    __atomic_add_fetch(&memory->users, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&memory->closing, __ATOMIC_SEQ_CST))
        return 0;
    pvl_memory_put(memory);
    return PVL_CLOSED;
}

/* One of its users gets company: it stays what it is, whoever deregisters it now. */
static void pvl_memory_share(struct pvl_memory *memory)
{
    __atomic_add_fetch(&memory->users, 1, __ATOMIC_RELAXED);
}

/* How many requests in flight use it. */
static uint32_t pvl_memory_used(const struct pvl_memory *memory)
{
    return __atomic_load_n(&memory->users, __ATOMIC_SEQ_CST) - 1;
}

/* Let nobody become a user any more, or with closing 0 let them again; returns how many requests are users. */
static uint32_t pvl_memory_close(struct pvl_memory *memory, int closing)
{
    __atomic_store_n(&memory->closing, (uint32_t)closing, __ATOMIC_SEQ_CST);
    return pvl_memory_used(memory);
}

static void pvl_engine_free(struct pvl_engine *engine)
{
    pthread_cond_destroy(&engine->news);
    pthread_cond_destroy(&engine->bell);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

/* Return where an array of a block begins, behind what is `used` of it. */
static size_t pvl_place(size_t *used, size_t count, size_t size)
{
    size_t place = *used;

    *used += (count * size + PVL_LINE - 1) / PVL_LINE * PVL_LINE;
    return place;
}

/*
 * The engine and its arrays are one block, with that first which each request or message needs: after a system call
 * nothing of it may be in the caches nor in the TLB, so the number of pages counts too.
 */
static struct pvl_engine *pvl_engine_new(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_comp_channel *channel,
                                         uint32_t send_slots, struct pvl_receives *receives, uint32_t recv_slots)
{
    struct pvl_engine *engine;
    pthread_condattr_t monotonic;
    size_t used = 0, free_at, arrivals, slots, control, wrs, sges, pieces;
    uint32_t ring = 1;
    void *block;

    while (ring < recv_slots)
        ring *= 2;
    pvl_place(&used, 1, sizeof(*engine));
    free_at = pvl_place(&used, send_slots, sizeof(*engine->free));
    arrivals = pvl_place(&used, ring, sizeof(*engine->arrivals));
    slots = pvl_place(&used, send_slots, sizeof(*engine->slots));
    control = pvl_place(&used, ring, sizeof(*engine->framing.control));
    wrs = pvl_place(&used, PVL_BATCH, sizeof(*engine->wrs));
    sges = pvl_place(&used, 2 * PVL_BATCH, sizeof(*engine->sges));
    pieces = pvl_place(&used, PVL_BATCH, sizeof(*engine->pieces));
    if (posix_memalign(&block, PVL_PAGE, used)) {
        errno = ENOMEM;
        return NULL;
    }
    engine = memset(block, 0, used);
    engine->free = (void *)((char *)block + free_at);
    engine->arrivals = (void *)((char *)block + arrivals);
    engine->slots = (void *)((char *)block + slots);
    engine->framing.control = (void *)((char *)block + control);
    engine->wrs = (void *)((char *)block + wrs);
    engine->sges = (void *)((char *)block + sges);
    engine->pieces = (void *)((char *)block + pieces);
    engine->ring_mask = ring - 1;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->news, &monotonic);
    pthread_cond_init(&engine->bell, &monotonic);
    pthread_condattr_destroy(&monotonic);
    engine->qp = qp;
    engine->cq = cq;
    engine->channel = channel;
    engine->peer_fd = -1;
    engine->poke_fd = -1;
    engine->send_slots = send_slots;
    engine->receives = receives;
    engine->recv_slots = recv_slots;
    for (int i = 0; i < PVL_BATCH; i++) {
        engine->wrs[i].next = i + 1 < PVL_BATCH ? &engine->wrs[i + 1] : NULL;
        engine->wrs[i].sg_list = &engine->sges[2 * i];
    }
    while (engine->free_count < send_slots) {
        engine->free[engine->free_count] = send_slots - 1 - engine->free_count; /* the first ones are used most */
        engine->free_count++;
    }
    return engine;
}

/* Post every slot of a ring, once, or those that a share of a pool needs; returns 0 or an errno. */
static int pvl_post_ring(struct pvl_engine *engine)
{
    int rc = 0;

    if (pvl_pooled(engine->receives)) {
        rc = pvl_pool_join(engine->receives, engine->recv_slots);
        engine->recv_posted = engine->share = rc ? 0 : engine->recv_slots;
        return rc;
    }
    pthread_mutex_lock(&engine->lock);
    for (uint32_t slot = 0; slot < engine->receives->slots && rc == 0; slot++) {
        rc = pvl_post_slot(engine->receives, slot);
        engine->recv_posted += !rc;
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* How many requests the send queue has room for. */
static uint32_t pvl_room_left(const struct pvl_engine *engine)
{
    return engine->send_slots - engine->in_flight;
}

/* Take note that so many requests more are in flight. */
static void pvl_fly(struct pvl_engine *engine, uint32_t count)
{
    engine->in_flight += count;
    if (engine->in_flight > engine->stats.in_flight_peak)
        engine->stats.in_flight_peak = engine->in_flight;
}

/* Take a slot for requests that were posted; where there is room left, there is a free one. */
static inline void pvl_occupy(struct pvl_engine *engine, const struct pvl_slot *slot)
{
    engine->slots[engine->free[--engine->free_count]] = *slot;
    pvl_fly(engine, slot->count);
    slot->op->posted += slot->count;
}

/* So many requests of a slot have ended. */
static inline void pvl_end(struct pvl_engine *engine, uint32_t number, uint32_t count)
{
    struct pvl_slot *slot = &engine->slots[number];
    struct pvl_op *op = slot->op;

    slot->count -= count;
    if (slot->count == 0) {
        slot->op = NULL;
        if (slot->memory)
            pvl_memory_put(slot->memory);
        engine->free[engine->free_count++] = number;
    }
    engine->in_flight -= count;
    __atomic_store_n(&op->done, op->done + count, __ATOMIC_RELEASE); /* last: Python looks without the lock */
}

PVL_HOT
static void pvl_complete(struct pvl_engine *engine, const struct ibv_wc *wc)
{
    if (wc->status == IBV_WC_WR_FLUSH_ERR) {
        engine->flushed++;
    } else if (wc->status != IBV_WC_SUCCESS && !(wc->wr_id & PVL_RECV) &&
               engine->slots[pvl_slot_of(wc->wr_id)].op == &engine->own) {
        engine->flushed++; /* a credit to a peer that has left, most likely: what that says comes first */
    } else if (wc->status != IBV_WC_SUCCESS) {
        engine->stats.errors++;
        if (engine->cause == 0) {
            engine->cause_vendor_err = wc->vendor_err;
            engine->cause_wr_id = wc->wr_id;
            engine->cause = wc->status;
        }
    }
    if (!(wc->wr_id & PVL_RECV)) {
        uint32_t number = pvl_slot_of(wc->wr_id);
        struct pvl_slot *slot = &engine->slots[number];
        struct pvl_op *op = slot->op;
        const void *cell = (const void *)(uintptr_t)(engine->cell_addr + (uint64_t)number * engine->cell_size);

        if (wc->status != IBV_WC_SUCCESS) {
            if (op->status == 0) {
                op->vendor_err = wc->vendor_err;
                op->wr_id = number;
                op->index = pvl_index_of(wc->wr_id);
                op->status = wc->status;
            }
            if (wc->wr_id & PVL_QUIET) { /* the signalled one after it is flushed, and ends this one too */
                if (slot->cut)
                    pvl_end(engine, number, 1);
                return;
            }
        } else if (slot->staged && slot->opcode == IBV_WR_RDMA_READ) {
            if (op->fetch)
                memcpy(op->fetch, cell, slot->length);
        } else if (slot->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || slot->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
            memcpy(&op->result, cell, sizeof(op->result));
        }
        pvl_end(engine, number, slot->count);
        return;
    }
    if (wc->status == IBV_WC_SUCCESS && wc->opcode == IBV_WC_RECV) {
        pvl_unframe(engine, (uint32_t)wc->wr_id, wc->byte_len);
    } else if (wc->status == IBV_WC_SUCCESS) {
        struct pvl_arrival arrival = {
            .slot = (uint32_t)wc->wr_id,
            .byte_len = wc->byte_len,
            .has_imm = !!(wc->wc_flags & IBV_WC_WITH_IMM),
            .imm = wc->wc_flags & IBV_WC_WITH_IMM ? ntohl(wc->imm_data) : 0,
            .opcode = wc->opcode,
        };

        pvl_arrive(engine, &arrival);
    }
    if (pvl_pooled(engine->receives)) {
        if (wc->status != IBV_WC_SUCCESS)
            pvl_post_slot(engine->receives, (uint32_t)wc->wr_id);
        return;
    }
    /* Last, for Python looks without the lock: where no receive is posted, all that arrived must be seen. */
    __atomic_store_n(&engine->recv_posted, engine->recv_posted - 1, __ATOMIC_RELEASE);
}

static int pvl_ready(const struct pvl_engine *engine, int until, const struct pvl_op *op, uint32_t few)
{
    switch (until) {
    case PVL_UNTIL_FEW:
        return op->posted - op->done + op->left <= few;
    case PVL_UNTIL_ARRIVAL:
        return engine->arrived != engine->taken || engine->recv_posted == 0;
    case PVL_UNTIL_SLOT:
        return pvl_room_left(engine) > (uint32_t)engine->framing.no_imm;
    case PVL_UNTIL_CREDIT:
        return pvl_room_left(engine) > 0 && pvl_has_credit(&engine->framing, few ? PVL_CONTROL : PVL_MESSAGE);
    case PVL_UNTIL_CONTROL:
        return engine->framing.control_arrived != engine->framing.control_taken || engine->recv_posted == 0;
    case PVL_UNTIL_SENT:
        return engine->in_flight == engine->own.posted - engine->own.done;
    case PVL_UNTIL_NEWS:
        return engine->heard != few || engine->over || engine->cause;
    default:
        return engine->in_flight == 0 && engine->recv_posted == 0;
    }
}

/*
 * Nothing was found in the CQ of a QP in ERR: no message is coming any more.
 *
 * What is posted to an SRQ is not flushed. What the peer has an acknowledgement of, is in the CQ before that.
 */
static void pvl_found_nothing(struct pvl_engine *engine)
{
    if ((engine->over || engine->flushed) && pvl_pooled(engine->receives))
        __atomic_store_n(&engine->recv_posted, 0, __ATOMIC_RELEASE);
}

/* Enter completions that were taken, start what they make room for, and tell whoever waits; `poke` the event loop too. */
PVL_HOT
static void pvl_enter(struct pvl_engine *engine, int got, int poke)
{
    for (int i = 0; i < got; i++)
        pvl_complete(engine, &engine->wc[i]);
    if (engine->lists)
        pvl_pump(engine);
    if (got)
        pvl_tell(engine);
    if (poke && (got || engine->missed)) {
        engine->missed = 0;
        pvl_poke(engine);
    }
    if (engine->sleepers)
        pthread_cond_broadcast(&engine->news);
}

/* Sleep until there are news; returns whether the deadline has passed first. */
static int pvl_sleep_for_news(struct pvl_engine *engine, int64_t deadline)
{
    struct timespec end = {.tv_sec = deadline / 1000000000, .tv_nsec = deadline % 1000000000};
    int rc;

    engine->sleepers++;
    engine->stats.sleeps++;
    rc = pthread_cond_timedwait(&engine->news, &engine->lock, &end);
    engine->sleepers--;
    return rc == ETIMEDOUT;
}

/* What pvl_progress() does; under the lock, which it lets go meanwhile. */
static int pvl_advance(struct pvl_engine *engine, int until, const struct pvl_op *op, uint32_t few, int64_t timeout_ns)
{
    int64_t deadline = 0; /* read from the clock only where the first look did not do: that may be a system call */
    uint64_t control;
    int rc = 0, over = engine->over;

    while (!pvl_ready(engine, until, op, few)) {
        int64_t left = timeout_ns;
        int got = 0, woke = 0;
        uint32_t naps = pvl_naps;

        if (engine->stopped)
            return -ESHUTDOWN;
        if (engine->polling) {
            if (!deadline)
                deadline = pvl_now_ns() + timeout_ns;
            if (pvl_sleep_for_news(engine, deadline))
                return pvl_ready(engine, until, op, few) ? 0 : PVL_WOKE_TIMEOUT;
            if (engine->over != over)
                return pvl_ready(engine, until, op, few) ? 0 : PVL_WOKE_SIGNAL;
            continue;
        }
        if (deadline && (left = deadline - pvl_now_ns()) < 0)
            left = 0;
        if (engine->over && pvl_pooled(engine->receives) && engine->recv_posted && engine->in_flight == 0)
            left = 0; /* nothing is going to ring: see pvl_found_nothing() */
        engine->polling = 1;
        pthread_mutex_unlock(&engine->lock);
        rc = engine->hub ? pvl_hub_wait(engine, left, &got, &woke)
                         : pvl_wait(engine->cq, engine->channel, engine->peer_fd, engine->wc, PVL_BATCH,
                                    engine->spin_ns, left, &got, &woke);
        pthread_mutex_lock(&engine->lock);
        engine->polling = 0;
        engine->stats.polls++;
        engine->stats.sleeps += pvl_naps - naps;
        if (pvl_naps != naps && engine->poke_fd >= 0)
            engine->missed = 1; /* it may have taken the event that an event loop relies on */
        control = engine->framing.control_arrived;
        if (got == 0 && rc == 0)
            pvl_found_nothing(engine);
        pvl_enter(engine, got, 1);
        if (rc < 0)
            return rc;
        if (control != engine->framing.control_arrived || engine->framing.malformed)
            return pvl_ready(engine, until, op, few) ? 0 : PVL_WOKE_CONTROL;
        if (woke)
            return pvl_ready(engine, until, op, few) ? 0 : woke;
        if (!deadline && !pvl_ready(engine, until, op, few))
            deadline = pvl_now_ns() + timeout_ns;
    }
    return rc;
}

/*
 * Wait until what `until` says; op and few are for PVL_UNTIL_FEW.
 *
 * Returns 0 once it is so; else PVL_WOKE_* bits, for Python to look what that is about, or a negative errno:
 * -ESHUTDOWN after pvl_stop().
 */
static int pvl_progress(struct pvl_engine *engine, int until, const struct pvl_op *op, uint32_t few, int64_t timeout_ns)
{
    int rc;

    pthread_mutex_lock(&engine->lock);
    rc = pvl_advance(engine, until, op, few, timeout_ns);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/*
 * As a timeout_ns of pvl_move(), pvl_recv() and their like: look once, and wait for nothing. The caller is the event
 * loop, which is poked by others, and sees itself to what it has entered.
 */
#define PVL_NOW (-1)

/* Look once for completions, which may be there by now: it costs less than to get ready for a wait. Under the lock. */
static inline void pvl_glance(struct pvl_engine *engine, int poke)
{
    int got = engine->polling ? 0 : ibv_poll_cq(engine->cq, PVL_BATCH, engine->wc);

    engine->stats.polls += !engine->polling;
    if (got > 0)
        pvl_enter(engine, got, poke);
}

/* The peer's news were taken: let those look who wait for some. */
static void pvl_heard(struct pvl_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    engine->heard++;
    pvl_poke(engine);
    pvl_ring(engine, PVL_WOKE_SIGNAL);
    pthread_cond_broadcast(&engine->news);
    pthread_mutex_unlock(&engine->lock);
}

static void pvl_stats(struct pvl_engine *engine, struct pvl_stats *stats)
{
    pthread_mutex_lock(&engine->lock);
    *stats = engine->stats;
    stats->in_flight = engine->in_flight - (engine->own.posted - engine->own.done); /* credits are not the caller's */
    pthread_mutex_unlock(&engine->lock);
}

static void pvl_count_registration(struct pvl_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    engine->stats.registrations++;
    pthread_mutex_unlock(&engine->lock);
}

/* Count a message that has to wait, if what it waits for is a receive of the peer. */
static void pvl_count_wait(struct pvl_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    engine->stats.credit_waits += pvl_room_left(engine) && !pvl_has_credit(&engine->framing, PVL_MESSAGE);
    pthread_mutex_unlock(&engine->lock);
}

/* Nobody waits for this operation any more: what it still fetches goes nowhere. */
static void pvl_abandon(struct pvl_engine *engine, struct pvl_op *op)
{
    pthread_mutex_lock(&engine->lock);
    op->fetch = NULL;
    pthread_mutex_unlock(&engine->lock);
}

/*
 * Let no thread near the QP, the CQ and the PD any more, and return when none is: the next step is to destroy them.
 *
 * What is still in flight then counts as flushed. Takes no longer than another thread's pvl_wait() or ibv_reg_mr().
 */
static void pvl_stop(struct pvl_engine *engine)
{
    if (engine->hub)
        pvl_hub_leave(engine);
    pthread_mutex_lock(&engine->lock);
    __atomic_store_n(&engine->stopped, 1, __ATOMIC_RELEASE);
    pvl_ring(engine, PVL_WOKE_SIGNAL);
    engine->sleepers++;
    while (engine->polling || engine->registering)
        pthread_cond_wait(&engine->news, &engine->lock);
    engine->sleepers--;
    pvl_pump(engine); /* posts nothing any more, and lets the lists go */
    for (uint32_t i = 0; i < engine->send_slots; i++)
        if (engine->slots[i].op) {
            struct ibv_wc flushed = {.wr_id = pvl_wr_id(i, 0), .status = IBV_WC_WR_FLUSH_ERR};

            pvl_complete(engine, &flushed);
        }
    if (engine->share) {
        /* What is in the CQ, and what nobody will take, goes back to the others. */
        for (int got; (got = ibv_poll_cq(engine->cq, PVL_BATCH, engine->wc)) > 0;)
            for (int i = 0; i < got; i++)
                if (engine->wc[i].wr_id & PVL_RECV)
                    pvl_post_slot(engine->receives, (uint32_t)engine->wc[i].wr_id);
        while (engine->taken != engine->arrived)
            pvl_post_slot(engine->receives, engine->arrivals[engine->taken++ & engine->ring_mask].slot);
        pvl_pool_leave(engine->receives, engine->share, engine->in_order);
        engine->share = 0;
    }
    engine->recv_posted = 0;
    pvl_poke(engine);
    pthread_cond_broadcast(&engine->news);
    pthread_mutex_unlock(&engine->lock);
}
