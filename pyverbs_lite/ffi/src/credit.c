/*
 * The engine's side of framing.c: what goes in front of requests, what arrives, and when receives are told of.
 *
 * Everything but the functions that take the lock themselves runs under it.
 */

/*
 * Begin to count receives; called once, when the peer's record is known and before the first message.
 *
 * worth_telling is more than 1 so that not every message is answered, and the receives that the peer may not know of
 * meanwhile are posted in addition to those that it can rely on.
 */
static void pvl_grant(struct pvl_engine *engine, uint32_t offered, uint32_t worth_telling, uint32_t granted,
                      uint16_t control, uint16_t control_worth_telling, int no_imm)
{
    struct pvl_framing *framing = &engine->framing;

    pthread_mutex_lock(&engine->lock);
    framing->offered = framing->told = offered;
    framing->granted = granted;
    framing->control_offered = framing->control_told = framing->control_granted = control;
    framing->worth_telling = worth_telling;
    engine->lendable = offered - worth_telling; /* with fewer left to use, the peer may wait for what is never told */
    framing->control_worth_telling = control_worth_telling;
    framing->no_imm = no_imm;
    pthread_mutex_unlock(&engine->lock);
}

/*
 * Make a request that is posted next what travels: a message gets its header, in the cell of its slot.
 *
 * sge has room for two. Data that are staged stand in the cell behind the header; others stay where they are.
 */
PVL_HOT
static void pvl_dress(struct pvl_engine *engine, uint32_t slot, struct ibv_send_wr *wr, struct ibv_sge *sge, int opcode,
                      int staged, uint32_t imm, uint32_t length)
{
    struct pvl_framing *framing = &engine->framing;
    uint64_t cell = engine->cell_addr + (uint64_t)slot * engine->cell_size;
    struct ibv_sge head = {.addr = cell, .length = sizeof(struct pvl_header), .lkey = engine->cell_lkey};
    int kind = pvl_kind(opcode);

    if (!kind)
        return;
    if (opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        framing->sent++; /* it uses a receive, and has no place for a header */
        return;
    }
    pvl_frame(framing, (void *)(uintptr_t)cell, kind, opcode == IBV_WR_SEND_WITH_IMM || kind == PVL_NOTICE, imm, length);
    wr->opcode = IBV_WR_SEND;
    if (wr->num_sge && !staged) {
        sge[1] = sge[0];
        wr->num_sge = 2;
    } else {
        head.length += wr->num_sge ? sge[0].length : 0;
        wr->num_sge = 1;
        if (head.length <= engine->max_inline)
            wr->send_flags |= IBV_SEND_INLINE;
    }
    sge[0] = head;
}

/* Tell the peer of receives that were posted again, in a message of their own. */
static void pvl_tell_now(struct pvl_engine *engine)
{
    struct pvl_framing *framing = &engine->framing;
    struct ibv_sge sge[2];
    struct ibv_send_wr *bad, wr = {.sg_list = sge, .send_flags = IBV_SEND_SIGNALED};
    uint32_t slot;

    slot = engine->free[engine->free_count - 1];
    wr.wr_id = pvl_wr_id(slot, 0);
    sge[0] = (struct ibv_sge){
        .addr = engine->cell_addr + (uint64_t)slot * engine->cell_size,
        .length = sizeof(struct pvl_header),
        .lkey = engine->cell_lkey,
    };
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    pvl_frame(framing, (void *)(uintptr_t)sge[0].addr, PVL_CREDIT, 0, 0, 0);
    if (ibv_post_send(engine->qp, &wr, &bad))
        return; /* the QP is on its way out, of which whoever uses it hears */
    pvl_occupy(engine, &(struct pvl_slot){.op = &engine->own, .opcode = IBV_WR_SEND, .count = 1});
}

/* Do so if there are enough, and nothing else has told of them. */
PVL_HOT
static void pvl_tell(struct pvl_engine *engine)
{
    const struct pvl_framing *framing = &engine->framing;

    if (framing->offered - framing->told < framing->worth_telling &&
        (!framing->control_worth_telling ||
         (uint16_t)(framing->control_offered - framing->control_told) < framing->control_worth_telling))
        return;
    if (!engine->stopped && !engine->over && pvl_room_left(engine) > 0)
        pvl_tell_now(engine);
}

