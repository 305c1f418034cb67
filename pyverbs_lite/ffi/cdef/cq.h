/* Completion channels, completion queues and work completions. */
enum ibv_wc_status {
    IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_EEC_OP_ERR, IBV_WC_LOC_PROT_ERR,
    IBV_WC_WR_FLUSH_ERR, IBV_WC_MW_BIND_ERR, IBV_WC_BAD_RESP_ERR, IBV_WC_LOC_ACCESS_ERR,
    IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR,
    IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_LOC_RDD_VIOL_ERR, IBV_WC_REM_INV_RD_REQ_ERR, IBV_WC_REM_ABORT_ERR,
    IBV_WC_INV_EECN_ERR, IBV_WC_INV_EEC_STATE_ERR, IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR,
    IBV_WC_GENERAL_ERR, IBV_WC_TM_ERR, IBV_WC_TM_RNDV_INCOMPLETE, ...
};
enum ibv_wc_opcode {
    IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD, IBV_WC_BIND_MW,
    IBV_WC_LOCAL_INV, IBV_WC_TSO,
//: with FLUSH
    IBV_WC_FLUSH,
//: end
//: with ATOMIC_WRITE
    IBV_WC_ATOMIC_WRITE,
//: end
    IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_TM_ADD, IBV_WC_TM_DEL,
    IBV_WC_TM_SYNC, IBV_WC_TM_RECV, IBV_WC_TM_NO_TAG, IBV_WC_DRIVER1,
//: since 36 WC_DRIVER2 IBV_WC_DRIVER2
    IBV_WC_DRIVER2,
//: end
//: since 37 WC_DRIVER3 IBV_WC_DRIVER3
    IBV_WC_DRIVER3,
//: end
    ...
};
enum ibv_wc_flags {
    IBV_WC_GRH, IBV_WC_WITH_IMM, IBV_WC_IP_CSUM_OK, IBV_WC_WITH_INV, IBV_WC_TM_SYNC_REQ, IBV_WC_TM_MATCH,
    IBV_WC_TM_DATA_VALID, ...
};
#define IBV_WC_IP_CSUM_OK_SHIFT ...

/* The union of imm_data (big-endian) and invalidated_rkey (host order) is anonymous in C. */
struct ibv_wc {
    uint64_t wr_id;
    enum ibv_wc_status status;
    enum ibv_wc_opcode opcode;
    uint32_t vendor_err;
    uint32_t byte_len;
    union {
        __be32 imm_data;
        uint32_t invalidated_rkey;
    };
    uint32_t qp_num;
    uint32_t src_qp;
    unsigned int wc_flags;
    uint16_t pkey_index;
    uint16_t slid;
    uint8_t sl;
    uint8_t dlid_path_bits;
    ...;
};

struct ibv_comp_channel {
    struct ibv_context *context;
    int fd;
    int refcnt;
    ...;
};
struct ibv_cq {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed;
    uint32_t async_events_completed;
    ...;
};

enum ibv_cq_attr_mask { IBV_CQ_ATTR_MODERATE, IBV_CQ_ATTR_RESERVED, ... };
struct ibv_moderate_cq {
    uint16_t cq_count;
    uint16_t cq_period;
    ...;
};
struct ibv_modify_cq_attr {
    uint32_t attr_mask;
    struct ibv_moderate_cq moderate;
    ...;
};

const char *ibv_wc_status_str(enum ibv_wc_status status);
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                             struct ibv_comp_channel *channel, int comp_vector);
int ibv_resize_cq(struct ibv_cq *cq, int cqe);
int ibv_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int nevents);
int ibv_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
int ibv_req_notify_cq(struct ibv_cq *cq, int solicited_only);
