/* The context of an open device, and the table of what its driver does.
 *
 * The inline functions of verbs.h call through this table after looking whether an entry is there, so they are
 * the way to call it; the entries are declared to be looked at. */
struct ibv_context_ops {
    struct ibv_mw *(*alloc_mw)(struct ibv_pd *pd, enum ibv_mw_type type);
    int (*bind_mw)(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *mw_bind);
    int (*dealloc_mw)(struct ibv_mw *mw);
    int (*poll_cq)(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
    int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);
    int (*post_srq_recv)(struct ibv_srq *srq, struct ibv_recv_wr *recv_wr, struct ibv_recv_wr **bad_recv_wr);
    int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
    int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
    ...;
};
struct ibv_context {
    struct ibv_device *device;
    struct ibv_context_ops ops;
    int cmd_fd;
    int async_fd;
    int num_comp_vectors;
    pthread_mutex_t mutex;
    void *abi_compat;
    ...;
};

struct verbs_context {
//: with ALLOC_BUF
    void (*free_buf)(struct ibv_buf *buf);
    void *(*alloc_buf)(struct ibv_pd *pd, size_t size, struct ibv_buf **buf);
//: end
//: with DM_EXPORT_DMABUF
    int (*dm_export_dmabuf_fd)(struct ibv_dm *dm);
//: end
//: with REG_MR_EX
    struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *pd, struct ibv_mr_init_attr *mr_init_attr);
//: end
//: with DMAH
    int (*dealloc_dmah)(struct ibv_dmah *dmah);
    struct ibv_dmah *(*alloc_dmah)(struct ibv_context *context, struct ibv_dmah_init_attr *attr);
//: end
    int (*query_port)(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *port_attr,
                      size_t port_attr_len);
    int (*advise_mr)(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags,
                     struct ibv_sge *sg_list, uint32_t num_sges);
    struct ibv_mr *(*alloc_null_mr)(struct ibv_pd *pd);
    int (*read_counters)(struct ibv_counters *counters, uint64_t *counters_value, uint32_t ncounters,
                         uint32_t flags);
    int (*attach_counters_point_flow)(struct ibv_counters *counters, struct ibv_counter_attach_attr *attr,
                                      struct ibv_flow *flow);
    struct ibv_counters *(*create_counters)(struct ibv_context *context,
                                            struct ibv_counters_init_attr *init_attr);
    int (*destroy_counters)(struct ibv_counters *counters);
    struct ibv_mr *(*reg_dm_mr)(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t dm_offset, size_t length,
                                unsigned int access);
    struct ibv_dm *(*alloc_dm)(struct ibv_context *context, struct ibv_alloc_dm_attr *attr);
    int (*free_dm)(struct ibv_dm *dm);
    int (*modify_flow_action_esp)(struct ibv_flow_action *action, struct ibv_flow_action_esp_attr *attr);
    int (*destroy_flow_action)(struct ibv_flow_action *action);
    struct ibv_flow_action *(*create_flow_action_esp)(struct ibv_context *context,
                                                      struct ibv_flow_action_esp_attr *attr);
    int (*modify_qp_rate_limit)(struct ibv_qp *qp, struct ibv_qp_rate_limit_attr *attr);
    struct ibv_pd *(*alloc_parent_domain)(struct ibv_context *context,
                                          struct ibv_parent_domain_init_attr *attr);
    int (*dealloc_td)(struct ibv_td *td);
    struct ibv_td *(*alloc_td)(struct ibv_context *context, struct ibv_td_init_attr *init_attr);
    int (*modify_cq)(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
    int (*post_srq_ops)(struct ibv_srq *srq, struct ibv_ops_wr *op, struct ibv_ops_wr **bad_op);
    int (*destroy_rwq_ind_table)(struct ibv_rwq_ind_table *rwq_ind_table);
    struct ibv_rwq_ind_table *(*create_rwq_ind_table)(struct ibv_context *context,
                                                      struct ibv_rwq_ind_table_init_attr *init_attr);
    int (*destroy_wq)(struct ibv_wq *wq);
    int (*modify_wq)(struct ibv_wq *wq, struct ibv_wq_attr *wq_attr);
    struct ibv_wq *(*create_wq)(struct ibv_context *context, struct ibv_wq_init_attr *wq_init_attr);
    int (*query_rt_values)(struct ibv_context *context, struct ibv_values_ex *values);
    struct ibv_cq_ex *(*create_cq_ex)(struct ibv_context *context, struct ibv_cq_init_attr_ex *init_attr);
    struct verbs_ex_private *priv;
    int (*query_device_ex)(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *attr, size_t attr_size);
    int (*ibv_destroy_flow)(struct ibv_flow *flow);
    struct ibv_flow *(*ibv_create_flow)(struct ibv_qp *qp, struct ibv_flow_attr *flow_attr);
    struct ibv_qp *(*open_qp)(struct ibv_context *context, struct ibv_qp_open_attr *attr);
    struct ibv_qp *(*create_qp_ex)(struct ibv_context *context, struct ibv_qp_init_attr_ex *qp_init_attr_ex);
    int (*get_srq_num)(struct ibv_srq *srq, uint32_t *srq_num);
    struct ibv_srq *(*create_srq_ex)(struct ibv_context *context,
                                     struct ibv_srq_init_attr_ex *srq_init_attr_ex);
    struct ibv_xrcd *(*open_xrcd)(struct ibv_context *context, struct ibv_xrcd_init_attr *xrcd_init_attr);
    int (*close_xrcd)(struct ibv_xrcd *xrcd);
    size_t sz;
    struct ibv_context context;
    ...;
};

struct verbs_context *verbs_get_ctx(struct ibv_context *ctx);
