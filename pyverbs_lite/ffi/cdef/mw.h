/* Memory windows. */
enum ibv_mw_type { IBV_MW_TYPE_1, IBV_MW_TYPE_2, ... };
struct ibv_mw {
    struct ibv_context *context;
    struct ibv_pd *pd;
    uint32_t rkey;
    uint32_t handle;
    enum ibv_mw_type type;
    ...;
};
struct ibv_mw_bind_info {
    struct ibv_mr *mr;
    uint64_t addr;
    uint64_t length;
    unsigned int mw_access_flags;
    ...;
};
struct ibv_mw_bind {
    uint64_t wr_id;
    unsigned int send_flags;
    struct ibv_mw_bind_info bind_info;
    ...;
};

struct ibv_mw *ibv_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int ibv_dealloc_mw(struct ibv_mw *mw);
int ibv_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *mw_bind);
uint32_t ibv_inc_rkey(uint32_t rkey);
