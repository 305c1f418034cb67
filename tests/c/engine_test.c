/*
 * Tests of the hot loops in ffi/src/ on a device that does as it is told; built with sanitizers by tests/test_hot_path.py.
 *
 * Without an argument all run; each name that is run is printed.
 */
#include "fake.h"
#include "sources.h" /* ffi/src/, in the order of the build */

#define SLOTS 8
#define RECVS 4
#define SIZE 8192
#define MS 1000000LL

static struct pvl_engine *engine;
static struct pvl_receives receives;
static char *ring, *cells;
static char memory[1 << 16];
static struct pvl_op op;
static struct ibv_pd domain;

static void begin(void)
{
    fake_reset();
    ring = calloc(RECVS, SIZE);
    cells = calloc(SLOTS, SIZE);
    receives = (struct pvl_receives){
        .qp = &fake.qp, .addr = (uintptr_t)ring, .size = SIZE, .stride = SIZE, .slots = RECVS, .lkey = 5,
    };
    engine = pvl_engine_new(&fake.qp, &fake.cq, &fake.channel, SLOTS, &receives, RECVS);
    assert(engine);
    engine->cell_addr = (uintptr_t)cells;
    engine->cell_size = SIZE;
    pvl_grant(engine, RECVS, RECVS + 1, 1000, 0, 0, 0); /* many may be sent, and nothing is told */
    assert(pvl_post_ring(engine) == 0);
    op = (struct pvl_op){.engine = engine};
    engine->pd = &domain;
    engine->max_piece = 4096;
    engine->max_send = 2000;
    engine->max_reads = 1;
}

static void end(void)
{
    assert(engine->free_count >= pvl_room_left(engine));
    pvl_stop(engine);
    assert(engine->free_count == SLOTS && engine->in_flight == 0);
    pvl_engine_free(engine);
    free(ring);
    free(cells);
}

static int write64(struct pvl_op *of, struct pvl_memory *held, int64_t timeout_ns)
{
    return pvl_move(engine, of, IBV_WR_RDMA_WRITE, held, 64, 64, 4096, 9, 0, timeout_ns);
}

/* ------------------------------------------------------------ one request at a time */

static void a_move_that_is_complete_leaves_nothing(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);

    fake.at_once = 1;
    for (int i = 0; i < 3 * SLOTS; i++)
        assert(write64(&op, held, MS) == 0);
    assert(op.posted == 3 * SLOTS && op.done == op.posted && engine->in_flight == 0);
    assert(pvl_memory_used(held) == 0 && fake.arms == 0);
    assert(pvl_move_copy(engine, &op, IBV_WR_SEND, "abc", 3, 0, 0, 0, MS) == 0);
    assert(fake.lengths[(fake.sent_tail - 1) % FAKE_ROOM] == 3 + PVL_HEADER_BYTES);
    pvl_memory_put(held);
}

static void a_move_that_takes_long_stays_counted(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    struct pvl_op other = {0};

    assert(write64(&op, held, MS) == PVL_PENDING && write64(&other, held, 0) == PVL_PENDING);
    assert(pvl_memory_used(held) == 2 && pvl_memory_close(held, 1) == 2);
    assert(write64(&other, held, 0) == PVL_CLOSED && engine->in_flight == 2); /* and that gave its place back */
    assert(pvl_memory_close(held, 0) == 2);
    deliver(1, IBV_WC_SUCCESS);
    assert(pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS) == 0 && op.done == 1 && other.done == 0);
    assert(pvl_memory_used(held) == 1);
    deliver(1, IBV_WC_SUCCESS);
    assert(write64(&op, held, 0) == PVL_PENDING && other.done == 1); /* whoever looks enters for all */
    deliver(1, IBV_WC_SUCCESS);
    assert(pvl_progress(engine, PVL_UNTIL_SENT, NULL, 0, 50 * MS) == 0);
    assert(pvl_memory_close(held, 1) == 0);
    assert(write64(&op, held, MS) == PVL_CLOSED && engine->free_count == SLOTS);
    pvl_memory_put(held);
}

static void memory_lives_until_the_last_user(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);

    assert(write64(&op, held, 0) == PVL_PENDING);
    pvl_memory_put(held); /* its owner is gone; what is left is the request's */
    deliver(1, IBV_WC_SUCCESS);
    assert(pvl_progress(engine, PVL_UNTIL_SENT, NULL, 0, 50 * MS) == 0);
    held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    assert(write64(&op, held, 0) == PVL_PENDING);
    pvl_memory_put(held); /* this one's last user is ended by pvl_stop() */
}

static void what_is_refused_leaves_nothing(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    struct pvl_op ops[SLOTS] = {{0}};

    fake.refuse_send = ENOMEM;
    assert(write64(&op, held, MS) == ENOMEM);
    fake.refuse_send = -EINVAL; /* some drivers negate it */
    assert(pvl_move_copy(engine, &op, IBV_WR_SEND, "abc", 3, 0, 0, 0, MS) == EINVAL);
    assert(engine->framing.sent == 0 && op.posted == 0 && pvl_memory_used(held) == 0 && engine->free_count == SLOTS);
    fake.refuse_send = 0;
    engine->framing.granted = 0;
    assert(pvl_move_copy(engine, &op, IBV_WR_SEND, "abc", 3, 0, 0, 0, MS) == PVL_NO_CREDIT);
    for (int i = 0; i < SLOTS; i++)
        assert(write64(&ops[i], held, 0) == PVL_PENDING);
    assert(write64(&op, held, 0) == PVL_NO_SLOT && pvl_memory_used(held) == SLOTS);
    engine->over = 1;
    assert(write64(&op, held, 0) == PVL_STOPPED);
    pvl_stop(engine);
    assert(write64(&op, held, MS) == PVL_STOPPED && op.posted == 0);
    for (int i = 0; i < SLOTS; i++)
        assert(ops[i].done == 1 && ops[i].status == IBV_WC_WR_FLUSH_ERR);
    assert(pvl_memory_used(held) == 0);
    pvl_memory_put(held);
}

