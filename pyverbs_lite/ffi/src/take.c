/*
 * Taking messages that have arrived: copied into a box, or lent where they are.
 */

/* A message that was taken and stays in its slot. Python owns this; it says whether there is a slot to give back. */
struct pvl_loan {
    int32_t lent;
    int32_t counted; /* against what may be lent at a time */
    uint64_t number;
    struct pvl_arrival arrival;
};

/*
 * Take the oldest message, and keep its slot; returns 0, PVL_NOTHING, or ENOBUFS where too many are lent.
 *
 * What is counted is asked for by a caller, for whom this looks for completions too.
 */
static int pvl_lend(struct pvl_engine *engine, struct pvl_loan *loan, int counted)
{
    int rc = 0;

    pthread_mutex_lock(&engine->lock);
    if (counted && engine->taken == engine->arrived && !engine->stopped)
        pvl_glance(engine, 1);
    if (engine->taken == engine->arrived) {
        rc = PVL_NOTHING;
    } else if (counted && engine->lent >= engine->lendable) {
        rc = ENOBUFS;
    } else {
        loan->number = engine->taken;
        loan->arrival = engine->arrivals[engine->taken++ & engine->ring_mask];
        loan->counted = counted;
        loan->lent = 1;
        engine->lent += counted;
        if (pvl_pooled(engine->receives))
            pvl_pool_lend(engine->receives, 1);
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* Post the slot again, if there is one; returns 0 or an errno. After pvl_stop() only a pool takes it. */
static int pvl_give_back(struct pvl_engine *engine, struct pvl_loan *loan)
{
    int rc = 0;

    pthread_mutex_lock(&engine->lock);
    if (loan->lent) {
        loan->lent = 0;
        engine->lent -= loan->counted;
        if (pvl_pooled(engine->receives))
            pvl_pool_lend(engine->receives, -1);
        rc = pvl_repost(engine, loan->arrival.slot, PVL_MESSAGE);
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* Copy the oldest message into a box, and post its slot again; under the lock. Returns as pvl_recv_within() does. */
PVL_HOT
static int pvl_unpack(struct pvl_engine *engine, struct pvl_box *box)
{
    const struct pvl_arrival *arrival = &engine->arrivals[engine->taken & engine->ring_mask];
    uint32_t slot = arrival->slot, length = arrival->opcode == IBV_WC_RECV ? arrival->byte_len : 0;

    if (length > box->room)
        return PVL_LONG;
    memcpy(box->data, (const char *)pvl_slot_memory(engine->receives, slot) + PVL_HEADER_BYTES, length);
    box->byte_len = arrival->byte_len;
    box->imm = arrival->imm;
    box->has_imm = arrival->has_imm;
    box->opcode = arrival->opcode;
    box->number = engine->taken++;
    box->error = pvl_repost(engine, slot, PVL_MESSAGE);
    box->length = (int32_t)length;
    return box->has_imm || box->opcode != IBV_WC_RECV || box->error ? PVL_MORE : box->length;
}

/*
 * Wait for a message as pvl_progress() does, copy it into a box, and post its slot again: all in one call.
 *
 * Returns its length, or PVL_MORE; or with an empty box PVL_NOTHING, PVL_LONG, PVL_TURN, PVL_STOPPED.
 */
PVL_HOT
static int pvl_recv_within(struct pvl_box *box, int64_t timeout_ns)
{
    struct pvl_engine *engine = box->engine;
    int rc;

    box->length = PVL_NOTHING;
    if (__atomic_load_n(&engine->stopped, __ATOMIC_ACQUIRE))
        return PVL_STOPPED; /* see pvl_run() */
    pthread_mutex_lock(&engine->lock);
    if (engine->over) {
        rc = PVL_TURN;
    } else {
        if (engine->arrived == engine->taken && !engine->stopped)
            pvl_glance(engine, timeout_ns != PVL_NOW);
        if (engine->arrived == engine->taken && timeout_ns > 0 && !engine->reserved)
            pvl_advance(engine, PVL_UNTIL_ARRIVAL, NULL, 0, timeout_ns);
        if (engine->reserved)
            rc = PVL_TURN;
        else if (engine->arrived == engine->taken)
            rc = PVL_NOTHING;
        else
            rc = engine->stopped ? PVL_STOPPED : pvl_unpack(engine, box);
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* The same without a timeout: one pointer is all that crosses from Python. */
PVL_HOT
static int pvl_recv(struct pvl_box *box)
{
    return pvl_recv_within(box, box->engine->slice_ns);
}

/* Take what has arrived, or else nothing: without a look at the clock. */
static int pvl_recv_now(struct pvl_box *box)
{
    return pvl_recv_within(box, 0);
}
