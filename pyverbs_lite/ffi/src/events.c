/*
 * Asynchronous events: taken, copied and acknowledged in one step.
 *
 * Destroying an object waits until its events are acknowledged. An exception between reading an event and
 * acknowledging it (Ctrl-C) would make that wait endless, so there is no place for one.
 */
struct pvl_event {
    int taken; /* whether the rest is an event that nobody has read yet */
    int event_type;
    uint64_t element; /* the address of the object, or the port's number */
    uint32_t handle;  /* the kernel's number of the object */
    uint32_t number;  /* of a QP or a WQ, what the peer or the hardware calls it */
};

/*
 * Take one event if there is one; the context's async_fd must be non-blocking.
 *
 * Returns 0, -EAGAIN where there is none, or another negative errno. What was taken before and is marked so stays.
 */
static int pvl_take_event(struct ibv_context *context, struct pvl_event *out)
{
    struct ibv_async_event event = {0};

    if (out->taken)
        return 0;
    for (;;) {
        errno = 0; /* ibv_get_async_event() leaves it alone when it reads too little */
        if (ibv_get_async_event(context, &event) == 0)
            break;
        if (errno != EINTR)
            return errno ? -errno : -EIO;
    }
    out->event_type = event.event_type;
    out->handle = 0;
    out->number = 0;
    /* The object is certain to be there only until its event is acknowledged. */
    switch (event.event_type) {
    case IBV_EVENT_CQ_ERR:
        out->element = (uintptr_t)event.element.cq;
        out->handle = event.element.cq->handle;
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        out->element = (uintptr_t)event.element.qp;
        out->handle = event.element.qp->handle;
        out->number = event.element.qp->qp_num;
        break;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        out->element = (uintptr_t)event.element.srq;
        out->handle = event.element.srq->handle;
        break;
    case IBV_EVENT_WQ_FATAL:
        out->element = (uintptr_t)event.element.wq;
        out->handle = event.element.wq->handle;
        out->number = event.element.wq->wq_num;
        break;
    default:
        out->element = (uint64_t)event.element.port_num;
        break;
    }
    ibv_ack_async_event(&event);
    out->taken = 1;
    return 0;
}
