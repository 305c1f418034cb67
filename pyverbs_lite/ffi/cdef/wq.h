/* Receive work queues outside a QP, and the indirection tables that spread packets over them. */
enum ibv_wq_type { IBV_WQT_RQ, ... };
enum ibv_wq_init_attr_mask { IBV_WQ_INIT_ATTR_FLAGS, IBV_WQ_INIT_ATTR_RESERVED, ... };
enum ibv_wq_flags {
    IBV_WQ_FLAGS_CVLAN_STRIPPING, IBV_WQ_FLAGS_SCATTER_FCS, IBV_WQ_FLAGS_DELAY_DROP,
    IBV_WQ_FLAGS_PCI_WRITE_END_PADDING, IBV_WQ_FLAGS_RESERVED, ...
};
enum ibv_wq_state { IBV_WQS_RESET, IBV_WQS_RDY, IBV_WQS_ERR, IBV_WQS_UNKNOWN, ... };
enum ibv_wq_attr_mask {
    IBV_WQ_ATTR_STATE, IBV_WQ_ATTR_CURR_STATE, IBV_WQ_ATTR_FLAGS, IBV_WQ_ATTR_RESERVED, ...
};
struct ibv_wq_init_attr {
    void *wq_context;
    enum ibv_wq_type wq_type;
    uint32_t max_wr;
    uint32_t max_sge;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    uint32_t comp_mask;
    uint32_t create_flags;
    ...;
};
struct ibv_wq_attr {
    uint32_t attr_mask;
    enum ibv_wq_state wq_state;
    enum ibv_wq_state curr_wq_state;
    uint32_t flags;
    uint32_t flags_mask;
    ...;
};
struct ibv_wq {
    struct ibv_context *context;
    void *wq_context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    uint32_t wq_num;
    uint32_t handle;
    enum ibv_wq_state state;
    enum ibv_wq_type wq_type;
    int (*post_recv)(struct ibv_wq *current, struct ibv_recv_wr *recv_wr, struct ibv_recv_wr **bad_recv_wr);
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
    uint32_t comp_mask;
    ...;
};

enum ibv_ind_table_init_attr_mask { IBV_CREATE_IND_TABLE_RESERVED, ... };
struct ibv_rwq_ind_table_init_attr {
    uint32_t log_ind_tbl_size;
    struct ibv_wq **ind_tbl;
    uint32_t comp_mask;
    ...;
};
struct ibv_rwq_ind_table {
    struct ibv_context *context;
    int ind_tbl_handle;
    int ind_tbl_num;
    uint32_t comp_mask;
    ...;
};

struct ibv_wq *ibv_create_wq(struct ibv_context *context, struct ibv_wq_init_attr *wq_init_attr);
int ibv_modify_wq(struct ibv_wq *wq, struct ibv_wq_attr *wq_attr);
int ibv_destroy_wq(struct ibv_wq *wq);
int ibv_post_wq_recv(struct ibv_wq *wq, struct ibv_recv_wr *recv_wr, struct ibv_recv_wr **bad_recv_wr);
struct ibv_rwq_ind_table *ibv_create_rwq_ind_table(struct ibv_context *context,
                                                   struct ibv_rwq_ind_table_init_attr *init_attr);
int ibv_destroy_rwq_ind_table(struct ibv_rwq_ind_table *rwq_ind_table);