static void a_failure_is_pending_and_its_cause_kept(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    struct pvl_op other = {0};

    assert(write64(&other, held, 0) == PVL_PENDING);
    deliver(1, IBV_WC_REM_ACCESS_ERR);
    assert(write64(&op, held, MS) == PVL_PENDING && other.status == IBV_WC_REM_ACCESS_ERR && !op.status);
    deliver(1, IBV_WC_WR_FLUSH_ERR);
    assert(pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS) == 0 && op.status == IBV_WC_WR_FLUSH_ERR);
    assert(engine->cause == IBV_WC_REM_ACCESS_ERR && engine->flushed == 1 && pvl_memory_used(held) == 0);
    pvl_memory_put(held);
}

static void the_short_way_is_for_one_caller_at_a_time(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);

    fake.at_once = 1;
    for (int i = 0; i < 2 * SLOTS; i++)
        assert(pvl_write(&op, held, 64, 4096, 4096, 9, 9000, MS) == 0 && pvl_read(&op, held, 64, 9000, 4096, 9, 64, MS) == 0);
    assert(pvl_send(&op, held, 64, 2000, MS) == 0 && !op.busy);
    assert(fake.lengths[(fake.sent_tail - 1) % FAKE_ROOM] == 2000 + PVL_HEADER_BYTES);
    assert(pvl_write_copy(&op, "abc", 3, 4096, 9, 9000, MS) == 0 && pvl_send_copy(&op, "abcd", 4, MS) == 0);
    assert(fake.lengths[(fake.sent_tail - 1) % FAKE_ROOM] == 4 + PVL_HEADER_BYTES);
    assert(op.done == 4 * SLOTS + 3 && pvl_memory_used(held) == 0);
    fake.at_once = 0;
    assert(pvl_write(&op, held, 64, 64, 4096, 9, 9000, 0) == PVL_PENDING && op.busy && pvl_memory_used(held) == 1);
    deliver(1, IBV_WC_SUCCESS);
    assert(pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS) == 0);
    assert(pvl_write(&op, held, 64, 64, 4096, 9, 9000, 0) == PVL_BUSY); /* complete, and its caller has not looked yet */
    op.busy = 0;
    assert(pvl_send_copy(&op, "abc", 3, 0) == PVL_PENDING);
    assert(pvl_send_copy(&op, "abc", 3, 0) == PVL_BUSY && pvl_read(&op, held, 0, 9000, 4096, 9, 1, 0) == PVL_BUSY);
    pvl_memory_put(held);
}

static void the_short_way_refuses_what_it_is_not_for(void)
{
    struct ibv_pd another;
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, 0);
    struct pvl_memory *foreign = pvl_memory_new(&another, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    static char much[SIZE];

    fake.at_once = 1;
    assert(pvl_write(&op, foreign, 0, 1, 4096, 9, 9000, MS) == PVL_UNUSUAL);
    assert(pvl_read(&op, foreign, 0, 9000, 4096, 9, 1, MS) == PVL_UNUSUAL);
    assert(pvl_send(&op, foreign, 0, 1, MS) == PVL_UNUSUAL);
    assert(pvl_read(&op, held, 0, 9000, 4096, 9, 1, MS) == PVL_UNUSUAL); /* nobody may write there */
    assert(pvl_write(&op, held, 0, 4097, 4096, 9, 9000, MS) == PVL_UNUSUAL);
    assert(pvl_write(&op, held, 0, 12, 4096, 9, 11, MS) == PVL_UNUSUAL);
    assert(pvl_write_copy(&op, much, 12, 4096, 9, 11, MS) == PVL_UNUSUAL);
    assert(pvl_write(&op, held, 0, 1ULL << 32, 4096, 9, 9000, MS) == PVL_UNUSUAL);
    assert(pvl_send(&op, held, 0, 2001, MS) == PVL_UNUSUAL && pvl_send_copy(&op, much, 2001, MS) == PVL_UNUSUAL);
    held->access = IBV_ACCESS_LOCAL_WRITE;
    assert(pvl_read(&op, held, 0, 9000, 4096, 9, 4097, MS) == PVL_UNUSUAL);
    assert(pvl_read(&op, held, 0, 11, 4096, 9, 12, MS) == PVL_UNUSUAL);
    assert(pvl_read(&op, held, 0, 11, 4096, 9, 0, MS) == PVL_UNUSUAL);
    engine->max_reads = 0;
    assert(pvl_read(&op, held, 0, 9000, 4096, 9, 1, MS) == PVL_UNUSUAL);
    engine->max_piece = engine->max_send = 1 << 30;
    assert(pvl_write_copy(&op, much, SIZE - PVL_HEADER_BYTES, 4096, 9, 9000, MS) == 0);
    assert(pvl_write_copy(&op, much, SIZE - PVL_HEADER_BYTES + 1, 4096, 9, 9000, MS) == PVL_UNUSUAL);
    assert(pvl_send_copy(&op, much, SIZE - PVL_HEADER_BYTES + 1, MS) == PVL_UNUSUAL);
    engine->max_piece = 10;
    assert(pvl_write_copy(&op, much, 11, 4096, 9, 9000, MS) == PVL_UNUSUAL && op.posted == 1 && !op.busy);
    assert(pvl_memory_close(held, 1) == 0 && pvl_write(&op, held, 0, 1, 4096, 9, 9000, MS) == PVL_CLOSED);
    engine->over = 1;
    assert(pvl_write_copy(&op, much, 1, 4096, 9, 9000, MS) == PVL_STOPPED && !op.busy);
    pvl_stop(engine);
    assert(pvl_write_copy(&op, much, 1, 4096, 9, 9000, MS) == PVL_STOPPED);
    pvl_memory_put(held);
    pvl_memory_put(foreign);
}

