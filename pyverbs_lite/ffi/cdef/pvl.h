/* Our own C: what has to happen without crossing into Python (see src/). */
#define PVL_WOKE_PEER ...
#define PVL_WOKE_SIGNAL ...
#define PVL_WOKE_TIMEOUT ...

int pvl_wait(struct ibv_cq *cq, struct ibv_comp_channel *channel, int peer_fd, struct ibv_wc *wc, int max_wc,
             int64_t spin_ns, int64_t timeout_ns, int *got, int *woke);
int pvl_set_nonblocking(int fd);

#define PVL_FREE ...
#define PVL_PENDING ...

struct pvl_slot {
    int32_t status;
    uint32_t vendor_err;
};
struct pvl_arrival {
    uint32_t slot;
    uint32_t byte_len;
    uint32_t imm;
    int32_t has_imm;
    int32_t opcode;
};
struct pvl_engine {
    int peer_fd;
    uint32_t send_slots;
    uint32_t in_flight;
    struct pvl_slot *slots;
    uint32_t recv_slots;
    uint32_t recv_posted;
    uint32_t recv_size;
    uint32_t recv_lkey;
    uint64_t recv_addr;
    struct pvl_arrival *arrivals;
    uint64_t arrived;
    uint64_t taken;
    int32_t cause;
    uint32_t cause_vendor_err;
    uint64_t cause_wr_id;
    uint32_t flushed;
    int woke;
    ...;
};

struct pvl_engine *pvl_engine_new(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_comp_channel *channel,
                                  uint32_t send_slots, uint32_t recv_slots);
void pvl_engine_free(struct pvl_engine *engine);
int pvl_post_recv(struct pvl_engine *engine, uint32_t slot);
int pvl_take_arrival(struct pvl_engine *engine);
int pvl_post_send(struct pvl_engine *engine, uint32_t slot, int opcode, unsigned int flags, uint64_t addr,
                  uint32_t length, uint32_t lkey, uint64_t remote_addr, uint32_t rkey, uint32_t imm,
                  uint64_t argument, uint64_t swap);
int pvl_progress(struct pvl_engine *engine, int64_t spin_ns, int64_t timeout_ns);
