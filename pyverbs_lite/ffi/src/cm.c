/*
 * Events of the connection manager: taken, copied and acknowledged in one step.
 *
 * Destroying an identifier waits until its events are acknowledged. An exception between reading an event and
 * acknowledging it (Ctrl-C) would make that wait endless, so there is no place for one.
 */
#include <rdma/rdma_cma.h>

struct pvl_cm_event {
    int taken; /* whether the rest is an event that nobody has read yet */
    int event;
    int status;
    int is_ud;        /* whether the parameters are those of datagrams */
    uint64_t context; /* whose event it is: the number that the identifier was created with */
    uint64_t group;   /* the number that a multicast group was joined with, or 0 */
    struct rdma_cm_id *request; /* a new identifier that wants to connect, or NULL */

    uint8_t responder_resources;
    uint8_t initiator_depth;
    uint8_t flow_control;
    uint8_t retry_count;
    uint8_t rnr_retry_count;
    uint8_t srq;
    uint32_t qp_num;
    uint32_t qkey;
    struct ibv_ah_attr ah_attr;

    uint8_t private_data_len;
    uint8_t private_data[256];
};

/*
 * Take one event if there is one; the channel's descriptor must be non-blocking.
 *
 * Returns 0, -EAGAIN where there is none, or another negative errno. What was taken before and is marked so stays.
 */
static int pvl_cm_take(struct rdma_event_channel *channel, struct pvl_cm_event *out)
{
    struct rdma_cm_event *event;
    const void *data;
    uint8_t length;

    if (out->taken)
        return 0;
    for (;;) {
        errno = 0;
        if (rdma_get_cm_event(channel, &event) == 0)
            break;
        if (errno != EINTR)
            return errno ? -errno : -EIO;
    }
    memset(out, 0, sizeof(*out));
    out->event = event->event;
    out->status = event->status;
    out->is_ud = event->id->qp_type == IBV_QPT_UD;
    out->context = (uintptr_t)event->id->context;
    if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
        out->context = (uintptr_t)event->listen_id->context;
        out->request = event->id;
        event->id->context = NULL; /* it is still that of the listener */
    }
    if (out->is_ud) {
        out->qp_num = event->param.ud.qp_num;
        out->qkey = event->param.ud.qkey;
        out->ah_attr = event->param.ud.ah_attr;
        data = event->param.ud.private_data;
        length = event->param.ud.private_data_len;
    } else {
        out->responder_resources = event->param.conn.responder_resources;
        out->initiator_depth = event->param.conn.initiator_depth;
        out->flow_control = event->param.conn.flow_control;
        out->retry_count = event->param.conn.retry_count;
        out->rnr_retry_count = event->param.conn.rnr_retry_count;
        out->srq = event->param.conn.srq;
        out->qp_num = event->param.conn.qp_num;
        data = event->param.conn.private_data;
        length = event->param.conn.private_data_len;
    }
    if (event->event == RDMA_CM_EVENT_MULTICAST_JOIN || event->event == RDMA_CM_EVENT_MULTICAST_ERROR) {
        out->group = (uintptr_t)data; /* librdmacm hands the joiner's context back in its place */
    } else if (data && length) {
        out->private_data_len = length;
        memcpy(out->private_data, data, length);
    }
    rdma_ack_cm_event(event);
    out->taken = 1;
    return 0;
}
