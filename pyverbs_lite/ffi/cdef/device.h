/* Devices, their attributes, ports, GIDs and P_Keys. */
union ibv_gid {
    uint8_t raw[16];
    struct {
        __be64 subnet_prefix;
        __be64 interface_id;
    } global;
    ...;
};

enum ibv_node_type {
    IBV_NODE_UNKNOWN, IBV_NODE_CA, IBV_NODE_SWITCH, IBV_NODE_ROUTER, IBV_NODE_RNIC,
    IBV_NODE_USNIC, IBV_NODE_USNIC_UDP, IBV_NODE_UNSPECIFIED, ...
};
enum ibv_transport_type {
    IBV_TRANSPORT_UNKNOWN, IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP, IBV_TRANSPORT_USNIC,
    IBV_TRANSPORT_USNIC_UDP, IBV_TRANSPORT_UNSPECIFIED, ...
};
enum ibv_device_cap_flags {
    IBV_DEVICE_RESIZE_MAX_WR, IBV_DEVICE_BAD_PKEY_CNTR, IBV_DEVICE_BAD_QKEY_CNTR, IBV_DEVICE_RAW_MULTI,
    IBV_DEVICE_AUTO_PATH_MIG, IBV_DEVICE_CHANGE_PHY_PORT, IBV_DEVICE_UD_AV_PORT_ENFORCE,
    IBV_DEVICE_CURR_QP_STATE_MOD, IBV_DEVICE_SHUTDOWN_PORT, IBV_DEVICE_INIT_TYPE,
    IBV_DEVICE_PORT_ACTIVE_EVENT, IBV_DEVICE_SYS_IMAGE_GUID, IBV_DEVICE_RC_RNR_NAK_GEN,
    IBV_DEVICE_SRQ_RESIZE, IBV_DEVICE_N_NOTIFY_CQ, IBV_DEVICE_MEM_WINDOW, IBV_DEVICE_UD_IP_CSUM,
    IBV_DEVICE_XRC, IBV_DEVICE_MEM_MGT_EXTENSIONS, IBV_DEVICE_MEM_WINDOW_TYPE_2A,
    IBV_DEVICE_MEM_WINDOW_TYPE_2B, IBV_DEVICE_RC_IP_CSUM, IBV_DEVICE_RAW_IP_CSUM,
    IBV_DEVICE_MANAGED_FLOW_STEERING, ...
};
/* Above bit 31, so only in device_cap_flags_ex. */
#define IBV_DEVICE_RAW_SCATTER_FCS ...
#define IBV_DEVICE_PCI_WRITE_END_PADDING ...
//: since 64 CC_DMA_BOUNCE IBV_DEVICE_CC_DMA_BOUNCE
#define IBV_DEVICE_CC_DMA_BOUNCE ...
//: end

enum ibv_atomic_cap { IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB, ... };
enum ibv_mtu { IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096, ... };
enum ibv_port_state {
    IBV_PORT_NOP, IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE, IBV_PORT_ACTIVE_DEFER, ...
};
#define IBV_LINK_LAYER_UNSPECIFIED ...
#define IBV_LINK_LAYER_INFINIBAND ...
#define IBV_LINK_LAYER_ETHERNET ...
#define IBV_QPF_GRH_REQUIRED ...

enum ibv_port_cap_flags {
    IBV_PORT_SM, IBV_PORT_NOTICE_SUP, IBV_PORT_TRAP_SUP, IBV_PORT_OPT_IPD_SUP, IBV_PORT_AUTO_MIGR_SUP,
    IBV_PORT_SL_MAP_SUP, IBV_PORT_MKEY_NVRAM, IBV_PORT_PKEY_NVRAM, IBV_PORT_LED_INFO_SUP,
    IBV_PORT_SYS_IMAGE_GUID_SUP, IBV_PORT_PKEY_SW_EXT_PORT_TRAP_SUP, IBV_PORT_EXTENDED_SPEEDS_SUP,
    IBV_PORT_CAP_MASK2_SUP, IBV_PORT_CM_SUP, IBV_PORT_SNMP_TUNNEL_SUP, IBV_PORT_REINIT_SUP,
    IBV_PORT_DEVICE_MGMT_SUP, IBV_PORT_VENDOR_CLASS_SUP, IBV_PORT_DR_NOTICE_SUP,
    IBV_PORT_CAP_MASK_NOTICE_SUP, IBV_PORT_BOOT_MGMT_SUP, IBV_PORT_LINK_LATENCY_SUP,
    IBV_PORT_CLIENT_REG_SUP, IBV_PORT_IP_BASED_GIDS, ...
};
enum ibv_port_cap_flags2 {
    IBV_PORT_SET_NODE_DESC_SUP, IBV_PORT_INFO_EXT_SUP, IBV_PORT_VIRT_SUP,
    IBV_PORT_SWITCH_PORT_STATE_TABLE_SUP, IBV_PORT_LINK_WIDTH_2X_SUP, IBV_PORT_LINK_SPEED_HDR_SUP,
//: since 39 PORT_NDR IBV_PORT_LINK_SPEED_NDR_SUP
    IBV_PORT_LINK_SPEED_NDR_SUP,
//: end
//: since 49 PORT_XDR IBV_PORT_LINK_SPEED_XDR_SUP
    IBV_PORT_LINK_SPEED_XDR_SUP,
//: end
    ...
};

