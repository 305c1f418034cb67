/* librdmacm: identifiers, addresses, events, connections. */
enum rdma_cm_event_type {
    RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ROUTE_RESOLVED,
    RDMA_CM_EVENT_ROUTE_ERROR, RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE,
    RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_UNREACHABLE, RDMA_CM_EVENT_REJECTED,
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_DEVICE_REMOVAL,
    RDMA_CM_EVENT_MULTICAST_JOIN, RDMA_CM_EVENT_MULTICAST_ERROR, RDMA_CM_EVENT_ADDR_CHANGE,
    RDMA_CM_EVENT_TIMEWAIT_EXIT,
//: with RESOLVE_ADDRINFO
    RDMA_CM_EVENT_ADDRINFO_RESOLVED, RDMA_CM_EVENT_ADDRINFO_ERROR,
//: end
//: with WRITE_CM_EVENT
    RDMA_CM_EVENT_USER, RDMA_CM_EVENT_INTERNAL,
//: end
    ...
};
enum rdma_port_space { RDMA_PS_IPOIB, RDMA_PS_TCP, RDMA_PS_UDP, RDMA_PS_IB, ... };
#define RDMA_IB_IP_PS_MASK ...
#define RDMA_IB_IP_PORT_MASK ...
#define RDMA_IB_IP_PS_TCP ...
#define RDMA_IB_IP_PS_UDP ...
#define RDMA_IB_PS_IB ...
#define RDMA_UDP_QKEY ...

struct rdma_ib_addr {
    union ibv_gid sgid;
    union ibv_gid dgid;
    __be16 pkey;
    ...;
};
typedef union {
    struct rdma_ib_addr ibaddr;
    ...;
} pvl_ib_addr;
struct rdma_addr {
    union {
        struct sockaddr src_addr;
        struct sockaddr_in src_sin;
        struct sockaddr_in6 src_sin6;
        struct sockaddr_storage src_storage;
    };
    union {
        struct sockaddr dst_addr;
        struct sockaddr_in dst_sin;
        struct sockaddr_in6 dst_sin6;
        struct sockaddr_storage dst_storage;
    };
    pvl_ib_addr addr;
    ...;
};
struct rdma_route {
    struct rdma_addr addr;
    struct ibv_sa_path_rec *path_rec;
    int num_paths;
    ...;
};
struct rdma_event_channel {
    int fd;
    ...;
};
struct rdma_cm_id {
    struct ibv_context *verbs;
    struct rdma_event_channel *channel;
    void *context;
    struct ibv_qp *qp;
    struct rdma_route route;
    enum rdma_port_space ps;
    uint8_t port_num;
    struct rdma_cm_event *event;
    struct ibv_comp_channel *send_cq_channel;
    struct ibv_cq *send_cq;
    struct ibv_comp_channel *recv_cq_channel;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    struct ibv_pd *pd;
    enum ibv_qp_type qp_type;
    ...;
};

#define RDMA_MAX_RESP_RES ...
#define RDMA_MAX_INIT_DEPTH ...
struct rdma_conn_param {
    const void *private_data;
    uint8_t private_data_len;
    uint8_t responder_resources;
    uint8_t initiator_depth;
    uint8_t flow_control;
    uint8_t retry_count;
    uint8_t rnr_retry_count;
    uint8_t srq;
    uint32_t qp_num;
    ...;
};
struct rdma_ud_param {
    const void *private_data;
    uint8_t private_data_len;
    struct ibv_ah_attr ah_attr;
    uint32_t qp_num;
    uint32_t qkey;
    ...;
};
typedef union {
    struct rdma_conn_param conn;
    struct rdma_ud_param ud;
//: with WRITE_CM_EVENT
    uint64_t arg;
//: end
    ...;
} pvl_cm_event_param;
struct rdma_cm_event {
    struct rdma_cm_id *id;
    struct rdma_cm_id *listen_id;
    enum rdma_cm_event_type event;
    int status;
    pvl_cm_event_param param;
    ...;
};

struct rdma_event_channel *rdma_create_event_channel(void);
void rdma_destroy_event_channel(struct rdma_event_channel *channel);
int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event);
int rdma_ack_cm_event(struct rdma_cm_event *event);
const char *rdma_event_str(enum rdma_cm_event_type event);
//: since 60 WRITE_CM_EVENT rdma_write_cm_event
int rdma_write_cm_event(struct rdma_cm_id *id, enum rdma_cm_event_type event, int status, uint64_t arg);
//: end

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
                   enum rdma_port_space ps);
int rdma_destroy_id(struct rdma_cm_id *id);
int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *channel);
int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr);
int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *src_addr, struct sockaddr *dst_addr,
                      int timeout_ms);
int rdma_resolve_route(struct rdma_cm_id *id, int timeout_ms);
int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *qp_init_attr);
int rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *qp_init_attr);
void rdma_destroy_qp(struct rdma_cm_id *id);
int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *qp_attr, int *qp_attr_mask);
int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *conn_param);
int rdma_establish(struct rdma_cm_id *id);
int rdma_listen(struct rdma_cm_id *id, int backlog);
int rdma_get_request(struct rdma_cm_id *listen, struct rdma_cm_id **id);
int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *conn_param);
int rdma_reject(struct rdma_cm_id *id, const void *private_data, uint8_t private_data_len);
int rdma_notify(struct rdma_cm_id *id, enum ibv_event_type event);
int rdma_disconnect(struct rdma_cm_id *id);
__be16 rdma_get_src_port(struct rdma_cm_id *id);
__be16 rdma_get_dst_port(struct rdma_cm_id *id);
struct sockaddr *rdma_get_local_addr(struct rdma_cm_id *id);
struct sockaddr *rdma_get_peer_addr(struct rdma_cm_id *id);
struct ibv_context **rdma_get_devices(int *num_devices);
void rdma_free_devices(struct ibv_context **list);

#define RDMA_OPTION_ID ...
#define RDMA_OPTION_IB ...
#define RDMA_OPTION_ID_TOS ...
#define RDMA_OPTION_ID_REUSEADDR ...
#define RDMA_OPTION_ID_AFONLY ...
#define RDMA_OPTION_ID_ACK_TIMEOUT ...
#define RDMA_OPTION_IB_PATH ...
int rdma_set_option(struct rdma_cm_id *id, int level, int optname, void *optval, size_t optlen);

//: with ECE
int rdma_set_local_ece(struct rdma_cm_id *id, struct ibv_ece *ece);
int rdma_get_remote_ece(struct rdma_cm_id *id, struct ibv_ece *ece);
int rdma_reject_ece(struct rdma_cm_id *id, const void *private_data, uint8_t private_data_len);
//: end
