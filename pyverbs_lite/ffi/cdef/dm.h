/* Memory on the device. */
struct ibv_alloc_dm_attr {
    size_t length;
    uint32_t log_align_req;
    uint32_t comp_mask;
    ...;
};
struct ibv_dm {
    struct ibv_context *context;
    int (*memcpy_to_dm)(struct ibv_dm *dm, uint64_t dm_offset, const void *host_addr, size_t length);
    int (*memcpy_from_dm)(void *host_addr, struct ibv_dm *dm, uint64_t dm_offset, size_t length);
    uint32_t comp_mask;
//: with IMPORT_DM
    uint32_t handle;
//: end
    ...;
};

struct ibv_dm *ibv_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr);
int ibv_free_dm(struct ibv_dm *dm);
int ibv_memcpy_to_dm(struct ibv_dm *dm, uint64_t dm_offset, const void *host_addr, size_t length);
int ibv_memcpy_from_dm(void *host_addr, struct ibv_dm *dm, uint64_t dm_offset, size_t length);
struct ibv_mr *ibv_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t dm_offset, size_t length,
                             unsigned int access);

//: since 62 DM_EXPORT_DMABUF ibv_dm_export_dmabuf_fd
int ibv_dm_export_dmabuf_fd(struct ibv_dm *dm);
//: end
