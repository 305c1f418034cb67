/*
 * The floor: what plain C pays for the same requests, on the same QP, with the same waits.
 *
 * Loops over objects that somebody else made; each writes the nanoseconds of every turn to `out`, if that is given,
 * and returns those of all turns, or a negative number: -1 - status of a failed completion, -1000 - errno of a verb.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <infiniband/verbs.h>

enum { SPIN, YIELD, EVENTS }; /* how to wait: see wait_for() */

struct floor_path {
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_comp_channel *channel; /* its descriptor is non-blocking */
    uint64_t addr;
    uint64_t remote_addr;
    uint32_t lkey;
    uint32_t rkey;
    /* the receive ring, where there is one: slot n is posted with the wr_id `ring_flag | n` */
    uint64_t ring_addr;
    uint64_t ring_flag;
    uint32_t ring_size;
    uint32_t ring_lkey;
};

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Take at least one completion and at most `most`; returns how many, or a negative number as above. */
static int wait_for(const struct floor_path *path, int how, int most, struct ibv_wc *wc)
{
    int n, rc, armed = 0;

    while ((n = ibv_poll_cq(path->cq, most, wc)) == 0) {
        if (how == YIELD) {
            sched_yield();
        } else if (how == EVENTS && !armed) {
            if ((rc = ibv_req_notify_cq(path->cq, 0)))
                return -1000 - rc;
            armed = 1; /* and poll once more: it may have come in between */
        } else if (how == EVENTS) {
            struct pollfd fd = {.fd = path->channel->fd, .events = POLLIN};
            struct ibv_cq *cq;
            void *context;

            if (poll(&fd, 1, -1) < 0 && errno != EINTR)
                return -1000 - errno;
            if (ibv_get_cq_event(path->channel, &cq, &context) == 0)
                ibv_ack_cq_events(cq, 1);
            armed = 0;
        }
    }
    if (n < 0)
        return -1000 - EIO;
    for (int i = 0; i < n; i++)
        if (wc[i].status != IBV_WC_SUCCESS)
            return -1 - (int)wc[i].status;
    return n;
}

static struct ibv_send_wr request(const struct floor_path *path, int opcode, struct ibv_sge *sge, uint32_t length,
                                  int flags)
{
    *sge = (struct ibv_sge){.addr = path->addr, .length = length, .lkey = path->lkey};
    return (struct ibv_send_wr){
        .wr_id = 7,
        .sg_list = sge,
        .num_sge = 1,
        .opcode = (enum ibv_wr_opcode)opcode,
        .send_flags = (unsigned int)flags,
        .wr.rdma = {.remote_addr = path->remote_addr, .rkey = path->rkey},
    };
}

/* Post one request, wait for it, look at its status; so often. */
int64_t floor_one(const struct floor_path *path, int opcode, uint32_t length, int flags, int how, int64_t turns,
                  int64_t *out)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = request(path, opcode, &sge, length, flags | IBV_SEND_SIGNALED), *bad;
    struct ibv_wc wc;
    int64_t start = now_ns(), before = start;

    for (int64_t i = 0; i < turns; i++) {
        int rc = ibv_post_send(path->qp, &wr, &bad);

        if (rc)
            return -1000 - rc;
        rc = wait_for(path, how, 1, &wc);
        if (rc < 0)
            return rc;
        if (out) {
            int64_t after = now_ns();

            out[i] = after - before;
            before = after;
        }
    }
    return now_ns() - start;
}

/* Post so many requests with at most `window` in flight, every one signalled. */
int64_t floor_window(const struct floor_path *path, int opcode, uint32_t length, int how, int64_t turns,
                     int64_t window)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = request(path, opcode, &sge, length, IBV_SEND_SIGNALED), *bad;
    struct ibv_wc wc[64];
    int64_t start = now_ns(), posted = 0, done = 0;

    while (done < turns) {
        int n;

        while (posted < turns && posted - done < window) {
            int rc = ibv_post_send(path->qp, &wr, &bad);

            if (rc)
                return -1000 - rc;
            posted++;
        }
        n = wait_for(path, how, 64, wc);
        if (n < 0)
            return n;
        done += n;
    }
    return now_ns() - start;
}

