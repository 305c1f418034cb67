/*
 * A stand-in for libibverbs whose one device completes every request in the call that posts it.
 *
 * With it, a program pays for its own layer only: no driver, no kernel, no wire. A write or a read moves nothing. A
 * send is copied into the oldest receive of the QP that it is connected to, if that one lives in the same process;
 * without a receive it ends as it would on a device, in RNR_RETRY_EXC_ERR.
 *
 * It has what a reliable connection needs, and for the rest stubs that refuse. There are no locks: one thread drives
 * a pair of QPs at a time. It is built twice, see ../build.py: to be preloaded, and to be found in place of
 * libibverbs.so.1.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <infiniband/verbs.h>

/* Here these names are the functions that programs link to, and not the header's wrappers around them. */
#undef ibv_query_port
#undef ibv_reg_mr

#define MAX_QPS 4096
#define FIRST_QPN 0x100

struct null_cq {
    struct ibv_cq base;
    struct ibv_wc *ring;
    uint32_t mask, head, tail; /* head: next to take; tail: next to fill */
    int armed;
};

struct null_recv {
    uint64_t wr_id, addr;
    uint32_t length;
};

struct null_qp {
    struct ibv_qp base;
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    uint32_t peer; /* the number of the QP that it is connected to */
    struct null_recv *recvs;
    uint32_t mask, head, tail;
};

static struct ibv_device null_device = {
    .node_type = IBV_NODE_CA,
    .transport_type = IBV_TRANSPORT_IB,
    .name = "null0",
    .dev_name = "uverbs0",
    .dev_path = "/nonexistent/uverbs0",
    .ibdev_path = "/nonexistent/null0",
};
static struct null_qp *null_qps[MAX_QPS];
static uint32_t null_next_key = 0x1000;

static uint32_t ring_size(uint32_t least)
{
    uint32_t size = 2;

    while (size < least)
        size *= 2;
    return size;
}

/* ------------------------------------------------------------ the hot calls, reached through the context's table */

static void complete(struct ibv_cq *to, struct ibv_qp *qp, uint64_t wr_id, enum ibv_wc_status status,
                     enum ibv_wc_opcode opcode, uint32_t byte_len, const __be32 *imm)
{
    struct null_cq *cq = (struct null_cq *)to;
    struct ibv_wc *wc = &cq->ring[cq->tail++ & cq->mask];

    wc->wr_id = wr_id;
    wc->status = status;
    wc->opcode = opcode;
    wc->vendor_err = 0;
    wc->byte_len = byte_len;
    wc->qp_num = qp->qp_num;
    wc->wc_flags = imm ? IBV_WC_WITH_IMM : 0;
    wc->imm_data = imm ? *imm : 0;
    if (cq->armed && cq->base.channel) {
        uint64_t one = (uint64_t)(uintptr_t)cq;

        cq->armed = 0;
        if (write((int)(intptr_t)cq->base.channel->refcnt, &one, sizeof(one)) < 0)
            abort();
    }
}

