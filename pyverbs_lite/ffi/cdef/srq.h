/* Shared receive queues, with XRC and tag matching. */
enum ibv_srq_attr_mask { IBV_SRQ_MAX_WR, IBV_SRQ_LIMIT, ... };
enum ibv_srq_type { IBV_SRQT_BASIC, IBV_SRQT_XRC, IBV_SRQT_TM, ... };
enum ibv_srq_init_attr_mask {
    IBV_SRQ_INIT_ATTR_TYPE, IBV_SRQ_INIT_ATTR_PD, IBV_SRQ_INIT_ATTR_XRCD, IBV_SRQ_INIT_ATTR_CQ,
    IBV_SRQ_INIT_ATTR_TM, IBV_SRQ_INIT_ATTR_RESERVED, ...
};
struct ibv_srq_attr {
    uint32_t max_wr;
    uint32_t max_sge;
    uint32_t srq_limit;
    ...;
};
struct ibv_srq_init_attr {
    void *srq_context;
    struct ibv_srq_attr attr;
    ...;
};
struct ibv_tm_cap {
    uint32_t max_num_tags;
    uint32_t max_ops;
    ...;
};
struct ibv_srq_init_attr_ex {
    void *srq_context;
    struct ibv_srq_attr attr;
    uint32_t comp_mask;
    enum ibv_srq_type srq_type;
    struct ibv_pd *pd;
    struct ibv_xrcd *xrcd;
    struct ibv_cq *cq;
    struct ibv_tm_cap tm_cap;
    ...;
};
struct ibv_srq {
    struct ibv_context *context;
    void *srq_context;
    struct ibv_pd *pd;
    uint32_t handle;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
    ...;
};

/* Operations on the list of tags. */
enum ibv_ops_wr_opcode { IBV_WR_TAG_ADD, IBV_WR_TAG_DEL, IBV_WR_TAG_SYNC, ... };
enum ibv_ops_flags { IBV_OPS_SIGNALED, IBV_OPS_TM_SYNC, ... };
struct ibv_ops_wr {
    uint64_t wr_id;
    struct ibv_ops_wr *next;
    enum ibv_ops_wr_opcode opcode;
    int flags;
    struct {
        uint32_t unexpected_cnt;
        uint32_t handle;
        struct {
            uint64_t recv_wr_id;
            struct ibv_sge *sg_list;
            int num_sge;
            uint64_t tag;
            uint64_t mask;
        } add;
    } tm;
    ...;
};

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *srq_init_attr);
struct ibv_srq *ibv_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *srq_init_attr_ex);
int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *srq_attr, int srq_attr_mask);
int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *srq_attr);
int ibv_get_srq_num(struct ibv_srq *srq, uint32_t *srq_num);
int ibv_destroy_srq(struct ibv_srq *srq);
int ibv_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *recv_wr, struct ibv_recv_wr **bad_recv_wr);
int ibv_post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op, struct ibv_ops_wr **bad_op);
