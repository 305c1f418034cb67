/* Counters of what a flow let through. */
struct ibv_counters_init_attr {
    uint32_t comp_mask;
    ...;
};
struct ibv_counters {
    struct ibv_context *context;
    ...;
};
enum ibv_counter_description { IBV_COUNTER_PACKETS, IBV_COUNTER_BYTES, ... };
struct ibv_counter_attach_attr {
    enum ibv_counter_description counter_desc;
    uint32_t index;
    uint32_t comp_mask;
    ...;
};
enum ibv_read_counters_flags { IBV_READ_COUNTERS_ATTR_PREFER_CACHED, ... };

struct ibv_counters *ibv_create_counters(struct ibv_context *context,
                                         struct ibv_counters_init_attr *init_attr);
int ibv_destroy_counters(struct ibv_counters *counters);
int ibv_attach_counters_point_flow(struct ibv_counters *counters, struct ibv_counter_attach_attr *attr,
                                   struct ibv_flow *flow);
int ibv_read_counters(struct ibv_counters *counters, uint64_t *counters_value, uint32_t ncounters,
                      uint32_t flags);