struct ibv_device_attr {
    char fw_ver[64];
    __be64 node_guid;
    __be64 sys_image_guid;
    uint64_t max_mr_size;
    uint64_t page_size_cap;
    uint32_t vendor_id;
    uint32_t vendor_part_id;
    uint32_t hw_ver;
    int max_qp;
    int max_qp_wr;
    unsigned int device_cap_flags;
    int max_sge;
    int max_sge_rd;
    int max_cq;
    int max_cqe;
    int max_mr;
    int max_pd;
    int max_qp_rd_atom;
    int max_ee_rd_atom;
    int max_res_rd_atom;
    int max_qp_init_rd_atom;
    int max_ee_init_rd_atom;
    enum ibv_atomic_cap atomic_cap;
    int max_ee;
    int max_rdd;
    int max_mw;
    int max_raw_ipv6_qp;
    int max_raw_ethy_qp;
    int max_mcast_grp;
    int max_mcast_qp_attach;
    int max_total_mcast_qp_attach;
    int max_ah;
    int max_fmr;
    int max_map_per_fmr;
    int max_srq;
    int max_srq_wr;
    int max_srq_sge;
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay;
    uint8_t phys_port_cnt;
    ...;
};

struct ibv_port_attr {
    enum ibv_port_state state;
    enum ibv_mtu max_mtu;
    enum ibv_mtu active_mtu;
    int gid_tbl_len;
    uint32_t port_cap_flags;
    uint32_t max_msg_sz;
    uint32_t bad_pkey_cntr;
    uint32_t qkey_viol_cntr;
    uint16_t pkey_tbl_len;
    uint16_t lid;
    uint16_t sm_lid;
    uint8_t lmc;
    uint8_t max_vl_num;
    uint8_t sm_sl;
    uint8_t subnet_timeout;
    uint8_t init_type_reply;
    uint8_t active_width;
    uint8_t active_speed;
    uint8_t phys_state;
    uint8_t link_layer;
    uint8_t flags;
    uint16_t port_cap_flags2;
//: since 49 ACTIVE_SPEED_EX sizeof(((struct ibv_port_attr *)0)->active_speed_ex)
    uint32_t active_speed_ex;
//: end
    ...;
};

#define IBV_SYSFS_NAME_MAX ...
#define IBV_SYSFS_PATH_MAX ...
struct ibv_device {
    enum ibv_node_type node_type;
    enum ibv_transport_type transport_type;
    char name[...];
    char dev_name[...];
    char dev_path[...];
    char ibdev_path[...];
    ...;
};

struct ibv_device **ibv_get_device_list(int *num_devices);
void ibv_free_device_list(struct ibv_device **list);
const char *ibv_get_device_name(struct ibv_device *device);
__be64 ibv_get_device_guid(struct ibv_device *device);
struct ibv_context *ibv_open_device(struct ibv_device *device);
int ibv_close_device(struct ibv_context *context);
int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *device_attr);
int ibv_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *port_attr);
int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid);
int ibv_query_pkey(struct ibv_context *context, uint8_t port_num, int index, __be16 *pkey);
int ibv_get_pkey_index(struct ibv_context *context, uint8_t port_num, __be16 pkey);
const char *ibv_node_type_str(enum ibv_node_type node_type);
const char *ibv_port_state_str(enum ibv_port_state port_state);

//: since 30 DEVICE_INDEX ibv_get_device_index
int ibv_get_device_index(struct ibv_device *device);
//: end

//: since 32 GID_TABLE ibv_query_gid_table
enum ibv_gid_type { IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, ... };
struct ibv_gid_entry {
    union ibv_gid gid;
    uint32_t gid_index;
    uint32_t port_num;
    uint32_t gid_type;
    uint32_t ndev_ifindex;
    ...;
};
int ibv_query_gid_ex(struct ibv_context *context, uint32_t port_num, uint32_t gid_index,
                     struct ibv_gid_entry *entry, uint32_t flags);
ssize_t ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries,
                            size_t max_entries, uint32_t flags);
//: end

//: since 62 PORT_SPEED ibv_query_port_speed
int ibv_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *port_speed);
//: end
