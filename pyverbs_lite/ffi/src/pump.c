/*
 * Lists of one-sided requests, posted piece by piece as the send queue has room.
 *
 * A list is packed arrays of offsets and lengths for one opcode, or an array of single requests. Entries that
 * continue each other on both sides travel as one; a longer one than max_piece is cut. Of the requests behind one
 * doorbell only the last is signalled: a queue completes in order, so its completion speaks for those before it.
 *
 * Whoever polls posts more of every list that waits, so a list of any length makes progress without its owner.
 * Everything here runs under the engine's lock, but for looking at the arrays before anything is posted.
 */

/* What running a list may come to, beside. */
#define PVL_OUTSIDE (-12) /* an entry reaches outside one of the two ranges; nothing was posted */

/* One request of a list that is not packed. */
struct pvl_request {
    uint64_t addr;
    uint64_t length;
    uint64_t remote_addr;
    uint32_t lkey;
    uint32_t rkey;
    int32_t opcode;
    uint32_t imm; /* in host order; for opcodes that carry one */
};

struct pvl_list {
    struct pvl_op *op;
    struct pvl_memory *memory; /* that all entries use, where C counts that; or NULL */
    uint64_t count;
    const struct pvl_request *requests; /* or NULL, and the rest describes packed arrays */
    const uint64_t *offsets;
    const uint64_t *remote_offsets;
    const uint64_t *lengths;
    struct pvl_request base; /* the two ranges, and what every entry has in common */
    uint64_t remote_length;
    uint64_t max_piece;
    uint32_t window; /* requests of this list in flight, at most */

    uint64_t next;  /* the first entry that is not wholly posted */
    uint64_t moved; /* how many bytes of it are */
    int32_t error;  /* why posting ended early: an errno, or 0 */
    struct pvl_list *after;
};

/* Write one of an array of requests: in one call, for each member that Python sets takes as long. */
static void pvl_request_put(struct pvl_request *requests, uint64_t index, int opcode, uint64_t addr, uint64_t length,
                            uint32_t lkey, uint64_t remote_addr, uint32_t rkey, uint32_t imm)
{
    requests[index] = (struct pvl_request){
        .addr = addr, .length = length, .remote_addr = remote_addr, .lkey = lkey, .rkey = rkey, .opcode = opcode,
        .imm = imm,
    };
}

/* Return the number of the first entry that reaches outside one of the two ranges, or count. */
static uint64_t pvl_list_check(const struct pvl_list *list)
{
    uint64_t i;

    for (i = 0; i < list->count; i++) {
        uint64_t length = list->lengths[i];

        if (list->offsets[i] > list->base.length || length > list->base.length - list->offsets[i] ||
            list->remote_offsets[i] > list->remote_length || length > list->remote_length - list->remote_offsets[i])
            break;
    }
    return i;
}

static int pvl_has_imm(const struct pvl_request *entry)
{
    return entry->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || entry->opcode == IBV_WR_SEND_WITH_IMM;
}

/* Whether an entry goes on where a piece ends, on both sides, and leaves the piece short enough. */
static int pvl_continues(const struct pvl_request *piece, const struct pvl_request *entry, uint64_t max_piece)
{
    return entry->opcode == piece->opcode && !pvl_has_imm(piece) && piece->opcode != IBV_WR_SEND &&
           entry->lkey == piece->lkey && entry->rkey == piece->rkey && entry->addr == piece->addr + piece->length &&
           entry->remote_addr == piece->remote_addr + piece->length && entry->length <= max_piece - piece->length;
}

/* Take the next piece off a list of single requests; its length may be 0 for a message or an immediate. */
static struct pvl_request pvl_next_piece(struct pvl_list *list)
{
    struct pvl_request piece = list->requests[list->next];

