/*
 * Posting one request, and the short ways: to post it, wait for it, and say whether it went well, in one call of Python's.
 */

/* So many bytes are copied in less time than a second SGE takes. */
#define PVL_SHORT 512

/* Whether a request has a header, and registered memory is copied into the cell behind it, so that one SGE is enough. */
static int pvl_beside(const struct pvl_engine *engine, const struct pvl_memory *memory, const struct pvl_ask *ask)
{
    uint64_t offset = ask->addr - memory->addr;

    return (ask->opcode == IBV_WR_SEND || ask->opcode == IBV_WR_SEND_WITH_IMM) && ask->length <= PVL_SHORT &&
           sizeof(struct pvl_header) + ask->length <= engine->cell_size && memory->here &&
           memory->lkey == ask->lkey && /* else it was registered anew in between; and it may be shorter since, */
           offset <= memory->length && ask->length <= memory->length - offset; /* which is for the device to refuse */
}

/* What pvl_post() does; under the lock. */
PVL_HOT
static int pvl_post_locked(struct pvl_engine *engine, struct pvl_op *op, struct pvl_memory *memory,
                           const struct pvl_ask *ask)
{
    int opcode = ask->opcode, kind = pvl_kind(opcode);
    struct pvl_told before;
    const void *source = ask->source;
    int staged = ask->staged;
    struct ibv_sge sge[2];
    struct ibv_send_wr wr; /* not set to nothing as a whole: most of it is for requests of other kinds, and it is large */
    /* Where there are no immediates, a message after the write brings it; the two end together. */
    uint32_t notices = engine->framing.no_imm && opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    struct ibv_sge note_sge[2];
    struct pvl_slot taken;
    struct ibv_send_wr note;
    struct ibv_send_wr *bad = NULL;
    uint32_t slot;
    int rc;

    if (engine->stopped)
        return PVL_STOPPED;
    if (pvl_room_left(engine) <= notices)
        return PVL_NO_SLOT;
    if (!pvl_has_credit(&engine->framing, kind))
        return PVL_NO_CREDIT;
    if (memory && pvl_memory_get(memory))
        return PVL_CLOSED;
    if (kind) {
        before = pvl_told(&engine->framing);
        if (memory && pvl_beside(engine, memory, ask)) {
            source = (const void *)(uintptr_t)(memory->here + (ask->addr - memory->addr));
            staged = 1;
        }
    }
    sge[0] = (struct ibv_sge){.addr = ask->addr, .length = ask->length, .lkey = ask->lkey};
    wr.next = NULL;
    wr.sg_list = sge;
    wr.num_sge = ask->length ? 1 : 0; /* no SGE at all is the portable zero-length request */
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.imm_data = htonl(ask->imm);
    if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = ask->remote_addr;
        wr.wr.atomic.rkey = ask->rkey;
        wr.wr.atomic.compare_add = ask->argument;
        wr.wr.atomic.swap = ask->swap;
    } else {
        wr.wr.rdma.remote_addr = ask->remote_addr;
        wr.wr.rdma.rkey = ask->rkey;
    }
    slot = engine->free[engine->free_count - 1];
    wr.wr_id = pvl_wr_id(slot, 0);
    if (staged && source && ask->length && ask->length <= engine->max_inline && !kind) {
        wr.send_flags |= IBV_SEND_INLINE;
        sge[0].addr = (uintptr_t)source;
    } else if (staged) {
        uint32_t skip = kind && source ? sizeof(struct pvl_header) : 0;

        sge[0].addr = engine->cell_addr + (uint64_t)slot * engine->cell_size + skip;
        sge[0].lkey = engine->cell_lkey;
        if (source)
            memcpy((void *)(uintptr_t)sge[0].addr, source, ask->length);
    }
    if (notices) {
        note = (struct ibv_send_wr){.wr_id = wr.wr_id, .sg_list = note_sge, .send_flags = IBV_SEND_SIGNALED};
        pvl_dress(engine, slot, &note, note_sge, PVL_WR_NOTICE, 1, ask->imm, ask->length);
        wr.opcode = IBV_WR_RDMA_WRITE;
        wr.send_flags &= ~IBV_SEND_SIGNALED;
        wr.wr_id |= PVL_QUIET;
        wr.next = &note;
    } else if (kind) {
        pvl_dress(engine, slot, &wr, sge, opcode, staged, ask->imm, ask->length);
    }
    rc = ibv_post_send(engine->qp, &wr, &bad);
    if (rc) {
        if (kind)
            pvl_untell(&engine->framing, before); /* it was not sent, so it uses nothing and tells nothing */
        if (!notices || bad != &note) {
            if (memory)
                pvl_memory_put(memory);
            return rc < 0 ? -rc : rc; /* some drivers negate it */
        }
    }
    taken = (struct pvl_slot){
        .op = op, .memory = memory, .length = ask->length, .opcode = opcode, .staged = staged,
        .count = rc ? 1 : 1 + notices, .cut = rc != 0, /* a write whose notice was refused is cut from it */
    };
    pvl_occupy(engine, &taken);
    pvl_count(&engine->stats, opcode, 1, ask->length);
    return rc < 0 ? -rc : rc;
}

