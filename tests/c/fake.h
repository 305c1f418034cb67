/*
 * A device for the C of ffi/src/ that does what a test tells it to; no libibverbs is needed.
 *
 * Requests complete when `deliver` says so, in the order they were posted in; unsignalled ones say nothing unless they
 * fail. Posts can be refused, and chains cut short.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define FAKE_ROOM 65536

static struct {
    pthread_mutex_t lock;
    struct ibv_context context;
    struct ibv_comp_channel channel;
    struct ibv_cq cq;
    struct ibv_qp qp;
    struct ibv_wc sent[FAKE_ROOM]; /* what was posted and is not complete; wc_flags: whether it is signalled */
    uint32_t lengths[FAKE_ROOM];   /* of each post, ever */
    char sges[FAKE_ROOM];          /* how many each had */
    unsigned int sent_head, sent_tail;
    struct ibv_wc done[FAKE_ROOM];
    unsigned int done_head, done_tail;
    uint64_t recvs[FAKE_ROOM];
    unsigned int recv_head, recv_tail;
    int at_once;     /* complete in the call that posts */
    int refuse_send; /* an errno, for posts from now on */
    int accept;      /* so many of the next chain are accepted before that; -1: no limit */
    int refuse_recv;
    int refuse_modify; /* what the verb returns */
    int armed;
    int posts, polls, arms, events;
} fake;

static void fake_done(const struct ibv_wc *wc)
{
    fake.done[fake.done_tail++ % FAKE_ROOM] = *wc;
    if (fake.armed) {
        fake.armed = 0;
        fake.events++;
        assert(eventfd_write(fake.channel.fd, 1) == 0);
    }
}

/* Complete up to so many posted requests with a status; returns how many there were. */
static int deliver(int most, enum ibv_wc_status status)
{
    int n = 0;

    pthread_mutex_lock(&fake.lock);
    for (; n < most && fake.sent_head != fake.sent_tail; n++) {
        struct ibv_wc wc = fake.sent[fake.sent_head++ % FAKE_ROOM];
        int signalled = (int)wc.wc_flags;

        wc.wc_flags = 0;
        wc.status = status;
        if (signalled || status != IBV_WC_SUCCESS)
            fake_done(&wc);
    }
    pthread_mutex_unlock(&fake.lock);
    return n;
}

static int fake_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    int left = fake.accept;

    (void)qp;
    pthread_mutex_lock(&fake.lock);
    for (; wr; wr = wr->next, left--) {
        uint32_t length = 0;

        if (fake.refuse_send && left <= 0) {
            *bad = wr;
            pthread_mutex_unlock(&fake.lock);
            return fake.refuse_send;
        }
        for (int i = 0; i < wr->num_sge; i++) {
            volatile const char *byte = (const char *)(uintptr_t)wr->sg_list[i].addr;

            length += wr->sg_list[i].length;
            if (wr->opcode != IBV_WR_RDMA_WRITE && wr->sg_list[i].length) /* a sanitizer sees whether it is there */
                (void)byte[0], (void)byte[wr->sg_list[i].length - 1];
        }
        fake.lengths[fake.sent_tail % FAKE_ROOM] = length;
        fake.sges[fake.sent_tail % FAKE_ROOM] = (char)wr->num_sge;
        fake.sent[fake.sent_tail++ % FAKE_ROOM] = (struct ibv_wc){
            .wr_id = wr->wr_id, .wc_flags = !!(wr->send_flags & IBV_SEND_SIGNALED),
        };
        fake.posts++;
    }
    pthread_mutex_unlock(&fake.lock);
    if (fake.at_once)
        deliver(FAKE_ROOM, IBV_WC_SUCCESS);
    return 0;
}

static int fake_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)qp;
    if (fake.refuse_recv) {
        *bad = wr;
        return fake.refuse_recv;
    }
    pthread_mutex_lock(&fake.lock);
    fake.recvs[fake.recv_tail++ % FAKE_ROOM] = wr->wr_id;
    pthread_mutex_unlock(&fake.lock);
    return 0;
}

static int fake_poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
    int n = 0;

    (void)cq;
    pthread_mutex_lock(&fake.lock);
    fake.polls++;
    while (n < most && fake.done_head != fake.done_tail)
        wc[n++] = fake.done[fake.done_head++ % FAKE_ROOM];
    pthread_mutex_unlock(&fake.lock);
    return n;
}

static int fake_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
    (void)cq, (void)solicited_only;
    pthread_mutex_lock(&fake.lock);
    fake.armed = 1;
    fake.arms++;
    pthread_mutex_unlock(&fake.lock);
    return 0;
}

/* Functions of libibverbs that ffi/src/ calls by name. */
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
    eventfd_t count;

    if (eventfd_read(channel->fd, &count))
        return -1;
    *cq = &fake.cq;
    *cq_context = NULL;
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
    (void)cq, (void)count;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    assert(qp == &fake.qp);
    pthread_mutex_lock(&fake.lock);
    if (fake.refuse_modify) {
        pthread_mutex_unlock(&fake.lock);
        return fake.refuse_modify;
    }
    if (mask & IBV_QP_STATE)
        qp->state = attr->qp_state;
    if (qp->state == IBV_QPS_RESET)
        fake.recv_head = fake.recv_tail; /* and sends, of which there are none */
    pthread_mutex_unlock(&fake.lock);
    return 0;
}

#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    struct ibv_mr *mr = calloc(1, sizeof(*mr));

    (void)access;
    mr->pd = pd, mr->addr = addr, mr->length = length, mr->lkey = 77;
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

static void fake_reset(void)
{
    if (fake.channel.fd > 0)
        close(fake.channel.fd);
    memset(&fake, 0, sizeof(fake));
    pthread_mutex_init(&fake.lock, NULL);
    fake.context.ops.post_send = fake_post_send;
    fake.context.ops.post_recv = fake_post_recv;
    fake.context.ops.poll_cq = fake_poll_cq;
    fake.context.ops.req_notify_cq = fake_req_notify_cq;
    fake.channel.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    fake.cq.context = fake.qp.context = &fake.context;
    fake.cq.channel = &fake.channel;
    fake.accept = -1;
}