static void results_of_reads_and_atomics(void)
{
    char into[16] = {0};
    uint64_t word = 0x1122334455667788;

    op.fetch = into;
    assert(pvl_post(engine, &op, IBV_WR_RDMA_READ, 1, NULL, 0, 5, 0, 4096, 9, 0, 0, 0, 0) == 0);
    memcpy(cells, "found", 5);
    deliver(1, IBV_WC_SUCCESS);
    assert(pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS) == 0 && memcmp(into, "found", 6) == 0);
    assert(pvl_post(engine, &op, IBV_WR_RDMA_READ, 1, NULL, 0, 5, 0, 4096, 9, 0, 0, 0, 0) == 0);
    memcpy(cells, "wrong", 5);
    pvl_abandon(engine, &op);
    deliver(1, IBV_WC_SUCCESS);
    assert(pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS) == 0 && memcmp(into, "found", 6) == 0);
    assert(pvl_post(engine, &op, IBV_WR_ATOMIC_FETCH_AND_ADD, 1, NULL, 0, 8, 0, 4096, 9, 0, 1, 0, 0) == 0);
    memcpy(cells, &word, 8);
    deliver(1, IBV_WC_SUCCESS);
    assert(pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS) == 0 && op.result == word);
}

/* ------------------------------------------------------------ messages */

#define ROOM 200 /* of a box */

static void arrive(uint8_t kind, uint32_t imm, const void *data, uint32_t length)
{
    struct pvl_header header = {.kind = kind, .has_imm = imm != 0, .offered = htonl(1000), .imm = htonl(imm),
                                .length = htonl(length)};
    uint64_t wr_id = fake.recvs[fake.recv_head++ % FAKE_ROOM];
    char *slot = ring + (wr_id & ~PVL_RECV) * SIZE;
    struct ibv_wc wc = {.wr_id = wr_id, .opcode = IBV_WC_RECV, .byte_len = PVL_HEADER_BYTES};

    memcpy(slot, &header, sizeof(header));
    if (kind == PVL_MESSAGE) {
        memcpy(slot + sizeof(header), data, length);
        wc.byte_len += length;
    }
    pthread_mutex_lock(&fake.lock);
    fake_done(&wc);
    pthread_mutex_unlock(&fake.lock);
}

static int last_sges(void)
{
    return fake.sges[(fake.sent_tail - 1) % FAKE_ROOM];
}

/* Of memory that this process sees, short messages go behind their header; what is refused has used and told nothing. */
static void short_messages_take_one_sge(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, 4096, 3, IBV_ACCESS_LOCAL_WRITE); /* that is no address here */
    struct pvl_framing before;
    const char *cell = cells + PVL_HEADER_BYTES;

    fake.at_once = 1;
    memcpy(memory + 7, "short", 5);
    held->here = (uintptr_t)memory;
    held->length = sizeof(memory);
    assert(pvl_send(&op, held, 7, 5, MS) == 0 && last_sges() == 1 && memcmp(cell, "short", 5) == 0);
    assert(pvl_move(engine, &op, IBV_WR_SEND_WITH_IMM, held, 7, 5, 0, 0, 9, MS) == 0 && last_sges() == 1);
    assert(pvl_send(&op, held, 7, 0, MS) == 0 && last_sges() == 1);
    fake.refuse_send = ENOMEM;
    before = engine->framing;
    assert(pvl_send(&op, held, 7, 5, MS) == ENOMEM && memcmp(&before, &engine->framing, sizeof(before)) == 0);
    fake.refuse_send = 0;
    fake.at_once = 0;
    held->addr = (uintptr_t)memory; /* the fake looks at what is sent */
    assert(pvl_send(&op, held, 0, PVL_SHORT + 1, 0) == PVL_PENDING && last_sges() == 2);
    deliver(1, IBV_WC_SUCCESS);
    op.busy = 0;
    held->length = 8; /* registered anew, and shorter: nothing behind it is looked at here */
    assert(pvl_send(&op, held, 4, 5, 0) == PVL_PENDING && last_sges() == 2);
    deliver(1, IBV_WC_SUCCESS);
    op.busy = 0;
    assert(pvl_send(&op, held, 9, 0, 0) == PVL_PENDING && last_sges() == 1);
    deliver(1, IBV_WC_SUCCESS);
    op.busy = 0;
    held->length = sizeof(memory);
    held->here = 0;
    assert(pvl_send(&op, held, 0, 5, 0) == PVL_PENDING && last_sges() == 2);
    deliver(1, IBV_WC_SUCCESS);
    pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, MS);
    assert(pvl_memory_used(held) == 0);
    pvl_memory_put(held);
}

static void messages_are_taken_in_order_and_once(void)
{
    struct pvl_box *box = calloc(1, sizeof(*box) + ROOM);
    char *big = calloc(1, ROOM + 1);
    struct pvl_loan loan = {0};

    box->engine = engine;
    box->room = ROOM;
    engine->slice_ns = 50 * MS;
    assert(pvl_recv_now(box) == PVL_NOTHING && pvl_recv_within(box, MS) == PVL_NOTHING && box->length < 0);
    arrive(PVL_MESSAGE, 0, "one", 3);
    arrive(PVL_MESSAGE, 7, "second", 6);
    assert(pvl_recv_now(box) == 3 && memcmp(box->data, "one", 3) == 0 && box->length == 3);
    assert(pvl_recv_now(box) == PVL_MORE && box->length == 6 && box->imm == 7 && box->has_imm && box->byte_len == 6);
    arrive(PVL_NOTICE, 9, NULL, 12345);
    assert(pvl_recv(box) == PVL_MORE && box->length == 0 && box->imm == 9 && box->byte_len == 12345);
    assert(box->opcode == IBV_WC_RECV_RDMA_WITH_IMM);
    arrive(PVL_MESSAGE, 0, big, ROOM + 1);
    arrive(PVL_MESSAGE, 0, big, ROOM);
    assert(pvl_recv(box) == PVL_LONG && pvl_recv(box) == PVL_LONG && box->length < 0); /* it stays the next one */
    engine->lendable = 0;
    assert(pvl_lend(engine, &loan, 1) == ENOBUFS && !loan.lent);
    assert(pvl_lend(engine, &loan, 0) == 0 && loan.lent && loan.number == 3);
    assert(pvl_give_back(engine, &loan) == 0 && pvl_give_back(engine, &loan) == 0 && engine->recv_posted == RECVS - 1);
    engine->reserved = 1; /* somebody has asked before */
    assert(pvl_recv(box) == PVL_TURN && box->length < 0 && engine->arrived - engine->taken == 1);
    engine->reserved = 0;
    fake.refuse_recv = ENOMEM;
    assert(pvl_recv(box) == PVL_MORE && box->length == ROOM && box->error == ENOMEM);
    assert(engine->taken == engine->arrived && engine->recv_posted == RECVS - 1);
    engine->over = 1;
    assert(pvl_recv(box) == PVL_TURN);
    pvl_stop(engine);
    assert(pvl_recv(box) == PVL_STOPPED);
    free(box);
    free(big);
}