/* Post a receive again whose message of that kind is done with. */
PVL_HOT
static int pvl_repost(struct pvl_engine *engine, uint32_t slot, int kind)
{
    int ended = engine->stopped || engine->over, rc;

    if (!pvl_pooled(engine->receives)) {
        if (ended)
            return 0;
        rc = pvl_post_own(engine->receives, slot);
        engine->recv_posted += !rc;
    } else {
        rc = pvl_post_slot(engine->receives, slot);
        if (ended)
            return 0; /* it was for the others */
    }
    if (rc)
        return rc < 0 ? -rc : rc; /* some drivers negate it */
    if (kind == PVL_CREDIT)
        return 0;
    if (kind == PVL_CONTROL)
        engine->framing.control_offered++;
    else
        engine->framing.offered++;
    pvl_tell(engine);
    return 0;
}

/* Take note of what is no message of a good peer's. */
static void pvl_refuse(struct pvl_engine *engine, uint32_t slot)
{
    engine->framing.malformed = 1;
    if (pvl_pooled(engine->receives))
        pvl_post_slot(engine->receives, slot); /* the others need it */
}

/* Enter what Python is to take; a peer that sends more than it was granted is no peer of ours. */
PVL_HOT
static void pvl_arrive(struct pvl_engine *engine, const struct pvl_arrival *arrival)
{
    if (engine->arrived - engine->taken >= engine->recv_slots) {
        pvl_refuse(engine, arrival->slot);
        return;
    }
    engine->stats.recvs++;
    if (arrival->opcode == IBV_WC_RECV)
        engine->stats.recv_bytes += arrival->byte_len;
    engine->arrivals[engine->arrived & engine->ring_mask] = *arrival;
    __atomic_store_n(&engine->arrived, engine->arrived + 1, __ATOMIC_RELEASE);
}

/* Enter what arrived in a slot of the receive ring. */
PVL_HOT
static void pvl_unframe(struct pvl_engine *engine, uint32_t slot, uint32_t byte_len)
{
    struct pvl_framing *framing = &engine->framing;
    struct pvl_arrival arrival = {.slot = slot, .opcode = IBV_WC_RECV};
    struct pvl_header header;

    if (byte_len < sizeof(header)) {
        pvl_refuse(engine, slot);
        return;
    }
    memcpy(&header, pvl_slot_memory(engine->receives, slot), sizeof(header));
    framing->granted = ntohl(header.offered);
    framing->control_granted = ntohs(header.control_offered);
    arrival.byte_len = byte_len - sizeof(header);
    arrival.has_imm = !!header.has_imm;
    arrival.imm = ntohl(header.imm);
    switch (header.kind) {
    case PVL_NOTICE:
        arrival.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
        arrival.byte_len = ntohl(header.length);
        /* fall through */
    case PVL_MESSAGE:
        pvl_arrive(engine, &arrival);
        break;
    case PVL_CONTROL:
        if (!framing->control_worth_telling || framing->control_arrived - framing->control_taken >= engine->recv_slots) {
            pvl_refuse(engine, slot);
            break;
        }
        framing->control[framing->control_arrived & engine->ring_mask] = arrival;
        __atomic_store_n(&framing->control_arrived, framing->control_arrived + 1, __ATOMIC_RELEASE);
        break;
    case PVL_CREDIT:
        pvl_repost(engine, slot, PVL_CREDIT); /* where that is refused, the requests that follow show why */
        break;
    default:
        pvl_refuse(engine, slot);
    }
}

/* Let go of the control bytes number `index`, if those are still the oldest; returns 0 or an errno. */
static int pvl_take_control(struct pvl_engine *engine, uint64_t index)
{
    struct pvl_framing *framing = &engine->framing;
    int rc = 0;

    pthread_mutex_lock(&engine->lock);
    if (framing->control_taken == index && framing->control_taken != framing->control_arrived) {
        uint32_t slot = framing->control[index & engine->ring_mask].slot;

        framing->control_taken++;
        rc = pvl_repost(engine, slot, PVL_CONTROL);
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}
