/* Flow steering: which packets of the wire go to a QP. */
enum ibv_flow_flags { IBV_FLOW_ATTR_FLAGS_DONT_TRAP, IBV_FLOW_ATTR_FLAGS_EGRESS, ... };
enum ibv_flow_attr_type {
    IBV_FLOW_ATTR_NORMAL, IBV_FLOW_ATTR_ALL_DEFAULT, IBV_FLOW_ATTR_MC_DEFAULT, IBV_FLOW_ATTR_SNIFFER, ...
};
enum ibv_flow_spec_type {
    IBV_FLOW_SPEC_ETH, IBV_FLOW_SPEC_IPV4, IBV_FLOW_SPEC_IPV6, IBV_FLOW_SPEC_IPV4_EXT, IBV_FLOW_SPEC_ESP,
    IBV_FLOW_SPEC_TCP, IBV_FLOW_SPEC_UDP, IBV_FLOW_SPEC_VXLAN_TUNNEL, IBV_FLOW_SPEC_GRE, IBV_FLOW_SPEC_MPLS,
    IBV_FLOW_SPEC_INNER, IBV_FLOW_SPEC_ACTION_TAG, IBV_FLOW_SPEC_ACTION_DROP, IBV_FLOW_SPEC_ACTION_HANDLE,
    IBV_FLOW_SPEC_ACTION_COUNT, ...
};

/* Every filter comes twice: the value, and the mask of the bits that count. All fields are big-endian. */
struct ibv_flow_eth_filter {
    uint8_t dst_mac[6];
    uint8_t src_mac[6];
    uint16_t ether_type;
    uint16_t vlan_tag;
    ...;
};
struct ibv_flow_spec_eth {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_flow_eth_filter val;
    struct ibv_flow_eth_filter mask;
    ...;
};
struct ibv_flow_ipv4_filter {
    uint32_t src_ip;
    uint32_t dst_ip;
    ...;
};
struct ibv_flow_spec_ipv4 {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_flow_ipv4_filter val;
    struct ibv_flow_ipv4_filter mask;
    ...;
};
struct ibv_flow_ipv4_ext_filter {
    uint32_t src_ip;
    uint32_t dst_ip;
    uint8_t proto;
    uint8_t tos;
    uint8_t ttl;
    uint8_t flags;
    ...;
};
struct ibv_flow_spec_ipv4_ext {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_flow_ipv4_ext_filter val;
    struct ibv_flow_ipv4_ext_filter mask;
    ...;
};
struct ibv_flow_ipv6_filter {
    uint8_t src_ip[16];
    uint8_t dst_ip[16];
    uint32_t flow_label;
    uint8_t next_hdr;
    uint8_t traffic_class;
    uint8_t hop_limit;
    ...;
};
struct ibv_flow_spec_ipv6 {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_flow_ipv6_filter val;
    struct ibv_flow_ipv6_filter mask;
    ...;
};
struct ibv_flow_esp_filter {
    uint32_t spi;
    uint32_t seq;
    ...;
};
struct ibv_flow_spec_esp {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_flow_esp_filter val;
    struct ibv_flow_esp_filter mask;
    ...;
};
struct ibv_flow_tcp_udp_filter {
    uint16_t dst_port;
    uint16_t src_port;
    ...;
};
struct ibv_flow_spec_tcp_udp {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_flow_tcp_udp_filter val;
    struct ibv_flow_tcp_udp_filter mask;
    ...;
};
struct ibv_flow_gre_filter {
    uint16_t c_ks_res0_ver;
    uint16_t protocol;
    uint32_t key;
    ...;
};
struct ibv_flow_spec_gre {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_flow_gre_filter val;
    struct ibv_flow_gre_filter mask;
    ...;
};
struct ibv_flow_mpls_filter {
    uint32_t label;
    ...;
};
struct ibv_flow_spec_mpls {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_flow_mpls_filter val;
    struct ibv_flow_mpls_filter mask;
    ...;
};
struct ibv_flow_tunnel_filter {
    uint32_t tunnel_id;
    ...;
};
struct ibv_flow_spec_tunnel {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_flow_tunnel_filter val;
    struct ibv_flow_tunnel_filter mask;
    ...;
};
struct ibv_flow_spec_action_tag {
    enum ibv_flow_spec_type type;
    uint16_t size;
    uint32_t tag_id;
    ...;
};
struct ibv_flow_spec_action_drop {
    enum ibv_flow_spec_type type;
    uint16_t size;
    ...;
};
struct ibv_flow_spec_action_handle {
    enum ibv_flow_spec_type type;
    uint16_t size;
    const struct ibv_flow_action *action;
    ...;
};
struct ibv_flow_spec_counter_action {
    enum ibv_flow_spec_type type;
    uint16_t size;
    struct ibv_counters *counters;
    ...;
};
struct ibv_flow_spec {
    union {
        struct {
            enum ibv_flow_spec_type type;
            uint16_t size;
        } hdr;
        struct ibv_flow_spec_eth eth;
        struct ibv_flow_spec_ipv4 ipv4;
        struct ibv_flow_spec_tcp_udp tcp_udp;
        struct ibv_flow_spec_ipv4_ext ipv4_ext;
        struct ibv_flow_spec_ipv6 ipv6;
        struct ibv_flow_spec_esp esp;
        struct ibv_flow_spec_tunnel tunnel;
        struct ibv_flow_spec_gre gre;
        struct ibv_flow_spec_mpls mpls;
        struct ibv_flow_spec_action_tag flow_tag;
        struct ibv_flow_spec_action_drop drop;
        struct ibv_flow_spec_action_handle handle;
        struct ibv_flow_spec_counter_action flow_count;
    };
    ...;
};

/* num_of_specs specs follow the attributes in memory, each "size" bytes long. */
struct ibv_flow_attr {
    uint32_t comp_mask;
    enum ibv_flow_attr_type type;
    uint16_t size;
    uint16_t priority;
    uint8_t num_of_specs;
    uint8_t port;
    uint32_t flags;
    ...;
};
struct ibv_flow {
    uint32_t comp_mask;
    struct ibv_context *context;
    uint32_t handle;
    ...;
};

struct ibv_flow *ibv_create_flow(struct ibv_qp *qp, struct ibv_flow_attr *flow);
int ibv_destroy_flow(struct ibv_flow *flow_id);
