/*
 * The hot loops in ffi/src/ on the null provider, so often, for a tool that counts instructions: count CASE TIMES.
 *
 * Each case has a function of its own name, `count_…`, outside of which nothing is to be counted.
 */
#include "../../bench/null_provider/null.c"
#include "../../bench/floor/floor.c"
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include "sources.h" /* ffi/src/, in the order of the build */

#define SLOTS 128
#define RECVS 64
#define SIZE 4096
#define LIST 64

struct side {
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct pvl_receives receives;
    struct pvl_engine *engine;
};
static struct side left, right;
static struct pvl_op op;
static struct pvl_memory *held;
static struct pvl_prepared prepared, prepared_list;
static struct pvl_list list;
static struct pvl_box *box;
static uint64_t offsets[LIST], lengths[LIST];
static char memory[1 << 16];

static void make(struct side *side, struct ibv_pd *pd)
{
    struct ibv_comp_channel *channel = ibv_create_comp_channel(pd->context);
    struct ibv_qp_init_attr init = {.cap = {.max_send_wr = SLOTS, .max_recv_wr = RECVS}, .qp_type = IBV_QPT_RC};

    pvl_set_nonblocking(channel->fd);
    init.send_cq = init.recv_cq = side->cq = ibv_create_cq(pd->context, 2 * SLOTS, NULL, channel, 0);
    side->qp = ibv_create_qp(pd, &init);
    side->receives = (struct pvl_receives){.qp = side->qp, .size = SIZE, .stride = SIZE, .slots = RECVS};
    side->receives.addr = (uintptr_t)calloc(RECVS, SIZE);
    side->engine = pvl_engine_new(side->qp, side->cq, channel, SLOTS, &side->receives, RECVS);
    side->engine->cell_addr = (uintptr_t)calloc(SLOTS, SIZE);
    side->engine->cell_size = SIZE;
    side->engine->max_inline = 64;
    pvl_grant(side->engine, RECVS, RECVS / 2, RECVS, 0, 0, 0);
}

static void join(struct side *side, struct side *other)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .dest_qp_num = other->qp->qp_num};

    ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_DEST_QPN);
    pvl_post_ring(side->engine);
}

#define COUNTED static __attribute__((noinline, noclone)) int

/* What plain C does for a write: post, poll, look at the status. */
COUNTED count_floor(void)
{
    const struct floor_path path = {.qp = left.qp, .cq = left.cq, .addr = (uintptr_t)memory};

    return floor_one(&path, IBV_WR_RDMA_WRITE, 64, 0, SPIN, 1, NULL) < 0;
}

COUNTED count_move(void)
{
    return pvl_move(left.engine, &op, IBV_WR_RDMA_WRITE, held, 64, 64, 4096, 9, 0, 1000000);
}

COUNTED count_write(void)
{
    return pvl_write(&op, held, 64, 64, 4096, 9, 64, 1000000);
}

COUNTED count_again(void)
{
    return pvl_again(&prepared);
}

COUNTED count_copy(void)
{
    return pvl_move_copy(left.engine, &op, IBV_WR_RDMA_WRITE, memory, 64, 4096, 9, 0, 1000000);
}

COUNTED count_send(void)
{
    return pvl_move(left.engine, &op, IBV_WR_SEND, held, 64, 64, 0, 0, 0, 1000000);
}

COUNTED count_recv(void)
{
    return pvl_recv(box) != 64;
}

COUNTED count_list(void)
{
    return pvl_list_move(&list, IBV_WR_RDMA_WRITE, held, 0, sizeof(memory), LIST, offsets, offsets, lengths, 4096, 9,
                         sizeof(memory), 1 << 30, 1000000);
}

COUNTED count_again_list(void)
{
    return pvl_again(&prepared_list);
}

int main(int argc, char **argv)
{
    const char *name = argc == 3 ? argv[1] : "";
    int times = argc == 3 ? atoi(argv[2]) : 0, failed = 0;
    struct ibv_device **devices = ibv_get_device_list(NULL);
    struct ibv_pd *pd = ibv_alloc_pd(ibv_open_device(devices[0]));

    make(&left, pd);
    make(&right, pd);
    join(&left, &right);
    join(&right, &left);
    op.engine = left.engine;
    left.engine->pd = pd;
    left.engine->max_piece = 1 << 30;
    held = pvl_memory_new(left.qp->pd, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    box = calloc(1, sizeof(*box) + 256);
    box->engine = right.engine;
    box->room = 256;
    prepared = (struct pvl_prepared){
        .engine = left.engine, .op = &op, .memory = held, .offset = 64, .remote_addr = 4096, .length = 64, .rkey = 9,
        .opcode = IBV_WR_RDMA_WRITE, .heard = left.engine->heard,
    };
    list = (struct pvl_list){.op = &op, .window = SLOTS / 2};
    prepared_list = prepared;
    prepared_list.list = &list;
    for (int i = 0; i < LIST; i++)
        offsets[i] = (uint64_t)i * 128, lengths[i] = 64; /* no two continue each other */
    for (int i = 0; i < times && !failed; i++) {
        if (!strcmp(name, "floor"))
            failed = count_floor();
        else if (!strcmp(name, "move"))
            failed = count_move();
        else if (!strcmp(name, "write"))
            failed = count_write();
        else if (!strcmp(name, "again"))
            failed = count_again();
        else if (!strcmp(name, "copy"))
            failed = count_copy();
        else if (!strcmp(name, "list"))
            failed = count_list();
        else if (!strcmp(name, "again_list"))
            failed = (i == 0 && count_list()) || count_again_list();
        else if (!strcmp(name, "message"))
            failed = count_send() || count_recv();
        else
            failed = 1;
    }
    if (failed)
        fprintf(stderr, "%s failed\n", name);
    return failed;
}
