/* rdma_verbs.h: the verbs on an rdma_cm_id, for programs without queues of their own. */
int rdma_seterrno(int ret);
int rdma_create_srq(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
int rdma_create_srq_ex(struct rdma_cm_id *id, struct ibv_srq_init_attr_ex *attr);
void rdma_destroy_srq(struct rdma_cm_id *id);

struct ibv_mr *rdma_reg_msgs(struct rdma_cm_id *id, void *addr, size_t length);
struct ibv_mr *rdma_reg_read(struct rdma_cm_id *id, void *addr, size_t length);
struct ibv_mr *rdma_reg_write(struct rdma_cm_id *id, void *addr, size_t length);
int rdma_dereg_mr(struct ibv_mr *mr);

int rdma_post_recvv(struct rdma_cm_id *id, void *context, struct ibv_sge *sgl, int nsge);
int rdma_post_sendv(struct rdma_cm_id *id, void *context, struct ibv_sge *sgl, int nsge, int flags);
int rdma_post_readv(struct rdma_cm_id *id, void *context, struct ibv_sge *sgl, int nsge, int flags,
                    uint64_t remote_addr, uint32_t rkey);
int rdma_post_writev(struct rdma_cm_id *id, void *context, struct ibv_sge *sgl, int nsge, int flags,
                     uint64_t remote_addr, uint32_t rkey);

int rdma_post_recv(struct rdma_cm_id *id, void *context, void *addr, size_t length, struct ibv_mr *mr);
int rdma_post_send(struct rdma_cm_id *id, void *context, void *addr, size_t length, struct ibv_mr *mr, int flags);
int rdma_post_read(struct rdma_cm_id *id, void *context, void *addr, size_t length, struct ibv_mr *mr, int flags,
                   uint64_t remote_addr, uint32_t rkey);
int rdma_post_write(struct rdma_cm_id *id, void *context, void *addr, size_t length, struct ibv_mr *mr, int flags,
                    uint64_t remote_addr, uint32_t rkey);
int rdma_post_ud_send(struct rdma_cm_id *id, void *context, void *addr, size_t length, struct ibv_mr *mr,
                      int flags, struct ibv_ah *ah, uint32_t remote_qpn);

int rdma_get_send_comp(struct rdma_cm_id *id, struct ibv_wc *wc);
int rdma_get_recv_comp(struct rdma_cm_id *id, struct ibv_wc *wc);
