/* Address vectors, address handles, multicast, static rates. */
struct ibv_global_route {
    union ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index;
    uint8_t hop_limit;
    uint8_t traffic_class;
    ...;
};
struct ibv_grh {
    __be32 version_tclass_flow;
    __be16 paylen;
    uint8_t next_hdr;
    uint8_t hop_limit;
    union ibv_gid sgid;
    union ibv_gid dgid;
    ...;
};
struct ibv_ah_attr {
    struct ibv_global_route grh;
    uint16_t dlid;
    uint8_t sl;
    uint8_t src_path_bits;
    uint8_t static_rate;
    uint8_t is_global;
    uint8_t port_num;
    ...;
};
struct ibv_ah {
    struct ibv_context *context;
    struct ibv_pd *pd;
    uint32_t handle;
    ...;
};
#define ETHERNET_LL_SIZE ...

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc, struct ibv_grh *grh,
                        struct ibv_ah_attr *ah_attr);
struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh,
                                     uint8_t port_num);
int ibv_destroy_ah(struct ibv_ah *ah);
int ibv_resolve_eth_l2_from_gid(struct ibv_context *context, struct ibv_ah_attr *attr, uint8_t *eth_mac,
                                uint16_t *vid);
int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);

/* The names are in order of age, as the codes are. */
enum ibv_rate {
    IBV_RATE_MAX, IBV_RATE_2_5_GBPS, IBV_RATE_10_GBPS, IBV_RATE_30_GBPS, IBV_RATE_5_GBPS, IBV_RATE_20_GBPS,
    IBV_RATE_40_GBPS, IBV_RATE_60_GBPS, IBV_RATE_80_GBPS, IBV_RATE_120_GBPS, IBV_RATE_14_GBPS,
    IBV_RATE_56_GBPS, IBV_RATE_112_GBPS, IBV_RATE_168_GBPS, IBV_RATE_25_GBPS, IBV_RATE_100_GBPS,
    IBV_RATE_200_GBPS, IBV_RATE_300_GBPS, IBV_RATE_28_GBPS, IBV_RATE_50_GBPS, IBV_RATE_400_GBPS,
    IBV_RATE_600_GBPS,
//: since 39 RATE_800 IBV_RATE_800_GBPS
    IBV_RATE_800_GBPS, IBV_RATE_1200_GBPS,
//: end
    ...
};
int ibv_rate_to_mult(enum ibv_rate rate);
enum ibv_rate mult_to_ibv_rate(int mult);
int ibv_rate_to_mbps(enum ibv_rate rate);
enum ibv_rate mbps_to_ibv_rate(int mbps);

/* The source port that RoCE v2 makes of a flow label. */
//: since 29 FLOW_LABEL_TO_UDP_SPORT ibv_flow_label_to_udp_sport
#define IB_ROCE_UDP_ENCAP_VALID_PORT_MIN ...
#define IB_ROCE_UDP_ENCAP_VALID_PORT_MAX ...
#define IB_GRH_FLOWLABEL_MASK ...
uint16_t ibv_flow_label_to_udp_sport(uint32_t fl);
//: end
