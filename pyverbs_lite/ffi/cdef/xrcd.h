/* XRC domains. */
enum ibv_xrcd_init_attr_mask {
    IBV_XRCD_INIT_ATTR_FD, IBV_XRCD_INIT_ATTR_OFLAGS, IBV_XRCD_INIT_ATTR_RESERVED, ...
};
struct ibv_xrcd_init_attr {
    uint32_t comp_mask;
    int fd;
    int oflags;
    ...;
};
struct ibv_xrcd {
    struct ibv_context *context;
    ...;
};

struct ibv_xrcd *ibv_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *xrcd_init_attr);
int ibv_close_xrcd(struct ibv_xrcd *xrcd);
