/*
 * The floor: what plain C pays for the same requests, on the same QP, with the same waits.
 *
 * Loops over objects that somebody else made; each writes the nanoseconds of every turn to `out`, if that is given,
 * and returns those of all turns, or a negative number: -1 - status of a failed completion, -1000 - errno of a verb.
 */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
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
