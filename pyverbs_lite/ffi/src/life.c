/*
 * The life of a connection's QP beside its requests: to its states, and back to RESET for the next connection.
 *
 * All of it under the engine's lock: whoever destroys the QP, in whatever thread, stops the engine first.
 */

/* Modify the QP by those members of attr that the mask names; returns 0, PVL_STOPPED, or an errno. */
static int pvl_modify(struct pvl_engine *engine, struct ibv_qp_attr *attr, int mask)
{
    int rc;

    pthread_mutex_lock(&engine->lock);
    rc = engine->stopped ? PVL_STOPPED : abs(ibv_modify_qp(engine->qp, attr, mask)); /* some drivers negate it */
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* Move the QP to ERR, which flushes every request; returns as pvl_modify(). */
static int pvl_to_error(struct pvl_engine *engine)
{
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};

    return pvl_modify(engine, &error, IBV_QP_STATE);
}

/*
 * End a connection of which nothing is in flight but receives, and in which no thread waits: bring its QP to RESET, where
 * they are gone without a completion, and empty its CQ, which must be no other QP's.
 *
 * Returns 0, PVL_BUSY or PVL_STOPPED where it is not so, or an errno. After any of them but the first nothing was done,
 * except that no receive is posted again after an errno.
 */
static int pvl_rest(struct pvl_engine *engine)
{
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    int rc = 0, got;

    pthread_mutex_lock(&engine->lock);
    if (engine->stopped) {
        rc = PVL_STOPPED;
    } else if (engine->in_flight || engine->polling || engine->sleepers || engine->lists || engine->hub) {
        rc = PVL_BUSY;
    } else {
        engine->over = 1;
        rc = abs(ibv_modify_qp(engine->qp, &reset, IBV_QP_STATE));
        if (rc == 0) {
            while ((got = ibv_poll_cq(engine->cq, PVL_BATCH, engine->wc)) > 0)
                ;
            __atomic_store_n(&engine->recv_posted, 0, __ATOMIC_RELEASE);
            rc = got ? EIO : 0;
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}