static void who_has_a_message_lent_looks_for_one(void)
{
    struct pvl_loan loan = {0};

    engine->lendable = 1;
    arrive(PVL_MESSAGE, 0, "there", 5);
    assert(pvl_lend(engine, &loan, 0) == PVL_NOTHING && fake.polls == 0);
    assert(pvl_lend(engine, &loan, 1) == 0 && loan.number == 0 && loan.arrival.byte_len == 5 && engine->lent == 1);
    arrive(PVL_MESSAGE, 0, "more", 4);
    memset(&loan, 0, sizeof(loan));
    assert(pvl_lend(engine, &loan, 1) == ENOBUFS && engine->lent == 1 && fake.arms == 0);
}

/* ------------------------------------------------------------ lists */

#define ENTRIES 1000
static uint64_t offsets[ENTRIES], places[ENTRIES], lengths[ENTRIES];

static struct pvl_list list_of(uint64_t count, uint64_t step)
{
    for (uint64_t i = 0; i < count; i++)
        offsets[i] = places[i] = i * step % (sizeof(memory) / 2), lengths[i] = 64;
    return (struct pvl_list){
        .count = count, .offsets = offsets, .remote_offsets = places, .lengths = lengths,
        .base = {.addr = (uintptr_t)memory, .length = sizeof(memory), .opcode = IBV_WR_RDMA_WRITE, .lkey = 3, .rkey = 9},
        .remote_length = sizeof(memory), .max_piece = 1 << 20,
    };
}

static void finish_list(struct pvl_list *list)
{
    assert(pvl_list_start(engine, list, &op, SLOTS / 2) == 0);
    while (op.left || op.posted != op.done) {
        assert(deliver(1, IBV_WC_SUCCESS) == 1);
        pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 0);
        assert(op.posted - op.done <= list->window);
    }
    assert(list->next == list->count && !list->error && !op.status && engine->free_count == SLOTS);
}

static void a_list_goes_through_a_shallow_queue(void)
{
    struct pvl_list list = list_of(ENTRIES, 128);

    assert(pvl_list_check(&list) == ENTRIES);
    finish_list(&list);
    assert(fake.posts == ENTRIES);
}

static void neighbours_travel_as_one_and_long_ones_are_cut(void)
{
    struct pvl_list list = list_of(8, 64);

    finish_list(&list);
    assert(fake.posts == 1 && fake.lengths[0] == 8 * 64);
    list = list_of(8, 64);
    list.max_piece = 100; /* no two fit, and none is cut */
    finish_list(&list);
    assert(fake.posts == 1 + 8);
    list = list_of(1, 0);
    lengths[0] = 250;
    list.max_piece = 100;
    finish_list(&list);
    assert(fake.posts == 12 && fake.lengths[9] == 100 && fake.lengths[11] == 50);
}

static void an_entry_outside_is_found(void)
{
    struct pvl_list list = list_of(9, 128);

    offsets[7] = sizeof(memory) - 63;
    assert(pvl_list_check(&list) == 7);
    offsets[4] = UINT64_MAX; /* its end wraps round */
    assert(pvl_list_check(&list) == 4);
    lengths[2] = UINT64_MAX;
    assert(pvl_list_check(&list) == 2);
    places[1] = list.remote_length + 1;
    assert(pvl_list_check(&list) == 1);
}

static void a_list_that_fails_says_where(void)
{
    struct pvl_list list = list_of(20, 128);

    assert(pvl_list_start(engine, &list, &op, SLOTS / 2) == 0 && op.posted == SLOTS / 2);
    deliver(2, IBV_WC_SUCCESS);
    deliver(1, IBV_WC_REM_ACCESS_ERR);
    deliver(FAKE_ROOM, IBV_WC_WR_FLUSH_ERR);
    pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS);
    assert(op.status == IBV_WC_REM_ACCESS_ERR && op.index == 2 && op.posted == op.done && !op.left);
    assert(list.error == ESHUTDOWN && list.next == SLOTS / 2 && engine->free_count == SLOTS);
}

static void a_chain_cut_short_ends_when_it_is_flushed(void)
{
    struct pvl_list list = list_of(20, 128);

    fake.accept = 2;
    fake.refuse_send = ENOMEM;
    assert(pvl_list_start(engine, &list, &op, SLOTS / 2) == 0);
    assert(list.error == ENOMEM && list.next == 2 && op.posted == 2 && !op.left && engine->in_flight == 2);
    deliver(FAKE_ROOM, IBV_WC_WR_FLUSH_ERR);
    pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS);
    assert(op.done == 2 && op.status == IBV_WC_WR_FLUSH_ERR && engine->free_count == SLOTS);
}

static void a_list_is_let_go_when_the_engine_stops(void)
{
    struct pvl_list list = list_of(20, 128);

    assert(pvl_list_start(engine, &list, &op, SLOTS / 2) == 0);
    pvl_stop(engine);
    assert(op.posted == op.done && !op.left && op.status == IBV_WC_WR_FLUSH_ERR && list.error == ESHUTDOWN);
    assert(pvl_list_start(engine, &list, &op, SLOTS / 2) == PVL_STOPPED);
}

