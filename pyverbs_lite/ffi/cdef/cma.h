/* librdmacm: the event channel and the identifier's life. */
enum rdma_port_space { RDMA_PS_IPOIB, RDMA_PS_TCP, RDMA_PS_UDP, RDMA_PS_IB, ... };
struct rdma_event_channel {
    int fd;
    ...;
};
struct rdma_cm_id {
    struct ibv_context *verbs;
    struct rdma_event_channel *channel;
    void *context;
    struct ibv_qp *qp;
    enum rdma_port_space ps;
    uint8_t port_num;
    ...;
};

struct rdma_event_channel *rdma_create_event_channel(void);
void rdma_destroy_event_channel(struct rdma_event_channel *channel);
int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
                   enum rdma_port_space ps);
int rdma_destroy_id(struct rdma_cm_id *id);
