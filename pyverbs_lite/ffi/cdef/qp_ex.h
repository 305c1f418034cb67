/* Queue pairs with extended attributes, rate limits, data ordering, and the enhanced connection. */
enum ibv_qp_init_attr_mask {
    IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_XRCD, IBV_QP_INIT_ATTR_CREATE_FLAGS,
    IBV_QP_INIT_ATTR_MAX_TSO_HEADER, IBV_QP_INIT_ATTR_IND_TABLE, IBV_QP_INIT_ATTR_RX_HASH,
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, ...
};
enum ibv_qp_create_flags {
    IBV_QP_CREATE_BLOCK_SELF_MCAST_LB, IBV_QP_CREATE_SCATTER_FCS, IBV_QP_CREATE_CVLAN_STRIPPING,
    IBV_QP_CREATE_SOURCE_QPN, IBV_QP_CREATE_PCI_WRITE_END_PADDING, ...
};
enum ibv_qp_create_send_ops_flags {
    IBV_QP_EX_WITH_RDMA_WRITE, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_QP_EX_WITH_SEND,
    IBV_QP_EX_WITH_SEND_WITH_IMM, IBV_QP_EX_WITH_RDMA_READ, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP,
    IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_LOCAL_INV, IBV_QP_EX_WITH_BIND_MW,
    IBV_QP_EX_WITH_SEND_WITH_INV, IBV_QP_EX_WITH_TSO,
//: with FLUSH
    IBV_QP_EX_WITH_FLUSH,
//: end
//: with ATOMIC_WRITE
    IBV_QP_EX_WITH_ATOMIC_WRITE,
//: end
    ...
};
struct ibv_rx_hash_conf {
    uint8_t rx_hash_function;
    uint8_t rx_hash_key_len;
    uint8_t *rx_hash_key;
    uint64_t rx_hash_fields_mask;
    ...;
};
struct ibv_qp_init_attr_ex {
    void *qp_context;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp_cap cap;
    enum ibv_qp_type qp_type;
    int sq_sig_all;
    uint32_t comp_mask;
    struct ibv_pd *pd;
    struct ibv_xrcd *xrcd;
    uint32_t create_flags;
    uint16_t max_tso_header;
    struct ibv_rwq_ind_table *rwq_ind_tbl;
    struct ibv_rx_hash_conf rx_hash_conf;
    uint32_t source_qpn;
    uint64_t send_ops_flags;
    ...;
};

enum ibv_qp_open_attr_mask {
    IBV_QP_OPEN_ATTR_NUM, IBV_QP_OPEN_ATTR_XRCD, IBV_QP_OPEN_ATTR_CONTEXT, IBV_QP_OPEN_ATTR_TYPE,
    IBV_QP_OPEN_ATTR_RESERVED, ...
};
struct ibv_qp_open_attr {
    uint32_t comp_mask;
    uint32_t qp_num;
    struct ibv_xrcd *xrcd;
    void *qp_context;
    enum ibv_qp_type qp_type;
    ...;
};
struct ibv_qp_rate_limit_attr {
    uint32_t rate_limit;
    uint32_t max_burst_sz;
    uint16_t typical_pkt_sz;
    uint32_t comp_mask;
    ...;
};

struct ibv_qp *ibv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *qp_init_attr_ex);
struct ibv_qp *ibv_open_qp(struct ibv_context *context, struct ibv_qp_open_attr *qp_open_attr);
int ibv_modify_qp_rate_limit(struct ibv_qp *qp, struct ibv_qp_rate_limit_attr *attr);
int ibv_is_qpt_supported(uint32_t caps, enum ibv_qp_type qpt);

/* Does data arrive in order? */
//: since 36 DATA_IN_ORDER ibv_query_qp_data_in_order
int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags);
//: end
//: since 46 DATA_IN_ORDER_CAPS IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS
enum ibv_query_qp_data_in_order_flags {
    IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS,
//: since 60 DATA_IN_ORDER_DEVICE_ONLY IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY
    IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY,
//: end
    ...
};
enum ibv_query_qp_data_in_order_caps {
    IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG, IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES, ...
};
//: end

/* Enhanced connection establishment: options of the vendor that both sides agree on. */
//: since 31 ECE ibv_set_ece
struct ibv_ece {
    uint32_t vendor_id;
    uint32_t options;
    uint32_t comp_mask;
    ...;
};
int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece);
int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece);
//: end
