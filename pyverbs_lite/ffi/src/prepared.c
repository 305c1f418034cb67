/*
 * What is checked once and run again and again, each time by one call with one pointer.
 */

/* A move that was checked and is made again and again. Python owns this, and what it points to. */
struct pvl_prepared {
    struct pvl_engine *engine;
    struct pvl_op *op;
    struct pvl_memory *memory;
    uint64_t offset;
    uint64_t remote_addr;
    uint32_t length;
    uint32_t rkey;
    uint32_t imm;
    int32_t opcode;
    uint32_t heard;   /* engine->heard and memory->changes when it was checked */
    uint32_t changes;
    int32_t running; /* a thread is in it; under the lock */
    int32_t within;  /* pvl_again() is not for it */
    struct pvl_list *list; /* many moves in one: what they are beside this; or NULL */
};

/* Make a prepared move once, as pvl_move() does; or PVL_BUSY, PVL_LATE, PVL_CHECK, and then nothing was posted. */
PVL_HOT
static int pvl_again_within(struct pvl_prepared *prepared, int64_t timeout_ns)
{
    struct pvl_engine *engine = prepared->engine;
    struct pvl_memory *memory = prepared->memory;
    struct pvl_op *op = prepared->op;
    int rc;

    if (__atomic_load_n(&engine->stopped, __ATOMIC_ACQUIRE))
        return PVL_STOPPED; /* see pvl_run() */
    pthread_mutex_lock(&engine->lock);
    if (prepared->running) {
        rc = PVL_BUSY;
    } else if (op->posted != op->done) {
        rc = PVL_LATE;
    } else if (prepared->heard != engine->heard || prepared->changes != memory->changes) {
        rc = PVL_CHECK;
    } else if (prepared->list) {
        prepared->running = 1;
        rc = pvl_list_run(engine, prepared->list, prepared->offset, timeout_ns);
        prepared->running = 0;
    } else {
        const struct pvl_ask ask = {
            .opcode = prepared->opcode, .addr = memory->addr + prepared->offset, .length = prepared->length,
            .lkey = memory->lkey, .remote_addr = prepared->remote_addr, .rkey = prepared->rkey, .imm = prepared->imm,
        };

        prepared->running = 1;
        rc = pvl_run_locked(engine, op, memory, &ask, timeout_ns);
        prepared->running = 0;
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* The same without a timeout: one pointer is all that crosses from Python. */
PVL_HOT
static int pvl_again(struct pvl_prepared *prepared)
{
    if (prepared->within)
        return PVL_UNUSUAL;
    return pvl_again_within(prepared, prepared->engine->slice_ns);
}