/* Run the list that list_of() makes, of the whole memory. */
static int move_list(struct pvl_list *list, struct pvl_memory *held, uint64_t count, int64_t timeout_ns)
{
    list_of(count, 128);
    return pvl_list_move(list, IBV_WR_RDMA_WRITE, held, 0, sizeof(memory), count, offsets, places, lengths, 4096, 9,
                         sizeof(memory), 1 << 20, timeout_ns);
}

static struct pvl_list own_list(void)
{
    op.engine = engine;
    return (struct pvl_list){.op = &op, .window = SLOTS / 2};
}

static void a_list_is_run_by_one_call(void)
{
    struct ibv_pd another;
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    struct pvl_memory *foreign = pvl_memory_new(&another, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    struct pvl_memory *fixed = pvl_memory_new(&domain, (uintptr_t)memory, 3, 0);
    struct pvl_list list = own_list();

    fake.at_once = 1;
    assert(move_list(&list, foreign, 3, MS) == PVL_UNUSUAL);
    assert(pvl_list_move(&list, IBV_WR_RDMA_READ, fixed, 0, sizeof(memory), 3, offsets, places, lengths, 4096, 9,
                         sizeof(memory), 1 << 20, MS) == PVL_UNUSUAL);
    assert(!fake.posts && !op.left && !engine->lists);
    pvl_memory_put(foreign);
    pvl_memory_put(fixed);
    for (int i = 1; i <= 3; i++) {
        assert(move_list(&list, held, ENTRIES, 1000 * MS) == 0 && fake.posts == i * ENTRIES);
        assert(op.posted == op.done && !op.left && pvl_memory_used(held) == 0 && engine->free_count == SLOTS);
    }
    assert(engine->stats.writes == 3 * ENTRIES && engine->stats.write_bytes == 3 * 64 * ENTRIES);
    assert(move_list(&list, held, 0, MS) == 0 && fake.posts == 3 * ENTRIES);
    list_of(5, 128);
    places[3] = sizeof(memory);
    assert(pvl_list_move(&list, IBV_WR_RDMA_WRITE, held, 0, sizeof(memory), 5, offsets, places, lengths, 4096, 9,
                         sizeof(memory), 1 << 20, MS) == PVL_OUTSIDE);
    assert(fake.posts == 3 * ENTRIES && !op.left && !engine->lists);
    pvl_memory_put(held);
}

static void a_list_that_takes_long_holds_the_memory(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    struct pvl_list list = own_list();

    assert(move_list(&list, held, 20, MS) == PVL_PENDING && op.left && op.posted == SLOTS / 2);
    assert(pvl_memory_close(held, 1) > 1); /* whoever deregisters it sees that it is used, and gives way */
    assert(deliver(SLOTS / 2, IBV_WC_SUCCESS) == SLOTS / 2);
    pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 0);
    assert(op.posted == SLOTS && op.done == SLOTS / 2 && pvl_memory_close(held, 0) > 1);
    while (op.left || op.posted != op.done) {
        deliver(FAKE_ROOM, IBV_WC_SUCCESS);
        pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 0);
    }
    assert(op.posted == 20 && pvl_memory_close(held, 1) == 0);
    assert(move_list(&list, held, 20, MS) == PVL_CLOSED && op.posted == 20 && !op.left && !engine->lists);
    pvl_memory_close(held, 0);
    engine->over = 1;
    assert(move_list(&list, held, 20, MS) == PVL_STOPPED);
    engine->over = 0;
    assert(move_list(&list, held, 20, 0) == PVL_PENDING);
    pvl_stop(engine); /* ends it, and lets the memory go */
    assert(op.posted == op.done && !op.left && list.error == ESHUTDOWN && pvl_memory_used(held) == 0);
    assert(move_list(&list, held, 20, MS) == PVL_STOPPED);
    pvl_memory_put(held);
}

/* As Python does, which may look at any moment: with nothing left the list is nobody's any more. */
static void *forgetter(void *list)
{
    while (__atomic_load_n(&op.left, __ATOMIC_ACQUIRE))
        usleep(10);
    memset(list, 0xff, sizeof(struct pvl_list));
    free(list);
    return NULL;
}

static void a_list_is_let_go_before_anybody_may_forget_it(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);

    for (int i = 0; i < 20; i++) {
        struct pvl_list *list = malloc(sizeof(*list));
        pthread_t thread;

        *list = own_list();
        assert(move_list(list, held, 20, 0) == PVL_PENDING && op.left);
        pthread_create(&thread, NULL, forgetter, list);
        while (__atomic_load_n(&op.left, __ATOMIC_ACQUIRE) || op.posted != op.done) {
            deliver(FAKE_ROOM, IBV_WC_SUCCESS);
            pvl_progress(engine, PVL_UNTIL_SENT, NULL, 0, 0);
        }
        pthread_join(thread, NULL);
        assert(pvl_memory_used(held) == 0);
    }
    pvl_memory_put(held);
}

static void a_refused_list_lets_the_memory_go(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    struct pvl_list list = own_list();

    fake.accept = 0;
    fake.refuse_send = ENOMEM;
    assert(move_list(&list, held, 20, MS) == PVL_PENDING && list.error == ENOMEM && list.next == 0 && !op.posted);
    assert(pvl_memory_used(held) == 0 && engine->free_count == SLOTS && !op.left);
    fake.accept = 3;
    assert(move_list(&list, held, 20, 0) == PVL_PENDING && list.next == 3 && op.posted == 3);
    assert(engine->stats.write_bytes == 3 * 64);
    assert(pvl_memory_used(held) == 1);
    deliver(FAKE_ROOM, IBV_WC_WR_FLUSH_ERR);
    pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS);
    assert(op.done == 3 && op.status == IBV_WC_WR_FLUSH_ERR && pvl_memory_used(held) == 0);
    pvl_memory_put(held);
}