/* The same as lists of `batch`, the last of each signalled, one list in flight. */
int64_t floor_lists(const struct floor_path *path, int opcode, uint32_t length, int how, int64_t turns, int batch)
{
    struct ibv_sge sge;
    struct ibv_send_wr wrs[64], *bad;
    struct ibv_wc wc;
    int64_t start;

    if (batch > 64)
        return -1000 - EINVAL;
    for (int i = 0; i < batch; i++) {
        wrs[i] = request(path, opcode, &sge, length, i == batch - 1 ? IBV_SEND_SIGNALED : 0);
        wrs[i].next = i == batch - 1 ? NULL : &wrs[i + 1];
    }
    start = now_ns();
    for (int64_t i = 0; i < turns; i += batch) {
        int rc = ibv_post_send(path->qp, wrs, &bad);

        if (rc)
            return -1000 - rc;
        rc = wait_for(path, how, 1, &wc);
        if (rc < 0)
            return rc;
    }
    return now_ns() - start;
}

static int repost(const struct floor_path *path, uint64_t wr_id)
{
    struct ibv_sge sge = {
        .addr = path->ring_addr + (wr_id & ~path->ring_flag) * path->ring_size,
        .length = path->ring_size,
        .lkey = path->ring_lkey,
    };
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;

    return ibv_post_recv(path->qp, &wr, &bad);
}

/* Send one message from one end, wait for it, take it at the other, copy it out, and post its receive again. */
static int pass(const struct floor_path *from, const struct floor_path *to, uint32_t length, int flags, int how,
                void *into)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = request(from, IBV_WR_SEND, &sge, length, flags | IBV_SEND_SIGNALED), *bad;
    struct ibv_wc wc;
    int rc = ibv_post_send(from->qp, &wr, &bad);

    if (rc)
        return -1000 - rc;
    if ((rc = wait_for(from, how, 1, &wc)) < 0)
        return rc;
    if ((rc = wait_for(to, how, 1, &wc)) < 0)
        return rc;
    memcpy(into, (const void *)(uintptr_t)(to->ring_addr + (wc.wr_id & ~to->ring_flag) * to->ring_size), length);
    rc = repost(to, wc.wr_id);
    return rc ? -1000 - rc : 0;
}

/* One message there and one back, each waited for at both ends; both ends are this thread's. */
int64_t floor_pingpong(const struct floor_path *left, const struct floor_path *right, uint32_t length, int flags,
                       int how, int64_t turns, int64_t *out)
{
    char into[4096];
    int64_t start = now_ns(), before = start;

    if (length > sizeof(into))
        return -1000 - EINVAL;
    for (int64_t i = 0; i < turns; i++) {
        int rc = pass(left, right, length, flags, how, into);

        if (rc == 0)
            rc = pass(right, left, length, flags, how, into);
        if (rc < 0)
            return rc;
        if (out) {
            int64_t after = now_ns();

            out[i] = after - before;
            before = after;
        }
    }
    return now_ns() - start;
}

/* ------------------------------------------------------------ what a connection is made of */

struct floor_parts {
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    struct ibv_qp *qp;
};

enum { SENDS = 64, RECVS = 26, SLOT = 65600, CELLS = 64 * 4112 }; /* those of a connection's default options */

static int unmake_parts(struct floor_parts *parts)
{
    int rc = 0;

    if (parts->qp && ibv_destroy_qp(parts->qp))
        rc = -1000 - errno;
    if (parts->mr && ibv_dereg_mr(parts->mr))
        rc = -1000 - errno;
    if (parts->cq && ibv_destroy_cq(parts->cq))
        rc = -1000 - errno;
    if (parts->channel && ibv_destroy_comp_channel(parts->channel))
        rc = -1000 - errno;
    if (parts->pd && ibv_dealloc_pd(parts->pd))
        rc = -1000 - errno;
    *parts = (struct floor_parts){0};
    return rc;
}

