/* Extended completion queues: a cursor over the completions, with a reader for each field. */
enum ibv_create_cq_wc_flags {
    IBV_WC_EX_WITH_BYTE_LEN, IBV_WC_EX_WITH_IMM, IBV_WC_EX_WITH_QP_NUM, IBV_WC_EX_WITH_SRC_QP,
    IBV_WC_EX_WITH_SLID, IBV_WC_EX_WITH_SL, IBV_WC_EX_WITH_DLID_PATH_BITS,
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, IBV_WC_EX_WITH_CVLAN, IBV_WC_EX_WITH_FLOW_TAG,
    IBV_WC_EX_WITH_TM_INFO, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK, ...
};
#define IBV_WC_STANDARD_FLAGS ...
#define IBV_CREATE_CQ_SUP_WC_FLAGS ...

enum ibv_cq_init_attr_mask {
    IBV_CQ_INIT_ATTR_MASK_FLAGS,
//: since 29 CQ_PARENT_DOMAIN IBV_CQ_INIT_ATTR_MASK_PD
    IBV_CQ_INIT_ATTR_MASK_PD,
//: end
    ...
};
enum ibv_create_cq_attr_flags {
    IBV_CREATE_CQ_ATTR_SINGLE_THREADED, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN, ...
};
struct ibv_cq_init_attr_ex {
    uint32_t cqe;
    void *cq_context;
    struct ibv_comp_channel *channel;
    uint32_t comp_vector;
    uint64_t wc_flags;
    uint32_t comp_mask;
    uint32_t flags;
//: with CQ_PARENT_DOMAIN
    struct ibv_pd *parent_domain;
//: end
    ...;
};
struct ibv_poll_cq_attr {
    uint32_t comp_mask;
    ...;
};
struct ibv_wc_tm_info {
    uint64_t tag;
    uint32_t priv;
    ...;
};
struct ibv_cq_ex {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed;
    uint32_t async_events_completed;
    uint32_t comp_mask;
    enum ibv_wc_status status;
    uint64_t wr_id;
    int (*start_poll)(struct ibv_cq_ex *current, struct ibv_poll_cq_attr *attr);
    int (*next_poll)(struct ibv_cq_ex *current);
    void (*end_poll)(struct ibv_cq_ex *current);
    enum ibv_wc_opcode (*read_opcode)(struct ibv_cq_ex *current);
    uint32_t (*read_vendor_err)(struct ibv_cq_ex *current);
    uint32_t (*read_byte_len)(struct ibv_cq_ex *current);
    __be32 (*read_imm_data)(struct ibv_cq_ex *current);
    uint32_t (*read_qp_num)(struct ibv_cq_ex *current);
    uint32_t (*read_src_qp)(struct ibv_cq_ex *current);
    unsigned int (*read_wc_flags)(struct ibv_cq_ex *current);
    uint32_t (*read_slid)(struct ibv_cq_ex *current);
    uint8_t (*read_sl)(struct ibv_cq_ex *current);
    uint8_t (*read_dlid_path_bits)(struct ibv_cq_ex *current);
    uint64_t (*read_completion_ts)(struct ibv_cq_ex *current);
    uint16_t (*read_cvlan)(struct ibv_cq_ex *current);
    uint32_t (*read_flow_tag)(struct ibv_cq_ex *current);
    void (*read_tm_info)(struct ibv_cq_ex *current, struct ibv_wc_tm_info *tm_info);
    uint64_t (*read_completion_wallclock_ns)(struct ibv_cq_ex *current);
    ...;
};

struct ibv_cq_ex *ibv_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *cq_attr);
struct ibv_cq *ibv_cq_ex_to_cq(struct ibv_cq_ex *cq);
int ibv_start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr);
int ibv_next_poll(struct ibv_cq_ex *cq);
void ibv_end_poll(struct ibv_cq_ex *cq);
enum ibv_wc_opcode ibv_wc_read_opcode(struct ibv_cq_ex *cq);
uint32_t ibv_wc_read_vendor_err(struct ibv_cq_ex *cq);
uint32_t ibv_wc_read_byte_len(struct ibv_cq_ex *cq);
__be32 ibv_wc_read_imm_data(struct ibv_cq_ex *cq);
uint32_t ibv_wc_read_invalidated_rkey(struct ibv_cq_ex *cq);
uint32_t ibv_wc_read_qp_num(struct ibv_cq_ex *cq);
uint32_t ibv_wc_read_src_qp(struct ibv_cq_ex *cq);
unsigned int ibv_wc_read_wc_flags(struct ibv_cq_ex *cq);
uint32_t ibv_wc_read_slid(struct ibv_cq_ex *cq);
uint8_t ibv_wc_read_sl(struct ibv_cq_ex *cq);
uint8_t ibv_wc_read_dlid_path_bits(struct ibv_cq_ex *cq);
uint64_t ibv_wc_read_completion_ts(struct ibv_cq_ex *cq);
uint64_t ibv_wc_read_completion_wallclock_ns(struct ibv_cq_ex *cq);
uint16_t ibv_wc_read_cvlan(struct ibv_cq_ex *cq);
uint32_t ibv_wc_read_flow_tag(struct ibv_cq_ex *cq);
void ibv_wc_read_tm_info(struct ibv_cq_ex *cq, struct ibv_wc_tm_info *tm_info);
