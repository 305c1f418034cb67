/* librdmacm: resolving names, endpoints made from the answer, multicast. */
#define RAI_PASSIVE ...
#define RAI_NUMERICHOST ...
#define RAI_NOROUTE ...
#define RAI_FAMILY ...
//: since 60 RAI_SA RAI_SA
#define RAI_SA ...
#define RAI_DNS ...
//: end
struct rdma_addrinfo {
    int ai_flags;
    int ai_family;
    int ai_qp_type;
    int ai_port_space;
    socklen_t ai_src_len;
    socklen_t ai_dst_len;
    struct sockaddr *ai_src_addr;
    struct sockaddr *ai_dst_addr;
    char *ai_src_canonname;
    char *ai_dst_canonname;
    size_t ai_route_len;
    void *ai_route;
    size_t ai_connect_len;
    void *ai_connect;
    struct rdma_addrinfo *ai_next;
    ...;
};

int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints,
                     struct rdma_addrinfo **res);
void rdma_freeaddrinfo(struct rdma_addrinfo *res);
int rdma_create_ep(struct rdma_cm_id **id, struct rdma_addrinfo *res, struct ibv_pd *pd,
                   struct ibv_qp_init_attr *qp_init_attr);
void rdma_destroy_ep(struct rdma_cm_id *id);
//: since 60 RESOLVE_ADDRINFO rdma_resolve_addrinfo
int rdma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service,
                          const struct rdma_addrinfo *hints);
int rdma_query_addrinfo(struct rdma_cm_id *id, struct rdma_addrinfo **info);
//: end

enum rdma_cm_join_mc_attr_mask {
    RDMA_CM_JOIN_MC_ATTR_ADDRESS, RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS, RDMA_CM_JOIN_MC_ATTR_RESERVED, ...
};
enum rdma_cm_mc_join_flags {
    RDMA_MC_JOIN_FLAG_FULLMEMBER, RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, RDMA_MC_JOIN_FLAG_RESERVED, ...
};
struct rdma_cm_join_mc_attr_ex {
    uint32_t comp_mask;
    uint32_t join_flags;
    struct sockaddr *addr;
    ...;
};
int rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *addr, void *context);
int rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *mc_join_attr, void *context);
int rdma_leave_multicast(struct rdma_cm_id *id, struct sockaddr *addr);