static void a_prepared_list_is_run_again(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    struct pvl_list list = own_list();
    struct pvl_prepared prepared = {.engine = engine, .op = &op, .memory = held, .list = &list};

    engine->slice_ns = MS;
    list_of(20, 128);
    assert(pvl_list_pack(&list, IBV_WR_RDMA_WRITE, 1 << 20, 20, offsets, places, lengths, sizeof(memory), 4096, 9,
                         sizeof(memory)) == 20);
    list.memory = held;
    fake.at_once = 1;
    for (int i = 1; i <= 3; i++)
        assert(pvl_again(&prepared) == 0 && fake.posts == i * 20 && pvl_memory_used(held) == 0);
    fake.at_once = 0;
    assert(pvl_again_within(&prepared, 0) == PVL_PENDING && op.left);
    assert(pvl_again(&prepared) == PVL_LATE);
    deliver(SLOTS / 2, IBV_WC_SUCCESS);
    fake.at_once = 1;
    assert(pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, 50 * MS) == 0 && op.posted == op.done && op.posted == 80);
    pvl_heard(engine); /* the peer may have withdrawn its buffer */
    assert(pvl_again(&prepared) == PVL_CHECK && fake.posts == 80);
    prepared.heard = engine->heard;
    held->addr += 64, held->lkey = 4, held->changes++; /* registered anew */
    assert(pvl_again(&prepared) == PVL_CHECK && fake.posts == 80);
    prepared.changes = held->changes;
    prepared.offset = 32;
    assert(pvl_again(&prepared) == 0 && fake.posts == 100);
    assert(engine->sges[0].addr == (uintptr_t)memory + 64 + 32 + 16 * 128 && engine->sges[0].lkey == 4);
    prepared.running = 1;
    assert(pvl_again(&prepared) == PVL_BUSY);
    prepared.running = 0;
    pvl_memory_close(held, 1);
    assert(pvl_again(&prepared) == PVL_CLOSED && fake.posts == 100);
    pvl_memory_put(held);
}

static void *lister(void *held)
{
    struct pvl_op mine = {.engine = engine};
    struct pvl_list list = {.op = &mine, .window = SLOTS / 2};

    for (int i = 0; i < 20; i++) {
        int rc = pvl_list_move(&list, IBV_WR_RDMA_WRITE, held, 0, sizeof(memory), 30, offsets, places, lengths, 4096, 9,
                               sizeof(memory), 1 << 20, 1000 * MS);

        while (rc == PVL_PENDING)
            rc = pvl_progress(engine, PVL_UNTIL_FEW, &mine, 0, 1000 * MS) ? PVL_PENDING : 0;
        assert(rc == 0);
    }
    assert(mine.posted == 20 * 30 && !mine.status);
    return NULL;
}

/* ------------------------------------------------------------ waits and threads */

static void waits_end_for_the_right_reason(void)
{
    int fds[2], got = 0, woke = 0;
    struct ibv_wc wc[4];

    assert(pipe(fds) == 0);
    assert(pvl_wait(&fake.cq, &fake.channel, fds[0], wc, 4, 0, 0, &got, &woke) == 0 && woke == PVL_WOKE_TIMEOUT && !got);
    assert(pvl_wait(&fake.cq, &fake.channel, fds[0], wc, 4, MS, 2 * MS, &got, &woke) == 0 && woke == PVL_WOKE_TIMEOUT);
    assert(pvl_wait(&fake.cq, NULL, -1, wc, 4, 0, 2 * MS, &got, &woke) == 0 && woke == PVL_WOKE_TIMEOUT);
    assert(eventfd_write(fake.channel.fd, 1) == 0); /* left over: it wakes, and the wait goes on */
    assert(pvl_wait(&fake.cq, &fake.channel, fds[0], wc, 4, 0, 2 * MS, &got, &woke) == 0 && woke == PVL_WOKE_TIMEOUT);
    assert(write(fds[1], "x", 1) == 1);
    assert(pvl_wait(&fake.cq, &fake.channel, fds[0], wc, 4, 0, 50 * MS, &got, &woke) == 0 && woke == PVL_WOKE_PEER);
    fake.arms = 0;
    fake_done(&(struct ibv_wc){.wr_id = 1});
    assert(pvl_wait(&fake.cq, &fake.channel, fds[0], wc, 4, 0, 50 * MS, &got, &woke) == 0 && got == 1 && !fake.arms);
    assert(pvl_await_fd(fds[0], POLLIN, 50 * MS) == 1 && pvl_await_fd(fds[0], POLLOUT, 2 * MS) == 0);
    assert(pvl_await_fd(fds[0], POLLIN, -1) == -EINVAL);
    close(fds[0]);
    close(fds[1]);
}

static int over;

static void *deliverer(void *_)
{
    (void)_;
    while (!__atomic_load_n(&over, __ATOMIC_RELAXED)) {
        deliver(3, IBV_WC_SUCCESS);
        usleep(50);
    }
    return NULL;
}

static void *mover(void *held)
{
    struct pvl_op *mine = calloc(1, sizeof(*mine));
    uint32_t posted = 0;

    for (int i = 0; i < 200; i++) {
        int rc = write64(mine, held, 1000 * MS);

        if (rc == PVL_NO_SLOT) {
            pvl_progress(engine, PVL_UNTIL_SLOT, NULL, 0, 10 * MS);
            continue;
        }
        while (rc == PVL_PENDING) /* a wait ends early where there is something to look at */
            rc = pvl_progress(engine, PVL_UNTIL_FEW, mine, 0, 1000 * MS) ? PVL_PENDING : 0;
        assert(rc == 0);
        posted++;
        assert(__atomic_load_n(&mine->done, __ATOMIC_ACQUIRE) == posted); /* nobody else's */
    }
    free(mine);
    return NULL;
}

