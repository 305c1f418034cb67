/* Extended device attributes, the device's clock, and fork support. */
enum ibv_odp_general_caps { IBV_ODP_SUPPORT, IBV_ODP_SUPPORT_IMPLICIT, ... };
enum ibv_odp_transport_cap_bits {
    IBV_ODP_SUPPORT_SEND, IBV_ODP_SUPPORT_RECV, IBV_ODP_SUPPORT_WRITE, IBV_ODP_SUPPORT_READ,
    IBV_ODP_SUPPORT_ATOMIC, IBV_ODP_SUPPORT_SRQ_RECV,
//: since 58 ODP_FLUSH IBV_ODP_SUPPORT_FLUSH
    IBV_ODP_SUPPORT_FLUSH, IBV_ODP_SUPPORT_ATOMIC_WRITE,
//: end
    ...
};
struct ibv_odp_caps {
    uint64_t general_caps;
    struct {
        uint32_t rc_odp_caps;
        uint32_t uc_odp_caps;
        uint32_t ud_odp_caps;
    } per_transport_caps;
    ...;
};
struct ibv_tso_caps {
    uint32_t max_tso;
    uint32_t supported_qpts;
    ...;
};

enum ibv_rx_hash_function_flags { IBV_RX_HASH_FUNC_TOEPLITZ, ... };
enum ibv_rx_hash_fields {
    IBV_RX_HASH_SRC_IPV4, IBV_RX_HASH_DST_IPV4, IBV_RX_HASH_SRC_IPV6, IBV_RX_HASH_DST_IPV6,
    IBV_RX_HASH_SRC_PORT_TCP, IBV_RX_HASH_DST_PORT_TCP, IBV_RX_HASH_SRC_PORT_UDP,
    IBV_RX_HASH_DST_PORT_UDP, IBV_RX_HASH_IPSEC_SPI, IBV_RX_HASH_INNER, ...
};
struct ibv_rss_caps {
    uint32_t supported_qpts;
    uint32_t max_rwq_indirection_tables;
    uint32_t max_rwq_indirection_table_size;
    uint64_t rx_hash_fields_mask;
    uint8_t rx_hash_function;
    ...;
};
struct ibv_packet_pacing_caps {
    uint32_t qp_rate_limit_min;
    uint32_t qp_rate_limit_max;
    uint32_t supported_qpts;
    ...;
};
enum ibv_raw_packet_caps {
    IBV_RAW_PACKET_CAP_CVLAN_STRIPPING, IBV_RAW_PACKET_CAP_SCATTER_FCS, IBV_RAW_PACKET_CAP_IP_CSUM,
    IBV_RAW_PACKET_CAP_DELAY_DROP, ...
};
enum ibv_tm_cap_flags { IBV_TM_CAP_RC, ... };
struct ibv_tm_caps {
    uint32_t max_rndv_hdr_size;
    uint32_t max_num_tags;
    uint32_t flags;
    uint32_t max_ops;
    uint32_t max_sge;
    ...;
};
struct ibv_cq_moderation_caps {
    uint16_t max_cq_count;
    uint16_t max_cq_period;
    ...;
};
enum ibv_pci_atomic_op_size {
    IBV_PCI_ATOMIC_OPERATION_4_BYTE_SIZE_SUP, IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP,
    IBV_PCI_ATOMIC_OPERATION_16_BYTE_SIZE_SUP, ...
};
struct ibv_pci_atomic_caps {
    uint16_t fetch_add;
    uint16_t swap;
    uint16_t compare_swap;
    ...;
};

struct ibv_query_device_ex_input {
    uint32_t comp_mask;
    ...;
};
struct ibv_device_attr_ex {
    struct ibv_device_attr orig_attr;
    uint32_t comp_mask;
    struct ibv_odp_caps odp_caps;
    uint64_t completion_timestamp_mask;
    uint64_t hca_core_clock;
    uint64_t device_cap_flags_ex;
    struct ibv_tso_caps tso_caps;
    struct ibv_rss_caps rss_caps;
    uint32_t max_wq_type_rq;
    struct ibv_packet_pacing_caps packet_pacing_caps;
    uint32_t raw_packet_caps;
    struct ibv_tm_caps tm_caps;
    struct ibv_cq_moderation_caps cq_mod_caps;
    uint64_t max_dm_size;
    struct ibv_pci_atomic_caps pci_atomic_caps;
    uint32_t xrc_odp_caps;
//: since 35 PHYS_PORT_CNT_EX sizeof(((struct ibv_device_attr_ex *)0)->phys_port_cnt_ex)
    uint32_t phys_port_cnt_ex;
//: end
    ...;
};

enum ibv_values_mask { IBV_VALUES_MASK_RAW_CLOCK, IBV_VALUES_MASK_RESERVED, ... };
struct ibv_values_ex {
    uint32_t comp_mask;
    struct timespec raw_clock;
    ...;
};

int ibv_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                        struct ibv_device_attr_ex *attr);
int ibv_query_rt_values_ex(struct ibv_context *context, struct ibv_values_ex *values);
int ibv_fork_init(void);

//: since 35 FORK_STATUS ibv_is_fork_initialized
enum ibv_fork_status { IBV_FORK_DISABLED, IBV_FORK_ENABLED, IBV_FORK_UNNEEDED, ... };
enum ibv_fork_status ibv_is_fork_initialized(void);
//: end