static int make_parts(struct floor_parts *parts, struct ibv_context *context, void *memory)
{
    struct ibv_qp_init_attr init = {
        .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = SENDS, .max_recv_wr = RECVS, .max_send_sge = 2,
                                       .max_recv_sge = 1, .max_inline_data = 80},
    };

    if (!(parts->pd = ibv_alloc_pd(context)) || !(parts->channel = ibv_create_comp_channel(context)) ||
        fcntl(parts->channel->fd, F_SETFL, fcntl(parts->channel->fd, F_GETFL) | O_NONBLOCK) < 0 ||
        !(parts->cq = ibv_create_cq(context, SENDS + RECVS, NULL, parts->channel, 0)) ||
        !(parts->mr = ibv_reg_mr(parts->pd, memory, CELLS + RECVS * SLOT, IBV_ACCESS_LOCAL_WRITE)))
        return -1000 - errno;
    init.send_cq = init.recv_cq = parts->cq;
    return (parts->qp = ibv_create_qp(parts->pd, &init)) ? 0 : -1000 - errno;
}

static int live(struct floor_parts *parts, int sgid_index, int end)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
        .path_mtu = IBV_MTU_1024, .dest_qp_num = parts->qp->qp_num, .max_dest_rd_atomic = 16, .min_rnr_timer = 12,
        .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16,
    };
    struct ibv_port_attr port;
    struct ibv_wc wc;
    int rc;

    /* The null provider, which tests/c/count.c has in one program with this, declares it with another type. */
    if ((rc = ibv_query_port(parts->pd->context, 1, (void *)&port)))
        return -1000 - rc;
    attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1};
    attr.ah_attr.grh.sgid_index = (uint8_t)sgid_index;
    attr.ah_attr.grh.hop_limit = 64;
    if (ibv_query_gid(parts->pd->context, 1, sgid_index, &attr.ah_attr.grh.dgid))
        return -1000 - EIO;
    if ((rc = ibv_modify_qp(parts->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)))
        return -1000 - rc;
    for (int i = 0; i < RECVS; i++) {
        struct ibv_sge sge = {(uintptr_t)parts->mr->addr + CELLS + (uint64_t)i * SLOT, SLOT, parts->mr->lkey};
        struct ibv_recv_wr wr = {.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1}, *bad;

        if ((rc = ibv_post_recv(parts->qp, &wr, &bad)))
            return -1000 - rc;
    }
    attr.qp_state = IBV_QPS_RTR;
    if ((rc = ibv_modify_qp(parts->qp, &attr,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)))
        return -1000 - rc;
    attr.qp_state = IBV_QPS_RTS;
    if ((rc = ibv_modify_qp(parts->qp, &attr,
                            IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                IBV_QP_MAX_QP_RD_ATOMIC)))
        return -1000 - rc;
    attr.qp_state = end;
    if ((rc = ibv_modify_qp(parts->qp, &attr, IBV_QP_STATE)))
        return -1000 - rc;
    while ((rc = ibv_poll_cq(parts->cq, 1, &wc)) > 0)
        ;
    return rc < 0 ? -1000 - EIO : 0;
}

/*
 * The verbs of one end of a connection, from nothing to its end, on a QP that is its own peer: each time with objects of
 * its own, or with `kept` ones.
 */
int64_t floor_life(struct ibv_context *context, int sgid_index, int kept, int64_t turns)
{
    void *memory = mmap(NULL, CELLS + RECVS * SLOT, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    struct floor_parts parts = {0};
    int64_t start;
    int rc = 0, last;

    if (memory == MAP_FAILED)
        return -1000 - errno;
    if (kept)
        rc = make_parts(&parts, context, memory);
    start = now_ns();
    for (int64_t i = 0; i < turns && rc == 0; i++) {
        if (!kept)
            rc = make_parts(&parts, context, memory);
        if (rc == 0)
            rc = live(&parts, sgid_index, kept ? IBV_QPS_RESET : IBV_QPS_ERR);
        if (!kept && (last = unmake_parts(&parts)) < 0 && rc == 0)
            rc = last;
    }
    start = now_ns() - start;
    if ((last = unmake_parts(&parts)) < 0 && rc == 0)
        rc = last;
    munmap(memory, CELLS + RECVS * SLOT);
    return rc < 0 ? rc : start;
}