/* All of them use one operation, or one of their own while that is another's. */
static void *short_mover(void *held)
{
    struct pvl_op *mine = calloc(1, sizeof(*mine)), *used;

    for (int i = 0; i < 300; i++) {
        int rc = pvl_write(used = &op, held, 64, 64, 4096, 9, 9000, 1000 * MS);

        if (rc == PVL_BUSY)
            rc = write64(used = mine, held, 1000 * MS);
        if (rc == PVL_PENDING) {
            while (pvl_progress(engine, PVL_UNTIL_FEW, used, 0, 1000 * MS))
                ;
            assert(!used->status);
            __atomic_store_n(&used->busy, 0, __ATOMIC_RELEASE);
        } else if (rc == PVL_NO_SLOT) {
            pvl_progress(engine, PVL_UNTIL_SLOT, NULL, 0, 10 * MS);
        } else {
            assert(rc == 0);
        }
    }
    assert(mine->posted == mine->done);
    free(mine);
    return NULL;
}

static void threads_share_an_engine_by(void *(*move)(void *))
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    pthread_t threads[12], other;

    __atomic_store_n(&over, 0, __ATOMIC_RELAXED);
    pthread_create(&other, NULL, deliverer, NULL);
    for (int i = 0; i < 12; i++)
        pthread_create(&threads[i], NULL, move, held);
    for (int i = 0; i < 12; i++)
        pthread_join(threads[i], NULL);
    __atomic_store_n(&over, 1, __ATOMIC_RELAXED);
    pthread_join(other, NULL);
    assert(pvl_memory_used(held) == 0 && engine->sleepers == 0);
    pvl_memory_put(held);
}

static void threads_run_lists(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    pthread_t threads[5], other;

    list_of(30, 128);
    __atomic_store_n(&over, 0, __ATOMIC_RELAXED);
    pthread_create(&other, NULL, deliverer, NULL);
    for (int i = 0; i < 5; i++)
        pthread_create(&threads[i], NULL, lister, held);
    for (int i = 0; i < 5; i++)
        pthread_join(threads[i], NULL);
    __atomic_store_n(&over, 1, __ATOMIC_RELAXED);
    pthread_join(other, NULL);
    assert(pvl_memory_used(held) == 0 && !engine->lists);
    pvl_memory_put(held);
}

static void threads_share_an_engine(void)
{
    threads_share_an_engine_by(mover);
}

static void threads_share_the_short_way(void)
{
    threads_share_an_engine_by(short_mover);
    assert(op.posted == op.done && !op.busy);
}

static void *sleeper(void *out)
{
    *(int *)out = pvl_progress(engine, PVL_UNTIL_ARRIVAL, NULL, 0, 10000 * MS);
    return NULL;
}

static void stopping_wakes_who_waits(void)
{
    pthread_t threads[3];
    int found[3], fds[2];

    assert(pipe(fds) == 0);
    engine->peer_fd = fds[0]; /* ends the wait of the one that polls; the others sleep until he is gone */
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, sleeper, &found[i]);
    usleep(20000);
    assert(write(fds[1], "x", 1) == 1);
    pvl_stop(engine);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert(found[i] == PVL_WOKE_PEER || found[i] == 0 || found[i] == -ESHUTDOWN);
    }
    close(fds[0]);
    close(fds[1]);
}

/* ------------------------------------------------------------ to its states, and back */

static void a_qp_rests_where_nothing_is_in_flight(void)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT};
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);

    assert(pvl_modify(engine, &init, IBV_QP_STATE) == 0 && fake.qp.state == IBV_QPS_INIT);
    fake.refuse_modify = -EINVAL; /* as some drivers say it */
    assert(pvl_modify(engine, &init, IBV_QP_STATE) == EINVAL && pvl_rest(engine) == EINVAL);
    fake.refuse_modify = 0;
    engine->over = 0;
    assert(pvl_to_error(engine) == 0 && fake.qp.state == IBV_QPS_ERR);
    assert(pvl_modify(engine, &init, IBV_QP_STATE) == 0);
    assert(write64(&op, held, 0) == PVL_PENDING && pvl_rest(engine) == PVL_BUSY && fake.qp.state == IBV_QPS_INIT);
    assert(!engine->over && deliver(1, IBV_WC_SUCCESS) == 1);
    assert(pvl_progress(engine, PVL_UNTIL_FEW, &op, 0, MS) == 0);
    arrive(PVL_MESSAGE, 0, "late", 4);
    assert(pvl_rest(engine) == 0 && fake.qp.state == IBV_QPS_RESET && engine->over);
    assert(fake.done_head == fake.done_tail); /* the next connection's CQ has nothing of this one's */
    assert(engine->recv_posted == 0 && engine->arrived == engine->taken);
    assert(pvl_progress(engine, PVL_UNTIL_ARRIVAL, NULL, 0, MS) == 0 && write64(&op, held, 0) == PVL_STOPPED);
    pvl_stop(engine);
    assert(pvl_rest(engine) == PVL_STOPPED && pvl_modify(engine, &init, IBV_QP_STATE) == PVL_STOPPED);
    pvl_memory_put(held);
}

static void *one_read(void *out)
{
    struct pvl_op own = {0};

    *(int *)out = pvl_post(engine, &own, IBV_WR_RDMA_READ, 1, NULL, 0, 5, 0, 4096, 9, 0, 0, 0, 5000 * MS);
    if (*(int *)out == 0)
        *(int *)out = pvl_progress(engine, PVL_UNTIL_FEW, &own, 0, 5000 * MS);
    return NULL;
}

/* Say whether the CQ is armed, and leave it so or not. */
static int armed(int leave)
{
    int now;

    pthread_mutex_lock(&fake.lock);
    now = fake.armed;
    fake.armed = now && leave;
    pthread_mutex_unlock(&fake.lock);
    return now;
}