/*
 * Post one request of an operation, always signalled, and with timeout_ns wait for it as pvl_progress() does.
 *
 * A staged request uses the slot's own cell: it is filled from source, or fetched into if source is NULL. For an
 * atomic, argument is the value to add or to compare with, and swap the value to store. imm is in host order.
 * With headers (framing.c) there is PVL_WR_CONTROL as well.
 * Returns 0 once it is posted, PVL_NO_SLOT, PVL_NO_CREDIT, PVL_STOPPED, or a positive errno.
 */
static int pvl_post(struct pvl_engine *engine, struct pvl_op *op, int opcode, int staged, const void *source,
                    uint64_t addr, uint32_t length, uint32_t lkey, uint64_t remote_addr, uint32_t rkey, uint32_t imm,
                    uint64_t argument, uint64_t swap, int64_t timeout_ns)
{
    const struct pvl_ask ask = {
        .opcode = opcode, .staged = staged, .source = source, .addr = addr, .length = length, .lkey = lkey,
        .remote_addr = remote_addr, .rkey = rkey, .imm = imm, .argument = argument, .swap = swap,
    };
    int rc;

    pthread_mutex_lock(&engine->lock);
    rc = pvl_post_locked(engine, op, NULL, &ask);
    if (rc == 0 && timeout_ns > 0)
        pvl_advance(engine, PVL_UNTIL_FEW, op, 0, timeout_ns);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* What pvl_run() does; under the lock. */
PVL_HOT
static int pvl_run_locked(struct pvl_engine *engine, struct pvl_op *op, struct pvl_memory *memory,
                          const struct pvl_ask *ask, int64_t timeout_ns)
{
    int rc;

    if (engine->over)
        rc = PVL_STOPPED;
    else if (engine->framing.no_imm && ask->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        rc = PVL_SEVERAL;
    else
        rc = pvl_post_locked(engine, op, memory, ask);
    if (rc == 0) {
        pvl_glance(engine, timeout_ns != PVL_NOW);
        if (op->posted != op->done && timeout_ns > 0)
            pvl_advance(engine, PVL_UNTIL_FEW, op, 0, timeout_ns);
        if (op->posted != op->done || op->status)
            rc = PVL_PENDING;
    }
    return rc;
}

/* Post one request, wait until it is complete, and say whether it went well: all in one call; see pvl_move(). */
static int pvl_run(struct pvl_engine *engine, struct pvl_op *op, struct pvl_memory *memory, const struct pvl_ask *ask,
                   int64_t timeout_ns)
{
    int rc;

    if (__atomic_load_n(&engine->stopped, __ATOMIC_ACQUIRE))
        return PVL_STOPPED; /* in a forked child the lock may be that of a thread that is not there */
    pthread_mutex_lock(&engine->lock);
    rc = pvl_run_locked(engine, op, memory, ask, timeout_ns);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/*
 * Move registered memory by one request, wait as pvl_progress() does until it is complete, and say whether it went well.
 *
 * After 0 nothing is left to do, and op can be used again. After PVL_PENDING Python has to look after op, as it is in
 * flight or has failed; of the memory the engine takes care until the end. Else nothing was posted: PVL_*, or a
 * positive errno. The operation must be nobody else's.
 */
static int pvl_move(struct pvl_engine *engine, struct pvl_op *op, int opcode, struct pvl_memory *memory, uint64_t offset,
                    uint32_t length, uint64_t remote_addr, uint32_t rkey, uint32_t imm, int64_t timeout_ns)
{
    const struct pvl_ask ask = {
        .opcode = opcode, .addr = memory->addr + offset, .length = length, .lkey = memory->lkey,
        .remote_addr = remote_addr, .rkey = rkey, .imm = imm,
    };

    return pvl_run(engine, op, memory, &ask, timeout_ns);
}

/* The same as pvl_move() for memory of any kind, which is copied into the cell of the request's slot. */
static int pvl_move_copy(struct pvl_engine *engine, struct pvl_op *op, int opcode, const void *source, uint32_t length,
                         uint64_t remote_addr, uint32_t rkey, uint32_t imm, int64_t timeout_ns)
{
    const struct pvl_ask ask = {
        .opcode = opcode, .staged = 1, .source = source, .length = length, .remote_addr = remote_addr, .rkey = rkey,
        .imm = imm,
    };

    return pvl_run(engine, op, NULL, &ask, timeout_ns);
}

/*
 * What most calls are: without an immediate, by way of one operation that the engine's owner keeps for it, for each
 * argument from Python costs time.
 *
 * These return as pvl_move() does. After PVL_PENDING the operation is busy until Python has seen to it. PVL_BUSY:
 * another thread has it. PVL_UNUSUAL: it is not what these are for, or nothing that is allowed; the caller looks which.
 */
PVL_HOT
static int pvl_run_on(struct pvl_op *op, struct pvl_memory *memory, const struct pvl_ask *ask, int64_t timeout_ns)
{
    struct pvl_engine *engine = op->engine;
    int rc = PVL_BUSY;

    if (__atomic_load_n(&engine->stopped, __ATOMIC_ACQUIRE))
        return PVL_STOPPED; /* see pvl_run() */
    pthread_mutex_lock(&engine->lock);
    if (!__atomic_load_n(&op->busy, __ATOMIC_ACQUIRE)) { /* Python clears it without the lock */
        __atomic_store_n(&op->busy, 1, __ATOMIC_RELAXED);
        rc = pvl_run_locked(engine, op, memory, ask, timeout_ns);
        __atomic_store_n(&op->busy, rc == PVL_PENDING, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* There is room for so many bytes at the peer. */
PVL_HOT
static int pvl_write(struct pvl_op *op, struct pvl_memory *memory, uint64_t offset, uint64_t length,
                     uint64_t remote_addr, uint32_t rkey, uint64_t room, int64_t timeout_ns)
{
    const struct pvl_ask ask = {
        .opcode = IBV_WR_RDMA_WRITE, .addr = memory->addr + offset, .length = (uint32_t)length, .lkey = memory->lkey,
        .remote_addr = remote_addr, .rkey = rkey,
    };

    if (memory->pd != op->engine->pd || length > op->engine->max_piece || length > room)
        return PVL_UNUSUAL;
    return pvl_run_on(op, memory, &ask, timeout_ns);
}

/* There are so many bytes at the peer, and all of them are read. */
PVL_HOT
static int pvl_read(struct pvl_op *op, struct pvl_memory *memory, uint64_t offset, uint64_t room,
                    uint64_t remote_addr, uint32_t rkey, uint64_t length, int64_t timeout_ns)
{
    const struct pvl_ask ask = {
        .opcode = IBV_WR_RDMA_READ, .addr = memory->addr + offset, .length = (uint32_t)length, .lkey = memory->lkey,
        .remote_addr = remote_addr, .rkey = rkey,
    };

    if (memory->pd != op->engine->pd || length > op->engine->max_piece || length > room || !length ||
        !op->engine->max_reads || !(memory->access & IBV_ACCESS_LOCAL_WRITE))
        return PVL_UNUSUAL;
    return pvl_run_on(op, memory, &ask, timeout_ns);
}

PVL_HOT
static int pvl_send(struct pvl_op *op, struct pvl_memory *memory, uint64_t offset, uint64_t length, int64_t timeout_ns)
{
    const struct pvl_ask ask = {
        .opcode = IBV_WR_SEND, .addr = memory->addr + offset, .length = (uint32_t)length, .lkey = memory->lkey,
    };

    if (memory->pd != op->engine->pd || length > op->engine->max_send || length > op->engine->max_piece)
        return PVL_UNUSUAL;
    return pvl_run_on(op, memory, &ask, timeout_ns);
}

/* Whether a cell takes so many bytes, with a header in front. */
static int pvl_fits(const struct pvl_engine *engine, uint64_t length)
{
    return length + PVL_HEADER_BYTES <= engine->cell_size && length <= engine->max_piece;
}

/* The same for memory of any kind, as pvl_move_copy(). */
PVL_HOT
static int pvl_write_copy(struct pvl_op *op, const void *source, uint64_t length, uint64_t remote_addr, uint32_t rkey,
                          uint64_t room, int64_t timeout_ns)
{
    const struct pvl_ask ask = {
        .opcode = IBV_WR_RDMA_WRITE, .staged = 1, .source = source, .length = (uint32_t)length,
        .remote_addr = remote_addr, .rkey = rkey,
    };

    if (!pvl_fits(op->engine, length) || length > room)
        return PVL_UNUSUAL;
    return pvl_run_on(op, NULL, &ask, timeout_ns);
}

PVL_HOT
static int pvl_send_copy(struct pvl_op *op, const void *source, uint64_t length, int64_t timeout_ns)
{
    const struct pvl_ask ask = {
        .opcode = IBV_WR_SEND, .staged = 1, .source = source, .length = (uint32_t)length,
    };

    if (!pvl_fits(op->engine, length) || length > op->engine->max_send)
        return PVL_UNUSUAL;
    return pvl_run_on(op, NULL, &ask, timeout_ns);
}
