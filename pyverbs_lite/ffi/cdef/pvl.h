/* Our own C: what has to happen without crossing into Python (see src/). */
#define PVL_WOKE_PEER ...
#define PVL_WOKE_SIGNAL ...
#define PVL_WOKE_TIMEOUT ...
#define PVL_WOKE_CONTROL ...
#define PVL_WOKE_EVENT ...

int pvl_wait(struct ibv_cq *cq, struct ibv_comp_channel *channel, int peer_fd, struct ibv_wc *wc, int max_wc,
             int64_t spin_ns, int64_t timeout_ns, int *got, int *woke);
int pvl_await_fd(int fd, int events, int64_t timeout_ns);
int pvl_set_nonblocking(int fd);
int pvl_drain_events(struct ibv_comp_channel *channel);

struct pvl_event {
    int taken;
    int event_type;
    uint64_t element;
    uint32_t handle;
    uint32_t number;
};
int pvl_take_event(struct ibv_context *context, struct pvl_event *out);

#define PVL_MAP_HUGETLB ...

#define PVL_NO_SLOT ...
#define PVL_STOPPED ...
#define PVL_NO_CREDIT ...
#define PVL_PENDING ...
#define PVL_NOTHING ...
#define PVL_LONG ...
#define PVL_BUSY ...
#define PVL_LATE ...
#define PVL_CHECK ...
#define PVL_UNUSUAL ...
#define PVL_NOW ...
#define PVL_MORE ...
#define PVL_TURN ...
#define PVL_UNTIL_FEW ...
#define PVL_UNTIL_ARRIVAL ...
#define PVL_UNTIL_SLOT ...
#define PVL_UNTIL_IDLE ...
#define PVL_UNTIL_SENT ...
#define PVL_UNTIL_NEWS ...
#define PVL_UNTIL_CREDIT ...
#define PVL_UNTIL_CONTROL ...
#define PVL_WR_CONTROL ...
#define PVL_HEADER_BYTES ...

struct pvl_op {
    struct pvl_engine *engine;
    int32_t busy;
    uint32_t posted;
    uint32_t done;
    int32_t status;
    uint32_t vendor_err;
    uint64_t wr_id;
    uint64_t index;
    uint32_t left;
    void *fetch;
    uint64_t result;
};
struct pvl_memory {
    uint64_t addr;
    uint64_t here;
    uint64_t length;
    uint32_t lkey;
    uint32_t changes;
    struct ibv_pd *pd;
    uint32_t access;
    ...;
};
struct pvl_box {
    struct pvl_engine *engine;
    uint32_t room;
    int32_t length;
    uint32_t byte_len;
    uint32_t imm;
    int32_t has_imm;
    int32_t opcode;
    int32_t error;
    uint64_t number;
    char data[];
};
struct pvl_request {
    uint64_t addr;
    uint64_t length;
    uint64_t remote_addr;
    uint32_t lkey;
    uint32_t rkey;
    int32_t opcode;
    uint32_t imm;
};
struct pvl_list {
    struct pvl_op *op;
    struct pvl_memory *memory;
    uint64_t count;
    const struct pvl_request *requests;
    const uint64_t *offsets;
    const uint64_t *remote_offsets;
    const uint64_t *lengths;
    struct pvl_request base;
    uint64_t remote_length;
    uint64_t max_piece;
    uint32_t window;
    uint64_t next;
    int32_t error;
    ...;
};
struct pvl_arrival {
    uint32_t slot;
    uint32_t byte_len;
    uint32_t imm;
    int32_t has_imm;
    int32_t opcode;
};
struct pvl_receives {
    struct ibv_qp *qp;
    struct ibv_srq *srq;
    uint64_t addr;
    uint32_t lkey;
    uint32_t size;
    uint32_t stride;
    uint32_t slots;
    uint32_t *lkeys;
    uint32_t block;
    uint32_t ready;
    uint32_t out;
    uint32_t shares;
    uint32_t lost;
    uint32_t members;
    uint32_t lent;
    ...;
};
#define PVL_POOL_LOST ...
void pvl_pool_init(struct pvl_receives *pool);
void pvl_pool_reset(struct pvl_receives *pool, struct ibv_srq *srq);
struct pvl_framing {
    int malformed;
    uint32_t granted, sent, offered, told;
    uint16_t control_worth_telling;
    struct pvl_arrival *control;
    uint64_t control_arrived;
    uint64_t control_taken;
    ...;
};
struct pvl_stats {
    uint64_t sends;
    uint64_t send_bytes;
    uint64_t recvs;
    uint64_t recv_bytes;
    uint64_t writes;
    uint64_t write_bytes;
    uint64_t reads;
    uint64_t read_bytes;
    uint64_t atomics;
    uint64_t errors;
    uint64_t polls;
    uint64_t sleeps;
    uint64_t credit_waits;
    uint64_t registrations;
    uint32_t in_flight;
    uint32_t in_flight_peak;
};
struct pvl_engine {
    struct pvl_framing framing;
    uint64_t key;
    int polling;
    int over;
    uint32_t heard;
    int stopped;
    int peer_fd;
    int64_t spin_ns;
    int64_t slice_ns;
    struct ibv_pd *pd;
    uint32_t max_piece;
    uint32_t max_send;
    uint32_t max_reads;
    uint32_t send_slots;
    uint32_t in_flight;
    uint32_t free_count;
    uint32_t max_inline;
    uint32_t cell_size;
    uint32_t cell_lkey;
    uint64_t cell_addr;
    struct pvl_op own;
    struct pvl_receives *receives;
    uint32_t recv_slots;
    uint32_t recv_posted;
    int in_order;
    uint32_t ring_mask;
    struct pvl_arrival *arrivals;
    uint64_t arrived;
    uint64_t taken;
    uint32_t reserved;
    uint32_t lent;
    uint32_t lendable;
    int32_t cause;
    uint32_t cause_vendor_err;
    uint64_t cause_wr_id;
    uint32_t flushed;
    ...;
};