/* An event loop turns the hub while a thread sleeps on one of its engines: the event is for both. */
static void a_hub_tells_the_loop_and_the_thread(void)
{
    struct pvl_hub *hub;
    int call = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

    engine->spin_ns = 0;
    hub = pvl_hub_new(&fake.channel);
    assert(hub && pvl_hub_join(hub, engine) == 0);
    pvl_poke_at(engine, call);
    for (int i = 0; i < 100; i++) {
        int found = -1, what = 0, looked;
        pthread_t thread;
        uint64_t key;

        armed(0); /* as the look before has left it */
        pthread_create(&thread, NULL, one_read, &found);
        while (!armed(1))
            usleep(100);
        usleep(500); /* until it sleeps, more often than not */
        assert(deliver(1, IBV_WC_SUCCESS) == 1);
        assert(pvl_hub_turn(hub, 1000) == 0);
        key = pvl_hub_next(hub, &what);
        assert(key == engine->key && what == PVL_WOKE_EVENT && pvl_hub_next(hub, &what) == 0);
        looked = pvl_look(engine, 1, 1);
        pthread_join(thread, NULL);
        assert(found == 0);
        if (looked & PVL_LOOKED_BUSY) { /* then it is told to look again */
            eventfd_t pokes = 0;

            assert(eventfd_read(call, &pokes) == 0 && pokes);
        }
    }
    pvl_hub_leave(engine);
    engine->hub = NULL;
    pvl_hub_free(hub);
    pvl_poke_at(engine, -1);
    close(call);
}

/* How often the event loop was poked since it looked for that last. */
static eventfd_t pokes(int fd)
{
    eventfd_t count = 0;

    return eventfd_read(fd, &count) ? 0 : count;
}

/* An event loop asks for events only when it says so, and is poked for what others do, not for what it does itself. */
static void an_event_loop_looks_when_it_likes(void)
{
    struct pvl_memory *held = pvl_memory_new(&domain, (uintptr_t)memory, 3, IBV_ACCESS_LOCAL_WRITE);
    struct pvl_box *box = calloc(1, sizeof(*box) + ROOM);
    int poked = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

    box->engine = engine;
    box->room = ROOM;
    pvl_poke_at(engine, poked);
    fake.at_once = 1;
    assert(write64(&op, held, PVL_NOW) == 0 && pokes(poked) == 0);
    assert(write64(&op, held, MS) == 0 && pokes(poked) == 1);
    arrive(PVL_MESSAGE, 0, "one", 3);
    assert(pvl_recv_within(box, PVL_NOW) == 3 && pvl_recv_within(box, PVL_NOW) == PVL_NOTHING && pokes(poked) == 0);
    fake.at_once = 0;
    assert(write64(&op, held, PVL_NOW) == PVL_PENDING && fake.arms == 0);
    assert(pvl_look(engine, 0, 0) == 0 && fake.arms == 0);
    assert(pvl_look(engine, 0, 1) == 0 && fake.arms == 1);
    deliver(1, IBV_WC_SUCCESS);
    assert(pvl_look(engine, 0, 0) == PVL_LOOKED_FOUND && op.done == op.posted && fake.events == 1);
    assert(pvl_look(engine, 1, 0) == PVL_LOOKED_EVENT && pvl_look(engine, 1, 0) == 0 && fake.arms == 1);
    assert(pokes(poked) == 0);
    /* A thread that sleeps may take the event that the loop has asked for, with nothing behind it. */
    engine->spin_ns = 0;
    assert(write64(&op, held, PVL_NOW) == PVL_PENDING && pvl_look(engine, 0, 1) == 0);
    deliver(1, IBV_WC_SUCCESS);
    assert(pvl_look(engine, 0, 0) == PVL_LOOKED_FOUND);
    assert(pvl_progress(engine, PVL_UNTIL_ARRIVAL, NULL, 0, MS) == PVL_WOKE_TIMEOUT && pokes(poked) == 1);
    assert(pvl_look(engine, 1, 0) == 0);
    pvl_poke_at(engine, -1);
    close(poked);
    pvl_memory_put(held);
    free(box);
}

#define TEST(name) {#name, name}
static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    TEST(a_move_that_is_complete_leaves_nothing),
    TEST(a_move_that_takes_long_stays_counted),
    TEST(memory_lives_until_the_last_user),
    TEST(what_is_refused_leaves_nothing),
    TEST(a_failure_is_pending_and_its_cause_kept),
    TEST(the_short_way_is_for_one_caller_at_a_time),
    TEST(the_short_way_refuses_what_it_is_not_for),
    TEST(results_of_reads_and_atomics),
    TEST(short_messages_take_one_sge),
    TEST(messages_are_taken_in_order_and_once),
    TEST(who_has_a_message_lent_looks_for_one),
    TEST(a_list_goes_through_a_shallow_queue),
    TEST(neighbours_travel_as_one_and_long_ones_are_cut),
    TEST(an_entry_outside_is_found),
    TEST(a_list_that_fails_says_where),
    TEST(a_chain_cut_short_ends_when_it_is_flushed),
    TEST(a_list_is_let_go_when_the_engine_stops),
    TEST(a_list_is_run_by_one_call),
    TEST(a_list_that_takes_long_holds_the_memory),
    TEST(a_list_is_let_go_before_anybody_may_forget_it),
    TEST(a_refused_list_lets_the_memory_go),
    TEST(a_prepared_list_is_run_again),
    TEST(waits_end_for_the_right_reason),
    TEST(threads_share_an_engine),
    TEST(threads_run_lists),
    TEST(threads_share_the_short_way),
    TEST(stopping_wakes_who_waits),
    TEST(a_qp_rests_where_nothing_is_in_flight),
    TEST(a_hub_tells_the_loop_and_the_thread),
    TEST(an_event_loop_looks_when_it_likes),
};

int main(int argc, char **argv)
{
    for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++)
        if (argc < 2 || !strcmp(argv[1], tests[i].name)) {
            printf("%s\n", tests[i].name);
            fflush(stdout);
            begin();
            tests[i].run();
            end();
        }
    close(fake.channel.fd);
    return 0;
}
