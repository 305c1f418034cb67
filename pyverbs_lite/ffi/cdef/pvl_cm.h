/* Our own C: events of the connection manager (see src/cm.c). */
struct pvl_cm_event {
    int taken;
    int event;
    int status;
    int is_ud;
    uint64_t context;
    uint64_t group;
    struct rdma_cm_id *request;
    uint8_t responder_resources;
    uint8_t initiator_depth;
    uint8_t flow_control;
    uint8_t retry_count;
    uint8_t rnr_retry_count;
    uint8_t srq;
    uint32_t qp_num;
    uint32_t qkey;
    struct ibv_ah_attr ah_attr;
    uint8_t private_data_len;
    uint8_t private_data[256];
};
int pvl_cm_take(struct rdma_event_channel *channel, struct pvl_cm_event *out);