struct pvl_engine *pvl_engine_new(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_comp_channel *channel,
                                  uint32_t send_slots, struct pvl_receives *receives, uint32_t recv_slots);
void pvl_engine_free(struct pvl_engine *engine);
int pvl_post_ring(struct pvl_engine *engine);
int pvl_recv(struct pvl_box *box);
int pvl_recv_now(struct pvl_box *box);
int pvl_recv_within(struct pvl_box *box, int64_t timeout_ns);
struct pvl_loan {
    int32_t lent;
    int32_t counted;
    uint64_t number;
    struct pvl_arrival arrival;
};
int pvl_lend(struct pvl_engine *engine, struct pvl_loan *loan, int counted);
int pvl_give_back(struct pvl_engine *engine, struct pvl_loan *loan);
int pvl_take_control(struct pvl_engine *engine, uint64_t index);
void pvl_grant(struct pvl_engine *engine, uint32_t offered, uint32_t worth_telling, uint32_t granted, uint16_t control,
               uint16_t control_worth_telling, int no_imm);
int pvl_progress(struct pvl_engine *engine, int until, const struct pvl_op *op, uint32_t few, int64_t timeout_ns);
int pvl_post(struct pvl_engine *engine, struct pvl_op *op, int opcode, int staged, const void *source, uint64_t addr,
             uint32_t length, uint32_t lkey, uint64_t remote_addr, uint32_t rkey, uint32_t imm, uint64_t argument,
             uint64_t swap, int64_t timeout_ns);
int pvl_move(struct pvl_engine *engine, struct pvl_op *op, int opcode, struct pvl_memory *memory, uint64_t offset,
             uint32_t length, uint64_t remote_addr, uint32_t rkey, uint32_t imm, int64_t timeout_ns);
int pvl_move_copy(struct pvl_engine *engine, struct pvl_op *op, int opcode, const void *source, uint32_t length,
                  uint64_t remote_addr, uint32_t rkey, uint32_t imm, int64_t timeout_ns);
int pvl_write(struct pvl_op *op, struct pvl_memory *memory, uint64_t offset, uint64_t length, uint64_t remote_addr,
              uint32_t rkey, uint64_t room, int64_t timeout_ns);
int pvl_read(struct pvl_op *op, struct pvl_memory *memory, uint64_t offset, uint64_t room, uint64_t remote_addr,
             uint32_t rkey, uint64_t length, int64_t timeout_ns);
int pvl_send(struct pvl_op *op, struct pvl_memory *memory, uint64_t offset, uint64_t length, int64_t timeout_ns);
int pvl_write_copy(struct pvl_op *op, const void *source, uint64_t length, uint64_t remote_addr, uint32_t rkey,
                   uint64_t room, int64_t timeout_ns);
