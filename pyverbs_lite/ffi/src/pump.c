/*
 * Lists of one-sided requests, posted piece by piece as the send queue has room.
 *
 * A list is packed arrays of offsets and lengths for one opcode, or an array of single requests. Entries that
 * continue each other on both sides travel as one; a longer one than max_piece is cut. Of the requests behind one
 * doorbell only the last is signalled: a queue completes in order, so its completion speaks for those before it.
 *
 * Whoever polls posts more of every list that waits, so a list of any length makes progress without its owner.
 * Everything here runs under the engine's lock.
 */

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

static struct pvl_request pvl_entry(const struct pvl_list *list, uint64_t i)
{
    struct pvl_request entry;

    if (list->requests)
        return list->requests[i];
    entry = list->base;
    entry.addr += list->offsets[i];
    entry.remote_addr += list->remote_offsets[i];
    entry.length = list->lengths[i];
    return entry;
}

static int pvl_has_imm(const struct pvl_request *entry)
{
    return entry->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || entry->opcode == IBV_WR_SEND_WITH_IMM;
}

static int pvl_continues(const struct pvl_request *piece, const struct pvl_request *entry)
{
    return entry->opcode == piece->opcode && !pvl_has_imm(piece) && piece->opcode != IBV_WR_SEND &&
           entry->lkey == piece->lkey && entry->rkey == piece->rkey && entry->addr == piece->addr + piece->length &&
           entry->remote_addr == piece->remote_addr + piece->length;
}

/* Take the next piece off a list; its length may be 0 for a message or an immediate. */
static struct pvl_request pvl_next_piece(struct pvl_list *list)
{
    struct pvl_request piece = pvl_entry(list, list->next);

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
    while (++list->next < list->count) {
        struct pvl_request entry = pvl_entry(list, list->next);

        if (!pvl_continues(&piece, &entry) || entry.length > list->max_piece - piece.length)
            break;
        piece.length += entry.length;
    }
    return piece;
}

static void pvl_build(struct pvl_engine *engine, uint32_t place, uint32_t slot, const struct pvl_request *piece)
{
    struct ibv_send_wr *wr = &engine->wrs[place];
    struct ibv_sge *sge = &engine->sges[2 * place];

    *sge = (struct ibv_sge){.addr = piece->addr, .length = (uint32_t)piece->length, .lkey = piece->lkey};
    wr->wr_id = slot;
    wr->next = &engine->wrs[place + 1];
    wr->sg_list = sge;
    wr->num_sge = piece->length && piece->opcode != PVL_WR_NOTICE ? 1 : 0;
    wr->opcode = piece->opcode;
    wr->send_flags = 0;
    wr->imm_data = htonl(piece->imm);
    wr->wr.rdma.remote_addr = piece->remote_addr;
    wr->wr.rdma.rkey = piece->rkey;
    pvl_dress(engine, slot, wr, sge, piece->opcode, 0, piece->imm, (uint32_t)piece->length);
}

/* Post one chain of a list; returns how many requests that were: 0 when there is no room, or nothing left. */
static uint32_t pvl_post_chain(struct pvl_engine *engine, struct pvl_list *list)
{
    struct pvl_op *op = list->op;
    struct ibv_send_wr *bad = NULL;
    uint32_t n = 0, before = 0, slot;
    int rc;

    uint32_t more = (uint32_t)engine->framing.no_imm; /* a write with an immediate is two requests there */

    while (n + more < PVL_BATCH && list->next < list->count && engine->free_count > more &&
           op->posted + n - op->done < list->window &&
           pvl_has_credit(&engine->framing, pvl_kind(pvl_entry(list, list->next).opcode))) {
        uint64_t index = list->next;
        struct pvl_request piece = pvl_next_piece(list), note = piece;
        int notices = more && piece.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;

        if (notices)
            piece.opcode = IBV_WR_RDMA_WRITE;
        slot = engine->free[--engine->free_count];
        engine->slots[slot] = (struct pvl_slot){.op = op, .length = (uint32_t)piece.length, .opcode = piece.opcode,
                                                .quiet = 1, .before = before, .index = index};
        before = slot + 1;
        pvl_build(engine, n++, slot, &piece);
        if (notices) {
            note.opcode = PVL_WR_NOTICE;
            slot = engine->free[--engine->free_count];
            engine->slots[slot] = (struct pvl_slot){.op = op, .opcode = PVL_WR_NOTICE, .quiet = 1, .before = before,
                                                    .index = index};
            before = slot + 1;
            pvl_build(engine, n++, slot, &note);
        }
    }
    if (!n)
        return 0;
    engine->wrs[n - 1].next = NULL;
    engine->wrs[n - 1].send_flags = IBV_SEND_SIGNALED;
    engine->slots[before - 1].quiet = 0;
    rc = ibv_post_send(engine->qp, engine->wrs, &bad);
    if (rc) {
        /* What was accepted has lost its signalled end: each is on its own now, and ends when the QP is flushed. */
        uint32_t accepted = bad >= engine->wrs && bad < engine->wrs + n ? (uint32_t)(bad - engine->wrs) : 0;

        for (uint32_t i = 0; i < n; i++) {
            slot = (uint32_t)engine->wrs[i].wr_id;
            if (i < accepted) {
                engine->slots[slot].quiet = 0;
                engine->slots[slot].before = 0;
            } else {
                engine->slots[slot].op = NULL;
                engine->free[engine->free_count++] = slot;
            }
        }
        list->error = rc < 0 ? -rc : rc;
        list->next = engine->slots[engine->wrs[accepted].wr_id].index;
        n = accepted;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct pvl_slot *posted = &engine->slots[engine->wrs[i].wr_id];

        pvl_count(&engine->stats, posted->opcode, posted->length);
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
            list->op->left = 0;
        } else {
            place = &list->after;
        }
    }
}

/* Start a list, in its turn; returns 0 or PVL_STOPPED. It must stay where it is until its op has nothing left. */
static int pvl_list_start(struct pvl_engine *engine, struct pvl_list *list)
{
    struct pvl_list **end = &engine->lists;
    int rc = 0;

    pthread_mutex_lock(&engine->lock);
    if (engine->stopped) {
        rc = PVL_STOPPED;
    } else {
        while (*end)
            end = &(*end)->after;
        list->after = NULL;
        *end = list;
        list->op->left = 1;
        pvl_pump(engine);
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}