/* Hand a message, or the notice of a write, to the peer; says how the request ends. */
static enum ibv_wc_status deliver(struct null_qp *qp, const struct ibv_send_wr *wr, uint32_t length, int notice,
                                  const __be32 *imm)
{
    struct null_qp *peer = qp->peer - FIRST_QPN < MAX_QPS ? null_qps[qp->peer - FIRST_QPN] : NULL;
    struct null_recv *recv;

    if (!peer || peer->head == peer->tail)
        return IBV_WC_RNR_RETRY_EXC_ERR;
    recv = &peer->recvs[peer->head++ & peer->mask];
    if (!notice) {
        uint64_t at = recv->addr;

        if (length > recv->length)
            return IBV_WC_REM_INV_REQ_ERR;
        for (int i = 0; i < wr->num_sge; at += wr->sg_list[i++].length)
            memcpy((void *)(uintptr_t)at, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
    }
    complete(peer->base.recv_cq, &peer->base, recv->wr_id, IBV_WC_SUCCESS,
             notice ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV, length, imm);
    return IBV_WC_SUCCESS;
}

static int null_post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    static const enum ibv_wc_opcode opcodes[] = {
        [IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
        [IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
        [IBV_WR_SEND] = IBV_WC_SEND,
        [IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND,
        [IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
        [IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
        [IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD,
    };
    struct null_qp *qp = (struct null_qp *)base;

    for (; wr; wr = wr->next) {
        enum ibv_wc_status status = base->state == IBV_QPS_ERR ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
        int with_imm = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || wr->opcode == IBV_WR_SEND_WITH_IMM;
        int message = wr->opcode == IBV_WR_SEND || wr->opcode == IBV_WR_SEND_WITH_IMM;

        if ((unsigned int)wr->opcode > IBV_WR_ATOMIC_FETCH_AND_ADD ||
            (base->state != IBV_QPS_RTS && base->state != IBV_QPS_ERR)) {
            *bad = wr;
            return EINVAL;
        }
        if (status == IBV_WC_SUCCESS && (message || with_imm)) {
            uint32_t length = 0;

            for (int i = 0; i < wr->num_sge; i++)
                length += wr->sg_list[i].length;
            status = deliver(qp, wr, length, !message, with_imm ? &wr->imm_data : NULL);
        }
        if (wr->send_flags & IBV_SEND_SIGNALED || qp->init.sq_sig_all || status != IBV_WC_SUCCESS)
            complete(base->send_cq, base, wr->wr_id, status, opcodes[wr->opcode], 0, NULL);
    }
    return 0;
}

static int null_post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct null_qp *qp = (struct null_qp *)base;

    for (; wr; wr = wr->next) {
        if (base->state == IBV_QPS_ERR) {
            complete(base->recv_cq, base, wr->wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, NULL);
            continue;
        }
        if (qp->tail - qp->head > qp->mask) {
            *bad = wr;
            return ENOMEM;
        }
        qp->recvs[qp->tail++ & qp->mask] = (struct null_recv){
            .wr_id = wr->wr_id,
            .addr = wr->num_sge ? wr->sg_list[0].addr : 0,
            .length = wr->num_sge ? wr->sg_list[0].length : 0,
        };
    }
    return 0;
}

static int null_poll_cq(struct ibv_cq *base, int most, struct ibv_wc *wc)
{
    struct null_cq *cq = (struct null_cq *)base;
    int found = 0;

    while (found < most && cq->head != cq->tail)
        wc[found++] = cq->ring[cq->head++ & cq->mask];
    return found;
}

static int null_req_notify_cq(struct ibv_cq *base, int solicited_only)
{
    (void)solicited_only;
    ((struct null_cq *)base)->armed = 1;
    return 0;
}

/* ------------------------------------------------------------ device */

struct ibv_device **ibv_get_device_list(int *count)
{
    struct ibv_device **list = calloc(2, sizeof(*list));

    list[0] = &null_device;
    if (count)
        *count = 1;
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

int ibv_get_device_index(struct ibv_device *device)
{
    (void)device;
    return 0;
}

__be64 ibv_get_device_guid(struct ibv_device *device)
{
    (void)device;
    return 0x0100000000000002; /* 2:0:0:1, in network order */
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct ibv_context *context = calloc(1, sizeof(*context));

    context->device = device;
    context->ops.poll_cq = null_poll_cq;
    context->ops.req_notify_cq = null_req_notify_cq;
    context->ops.post_send = null_post_send;
    context->ops.post_recv = null_post_recv;
    context->cmd_fd = -1;
    context->async_fd = eventfd(0, EFD_CLOEXEC); /* never readable */
    context->num_comp_vectors = 1;
    pthread_mutex_init(&context->mutex, NULL);
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    close(context->async_fd);
    free(context);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    (void)context;
    *attr = (struct ibv_device_attr){
        .fw_ver = "null",
        .max_mr_size = UINT64_MAX,
        .page_size_cap = 4096,
        .max_qp = MAX_QPS,
        .max_qp_wr = 1 << 16,
        .max_sge = 16,
        .max_sge_rd = 16,
        .max_cq = 1 << 16,
        .max_cqe = 1 << 20,
        .max_mr = 1 << 20,
        .max_pd = 1 << 16,
        .max_qp_rd_atom = 16,
        .max_qp_init_rd_atom = 16,
        .atomic_cap = IBV_ATOMIC_HCA,
        .max_pkeys = 1,
        .phys_port_cnt = 1,
    };
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port_num, struct _compat_ibv_port_attr *out)
{
    struct ibv_port_attr *attr = (struct ibv_port_attr *)out; /* what is written here, the short form has too */

    (void)context;
    if (port_num != 1)
        return EINVAL;
    attr->state = IBV_PORT_ACTIVE;
    attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
    attr->gid_tbl_len = 1;
    attr->max_msg_sz = 1 << 30;
    attr->pkey_tbl_len = 1;
    attr->lid = 1;
    attr->active_width = 2;
    attr->active_speed = 32;
    attr->phys_state = 5;
    attr->link_layer = IBV_LINK_LAYER_INFINIBAND;
    return 0;
}

static const union ibv_gid null_gid = {.raw = {0xfe, 0x80, [8] = 0x02, [15] = 0x01}};

int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid)
{
    (void)context, (void)port_num;
    if (index)
        return -1;
    *gid = null_gid;
    return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port_num, uint32_t gid_index, struct ibv_gid_entry *entry,
                      uint32_t flags, size_t entry_size)
{
    (void)context, (void)flags;
    if (gid_index || port_num != 1)
        return EINVAL;
    memset(entry, 0, entry_size);
    entry->gid = null_gid;
    entry->port_num = 1;
    entry->gid_type = IBV_GID_TYPE_IB;
    return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max_entries,
                             uint32_t flags, size_t entry_size)
{
    return max_entries && _ibv_query_gid_ex(context, 1, 0, entries, flags, entry_size) == 0;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port_num, int index, __be16 *pkey)
{
    (void)context, (void)port_num;
    *pkey = 0xffff;
    return index ? -1 : 0;
}

/* ------------------------------------------------------------ objects */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *pd = calloc(1, sizeof(*pd));

    pd->context = context;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    free(pd);
    return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    struct ibv_mr *mr = calloc(1, sizeof(*mr));

    (void)access;
    mr->context = pd->context;
    mr->pd = pd;
    mr->addr = addr;
    mr->length = length;
    mr->lkey = mr->rkey = null_next_key++;
    return mr;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
    (void)iova;
    return ibv_reg_mr(pd, addr, length, (int)access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
    free(mr);
    return 0;
}

/* A channel is a pipe that the addresses of CQs go through; its other end is kept where the count of users would be. */
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct ibv_comp_channel *channel = calloc(1, sizeof(*channel));
    int ends[2];

    if (pipe(ends)) {
        free(channel);
        return NULL;
    }
    channel->context = context;
    channel->fd = ends[0];
    channel->refcnt = ends[1];
    return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    close(channel->fd);
    close(channel->refcnt);
    free(channel);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
    uint64_t which;

    if (read(channel->fd, &which, sizeof(which)) != sizeof(which))
        return -1;
    *cq = (struct ibv_cq *)(uintptr_t)which;
    *cq_context = (*cq)->cq_context;
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
    cq->comp_events_completed += count;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                             int comp_vector)
{
    struct null_cq *cq = calloc(1, sizeof(*cq));
    uint32_t size = ring_size((uint32_t)cqe);

    (void)comp_vector;
    cq->ring = calloc(size, sizeof(*cq->ring));
    cq->mask = size - 1;
    cq->base.context = context;
    cq->base.channel = channel;
    cq->base.cq_context = cq_context;
    cq->base.cqe = (int)cq->mask;
    return &cq->base;
}

int ibv_destroy_cq(struct ibv_cq *base)
{
    free(((struct null_cq *)base)->ring);
    free(base);
    return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
    struct null_qp *qp;
    uint32_t number = 0, size = ring_size(init->cap.max_recv_wr);

    while (number < MAX_QPS && null_qps[number])
        number++;
    if (number == MAX_QPS) {
        errno = ENOMEM;
        return NULL;
    }
    qp = calloc(1, sizeof(*qp));
    qp->recvs = calloc(size, sizeof(*qp->recvs));
    qp->mask = size - 1;
    if (init->cap.max_inline_data > 256) {
        free(qp->recvs);
        free(qp);
        errno = EINVAL;
        return NULL;
    }
    init->cap.max_inline_data = 256;
    qp->init = *init;
    qp->base = (struct ibv_qp){
        .context = pd->context,
        .qp_context = init->qp_context,
        .pd = pd,
        .send_cq = init->send_cq,
        .recv_cq = init->recv_cq,
        .srq = init->srq,
        .qp_num = FIRST_QPN + number,
        .state = IBV_QPS_RESET,
        .qp_type = init->qp_type,
    };
    null_qps[number] = qp;
    return &qp->base;
}

int ibv_destroy_qp(struct ibv_qp *base)
{
    struct null_qp *qp = (struct null_qp *)base;

    null_qps[base->qp_num - FIRST_QPN] = NULL;
    free(qp->recvs);
    free(qp);
    return 0;
}

int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask)
{
    struct null_qp *qp = (struct null_qp *)base;

    if (mask & IBV_QP_DEST_QPN)
        qp->peer = attr->dest_qp_num;
    if (mask & IBV_QP_STATE) {
        base->state = attr->qp_state;
        qp->attr.qp_state = attr->qp_state;
    }
    if (base->state == IBV_QPS_RESET)
        qp->head = qp->tail; /* its receives are gone without a completion */
    if (base->state == IBV_QPS_ERR)
        while (qp->head != qp->tail)
            complete(base->recv_cq, base, qp->recvs[qp->head++ & qp->mask].wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0,
                     NULL);
    return 0;
}

int ibv_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
    struct null_qp *qp = (struct null_qp *)base;

    (void)mask;
    *attr = qp->attr;
    attr->cap = qp->init.cap;
    attr->dest_qp_num = qp->peer;
    *init = qp->init;
    return 0;
}

/* ------------------------------------------------------------ what a program may look for and does not need here */

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    (void)context, (void)event;
    errno = EAGAIN;
    return -1;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    (void)event;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
    (void)pd, (void)init;
    errno = EOPNOTSUPP;
    return NULL;
}

int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
{
    (void)srq, (void)attr, (void)mask;
    return EOPNOTSUPP;
}

int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
    (void)srq, (void)attr;
    return EOPNOTSUPP;
}

int ibv_destroy_srq(struct ibv_srq *srq)
{
    (void)srq;
    return EOPNOTSUPP;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    (void)pd, (void)attr;
    errno = EOPNOTSUPP;
    return NULL;
}

int ibv_destroy_ah(struct ibv_ah *ah)
{
    (void)ah;
    return EOPNOTSUPP;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
    (void)pd, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
    errno = EOPNOTSUPP;
    return NULL;
}

int ibv_fork_init(void)
{
    return 0;
}

const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    return status == IBV_WC_SUCCESS ? "success" : "failure";
}

const char *ibv_event_type_str(enum ibv_event_type event)
{
    (void)event;
    return "event";
}