int pvl_send_copy(struct pvl_op *op, const void *source, uint64_t length, int64_t timeout_ns);
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
    uint32_t heard;
    uint32_t changes;
    int32_t within;
    struct pvl_list *list;
    ...;
};
int pvl_again(struct pvl_prepared *prepared);
int pvl_again_within(struct pvl_prepared *prepared, int64_t timeout_ns);
struct pvl_memory *pvl_memory_new(struct ibv_pd *pd, uint64_t addr, uint32_t lkey, uint32_t access);
void pvl_memory_put(struct pvl_memory *memory);
uint32_t pvl_memory_used(const struct pvl_memory *memory);
uint32_t pvl_memory_close(struct pvl_memory *memory, int closing);
void pvl_stats(struct pvl_engine *engine, struct pvl_stats *stats);
void pvl_count_registration(struct pvl_engine *engine);
void pvl_count_wait(struct pvl_engine *engine);
void pvl_heard(struct pvl_engine *engine);
void pvl_abandon(struct pvl_engine *engine, struct pvl_op *op);
int pvl_modify(struct pvl_engine *engine, struct ibv_qp_attr *attr, int mask);
int pvl_to_error(struct pvl_engine *engine);
int pvl_rest(struct pvl_engine *engine);
void pvl_stop(struct pvl_engine *engine);
void pvl_request_put(struct pvl_request *requests, uint64_t index, int opcode, uint64_t addr, uint64_t length,
                     uint32_t lkey, uint64_t remote_addr, uint32_t rkey, uint32_t imm);
uint64_t pvl_list_pack(struct pvl_list *list, int opcode, uint64_t max_piece, uint64_t count, const uint64_t *offsets,
                       const uint64_t *remote_offsets, const uint64_t *lengths, uint64_t length, uint64_t remote_addr,
                       uint32_t rkey, uint64_t remote_length);
int pvl_list_start(struct pvl_engine *engine, struct pvl_list *list, struct pvl_op *op, uint32_t window);
int pvl_list_move(struct pvl_list *list, int opcode, struct pvl_memory *memory, uint64_t offset, uint64_t length,
                  uint64_t count, const uint64_t *offsets, const uint64_t *remote_offsets, const uint64_t *lengths,
                  uint64_t remote_addr, uint32_t rkey, uint64_t remote_length, uint64_t max_piece, int64_t timeout_ns);

#define PVL_LOOKED_PART ...
#define PVL_LOOKED_BUSY ...
#define PVL_LOOKED_FOUND ...
int pvl_look(struct pvl_engine *engine, int event, int arm);
int pvl_peek(struct pvl_engine *engine);
void pvl_poke_at(struct pvl_engine *engine, int fd);
uint32_t pvl_room(struct pvl_engine *engine, int opcode);

struct pvl_region {
    struct ibv_mr *mr;
    uint32_t lkey;
};
int pvl_register(struct pvl_engine *engine, struct pvl_region *region, struct ibv_pd *pd, uint64_t addr,
                 uint64_t length, int access);
int pvl_deregister(struct pvl_region *region);
int pvl_register_dmabuf(struct pvl_engine *engine, struct pvl_region *region, struct ibv_pd *pd, uint64_t offset,
                        uint64_t length, uint64_t iova, int fd, int access);
int pvl_register_alone(struct pvl_region *region, struct ibv_pd *pd, uint64_t addr, uint64_t length, int access);
int pvl_post_window(struct pvl_engine *engine, struct pvl_op *op, struct ibv_mw *mw, uint32_t rkey, struct ibv_mr *mr,
                    uint64_t addr, uint64_t length, int access);

int pvl_wr_post(struct ibv_qp_ex *qp, const struct ibv_send_wr *wr);

struct pvl_hub {
    int epoll_fd;
    int call_fd;
    ...;
};
struct pvl_hub *pvl_hub_new(struct ibv_comp_channel *channel);
void pvl_hub_free(struct pvl_hub *hub);
int pvl_hub_join(struct pvl_hub *hub, struct pvl_engine *engine);
int pvl_hub_turn(struct pvl_hub *hub, int timeout_ms);
int pvl_hub_run(struct pvl_hub *hub);
void pvl_hub_stop(struct pvl_hub *hub);
uint64_t pvl_hub_next(struct pvl_hub *hub, int *what);
void pvl_hub_listen(struct pvl_engine *engine);
void pvl_nudge(struct pvl_engine *engine);