    piece.addr += list->moved;
    piece.remote_addr += list->moved;
    piece.length -= list->moved;
    if (piece.length > list->max_piece) {
        piece.length = list->max_piece;
        list->moved += list->max_piece;
        if (piece.opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
            piece.opcode = IBV_WR_RDMA_WRITE; /* the immediate goes with the last piece */
        return piece;
    }
    list->moved = 0;
    while (++list->next < list->count && pvl_continues(&piece, &list->requests[list->next], list->max_piece))
        piece.length += list->requests[list->next].length;
    return piece;
}

/* Fill in the request at a place of the chain, which already leads to the next place. */
static void pvl_build(struct pvl_engine *engine, uint32_t place, uint64_t wr_id, const struct pvl_request *piece)
{
    struct ibv_send_wr *wr = &engine->wrs[place];
    struct ibv_sge *sge = &engine->sges[2 * place];

    *sge = (struct ibv_sge){.addr = piece->addr, .length = (uint32_t)piece->length, .lkey = piece->lkey};
    wr->wr_id = wr_id | PVL_QUIET;
    wr->num_sge = piece->length && piece->opcode != PVL_WR_NOTICE ? 1 : 0;
    wr->opcode = piece->opcode;
    wr->send_flags = 0;
    wr->imm_data = htonl(piece->imm);
    wr->wr.rdma.remote_addr = piece->remote_addr;
    wr->wr.rdma.rkey = piece->rkey;
    engine->pieces[place].opcode = piece->opcode;
    engine->pieces[place].length = (uint32_t)piece->length;
    if (pvl_kind(piece->opcode))
        pvl_dress(engine, pvl_slot_of(wr_id), wr, sge, piece->opcode, 0, piece->imm, (uint32_t)piece->length);
}

/* Fill a chain of at most `limit` requests from a list of single requests; returns how many there are. */
static uint32_t pvl_fill(struct pvl_engine *engine, struct pvl_list *list, uint32_t limit)
{
    uint32_t more = (uint32_t)engine->framing.no_imm; /* a write with an immediate is two requests there */
    uint32_t n = 0, run = 0, slot = 0;

    while (n + more < limit && list->next < list->count &&
           pvl_has_credit(&engine->framing, pvl_kind(list->requests[list->next].opcode))) {
        uint64_t index = list->next;
        struct pvl_request piece = pvl_next_piece(list);

        if (!run) {
            slot = engine->free[--engine->free_count];
            engine->slots[slot] = (struct pvl_slot){.op = list->op, .opcode = piece.opcode};
        }
        if (more && piece.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
            piece.opcode = IBV_WR_RDMA_WRITE;
            pvl_build(engine, n++, pvl_wr_id(slot, index), &piece);
            run++;
            piece.opcode = PVL_WR_NOTICE;
        }
        pvl_build(engine, n++, pvl_wr_id(slot, index), &piece);
        engine->slots[slot].count = ++run;
        if (pvl_kind(piece.opcode)) { /* a message has its header in the cell of a slot, so it ends the run */
            engine->wrs[n - 1].send_flags |= IBV_SEND_SIGNALED;
            engine->wrs[n - 1].wr_id &= ~PVL_QUIET;
            run = 0;
        }
    }
    return n;
}

/* The same for packed arrays, which are one run; this loop is what an entry costs. */
static uint32_t pvl_fill_packed(struct pvl_engine *engine, struct pvl_list *list, uint32_t limit, uint64_t *bytes)
{
    const uint64_t *offsets = list->offsets, *places = list->remote_offsets, *lengths = list->lengths;
    const uint64_t addr = list->base.addr, remote_addr = list->base.remote_addr;
    const uint64_t count = list->count, most = list->max_piece;
    const uint32_t lkey = list->base.lkey, rkey = list->base.rkey, slot = engine->free[--engine->free_count];
    const int opcode = list->base.opcode;
    uint64_t next = list->next, moved = list->moved, sum = 0;
    struct ibv_send_wr *wr = engine->wrs, *end = wr + limit;
    struct ibv_sge *sge = engine->sges;

    for (; wr != end && next < count; wr++, sge += 2) {
        uint64_t offset = offsets[next] + moved, place = places[next] + moved, length = lengths[next] - moved;

        wr->wr_id = pvl_wr_id(slot, next) | PVL_QUIET;
        if (length > most) {
            length = most;
            moved += most;
        } else {
            moved = 0;
            while (++next < count && offsets[next] == offset + length && places[next] == place + length &&
                   lengths[next] <= most - length)
                length += lengths[next];
        }
        sum += length;
        sge->addr = addr + offset;
        sge->length = (uint32_t)length;
        sge->lkey = lkey;
        wr->num_sge = length ? 1 : 0;
        wr->opcode = opcode;
        wr->send_flags = 0;
        wr->wr.rdma.remote_addr = remote_addr + place;
        wr->wr.rdma.rkey = rkey;
    }
    list->next = next;
    list->moved = moved;
    *bytes = sum;
    if (list->memory)
        pvl_memory_share(list->memory);
    engine->slots[slot] = (struct pvl_slot){
        .op = list->op, .memory = list->memory, .opcode = opcode, .count = (uint32_t)(wr - engine->wrs),
    };
    return (uint32_t)(wr - engine->wrs);
}

/* Of a chain of n only so many were accepted: keep the runs that are whole, cut the one that is not, free the others. */
static void pvl_cut(struct pvl_engine *engine, uint32_t n, uint32_t accepted)
{
    for (uint32_t i = 0, length; i < n; i += length) {
        uint32_t number = pvl_slot_of(engine->wrs[i].wr_id);
        struct pvl_slot *slot = &engine->slots[number];

        length = slot->count;
        if (i + length <= accepted)
            continue;
        slot->count = accepted > i ? accepted - i : 0;
        slot->cut = 1;
        if (!slot->count) {
            slot->op = NULL;
            if (slot->memory)
                pvl_memory_put(slot->memory);
            engine->free[engine->free_count++] = number;
        }
    }
}

/* Post one chain of a list; returns how many requests that were: 0 when there is no room, or nothing left. */
static uint32_t pvl_post_chain(struct pvl_engine *engine, struct pvl_list *list)
{
    struct pvl_op *op = list->op;
    struct ibv_send_wr *bad = NULL, *last;
    uint64_t bytes = 0;
    uint32_t n, limit = pvl_room_left(engine), flying = op->posted - op->done;
    int rc;

    if (limit == 0 || flying >= list->window || list->next == list->count)
        return 0;
    if (limit > PVL_BATCH)
        limit = PVL_BATCH;
    if (limit > list->window - flying + (uint32_t)engine->framing.no_imm)
        limit = list->window - flying + (uint32_t)engine->framing.no_imm;
    n = list->requests ? pvl_fill(engine, list, limit) : pvl_fill_packed(engine, list, limit, &bytes);
    if (!n)
        return 0;
    last = &engine->wrs[n - 1];
    last->send_flags |= IBV_SEND_SIGNALED;
    last->wr_id &= ~PVL_QUIET;
    last->next = NULL;
    rc = ibv_post_send(engine->qp, engine->wrs, &bad);
    if (n < PVL_BATCH)
        last->next = last + 1;
    if (rc) {
        uint32_t accepted = bad >= engine->wrs && bad < engine->wrs + n ? (uint32_t)(bad - engine->wrs) : 0;

        list->error = rc < 0 ? -rc : rc;
        list->next = pvl_index_of(engine->wrs[accepted].wr_id);
        pvl_cut(engine, n, accepted);
        n = accepted;
        bytes = 0;
        for (uint32_t i = 0; i < n; i++)
            bytes += engine->sges[2 * i].length;
    }
    if (list->requests) {
        for (uint32_t i = 0; i < n; i++)
            pvl_count(&engine->stats, engine->pieces[i].opcode, 1, engine->pieces[i].length);
    } else {
        pvl_count(&engine->stats, list->base.opcode, n, bytes);
    }
    pvl_fly(engine, n);
    op->posted += n;
    return n;
}

/* Post what there is room for of every list, and forget those that are wholly posted. */
static void pvl_pump(struct pvl_engine *engine)
{
    struct pvl_list **place = &engine->lists;

    while (*place) {
        struct pvl_list *list = *place;

        if (engine->stopped || engine->over || engine->cause)
            list->error = ESHUTDOWN;
        while (!list->error && pvl_post_chain(engine, list))
            ;
        if (list->error || list->next == list->count) {
            *place = list->after;
            if (list->memory)
                pvl_memory_put(list->memory); /* what is in flight holds it by itself */
            /* Last, for Python looks without the lock, and may let the list go or use it for something else. */
            __atomic_store_n(&list->op->left, 0, __ATOMIC_RELEASE);
        } else {
            place = &list->after;
        }
    }
}

/* Make a list of packed arrays, but for the local memory's address and key; returns what pvl_list_check() does. */
static uint64_t pvl_list_pack(struct pvl_list *list, int opcode, uint64_t max_piece, uint64_t count,
                              const uint64_t *offsets, const uint64_t *remote_offsets, const uint64_t *lengths,
                              uint64_t length, uint64_t remote_addr, uint32_t rkey, uint64_t remote_length)
{
    *list = (struct pvl_list){
        .op = list->op, .window = list->window, /* as they were, if that was said already */
        .count = count, .offsets = offsets, .remote_offsets = remote_offsets, .lengths = lengths,
        .base = {.opcode = opcode, .length = length, .remote_addr = remote_addr, .rkey = rkey},
        .remote_length = remote_length, .max_piece = max_piece,
    };
    return pvl_list_check(list);
}

/* Let a list have its turn, from its first entry on; returns 0, PVL_STOPPED, or PVL_CLOSED. Under the lock. */
static int pvl_list_enter(struct pvl_engine *engine, struct pvl_list *list)
{
    struct pvl_list **end = &engine->lists;

    if (engine->stopped)
        return PVL_STOPPED;
    if (list->memory && pvl_memory_get(list->memory))
        return PVL_CLOSED;
    while (*end)
        end = &(*end)->after;
    list->next = list->moved = 0;
    list->error = 0;
    list->after = NULL;
    *end = list;
    list->op->left = 1;
    pvl_pump(engine);
    return 0;
}

/*
 * Start a list of an operation, in its turn, with so many requests in flight; returns 0 or PVL_STOPPED.
 *
 * It must stay where it is until the operation has nothing left.
 */
static int pvl_list_start(struct pvl_engine *engine, struct pvl_list *list, struct pvl_op *op, uint32_t window)
{
    int rc;

    pthread_mutex_lock(&engine->lock);
    list->op = op;
    list->window = window;
    rc = pvl_list_enter(engine, list);
    if (rc == 0 && engine->poke_fd < 0) /* an event loop looks by itself, and would have to be told */
        pvl_glance(engine, 1);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* Post a list of registered memory, wait, and say whether it went well; what it returns see pvl_list_move(). */
static int pvl_list_run(struct pvl_engine *engine, struct pvl_list *list, uint64_t offset, int64_t timeout_ns)
{
    struct pvl_op *op = list->op;
    int rc;

    if (op->left)
        return PVL_LATE;
    if (engine->over)
        return PVL_STOPPED;
    list->base.addr = list->memory->addr + offset;
    list->base.lkey = list->memory->lkey;
    rc = pvl_list_enter(engine, list);
    if (rc)
        return rc;
    pvl_glance(engine, timeout_ns != PVL_NOW);
    if (!pvl_ready(engine, PVL_UNTIL_FEW, op, 0) && timeout_ns > 0)
        pvl_advance(engine, PVL_UNTIL_FEW, op, 0, timeout_ns);
    return pvl_ready(engine, PVL_UNTIL_FEW, op, 0) && !op->status && !list->error ? 0 : PVL_PENDING;
}

/*
 * Move pieces of registered memory, wait as pvl_progress() does until all are complete, and say whether it went well.
 *
 * The list has its operation, which is nobody else's, and its window; the rest is told here. After 0 nothing is left to
 * do, and the list can be used again. After PVL_PENDING Python has to look after the operation, as it is in flight or
 * has failed, and the list and the arrays must stay; of the memory the engine takes care until the end. Else nothing was
 * posted: PVL_UNUSUAL, PVL_OUTSIDE, PVL_STOPPED, PVL_CLOSED.
 */
static int pvl_list_move(struct pvl_list *list, int opcode, struct pvl_memory *memory, uint64_t offset, uint64_t length,
                         uint64_t count, const uint64_t *offsets, const uint64_t *remote_offsets,
                         const uint64_t *lengths, uint64_t remote_addr, uint32_t rkey, uint64_t remote_length,
                         uint64_t max_piece, int64_t timeout_ns)
{
    struct pvl_engine *engine = list->op->engine;
    int rc;

    if (memory->pd != engine->pd)
        return PVL_UNUSUAL;
    if (opcode == IBV_WR_RDMA_READ && (!engine->max_reads || !(memory->access & IBV_ACCESS_LOCAL_WRITE)))
        return PVL_UNUSUAL;
    if (pvl_list_pack(list, opcode, max_piece, count, offsets, remote_offsets, lengths, length, remote_addr, rkey,
                      remote_length) != count)
        return PVL_OUTSIDE;
    list->memory = memory;
    if (__atomic_load_n(&engine->stopped, __ATOMIC_ACQUIRE))
        return PVL_STOPPED; /* see pvl_run() */
    pthread_mutex_lock(&engine->lock);
    rc = pvl_list_run(engine, list, offset, timeout_ns);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}
