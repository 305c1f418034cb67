/* Thread domains, parent domains, and what they allocate. */
struct ibv_td_init_attr {
    uint32_t comp_mask;
    ...;
};
struct ibv_td {
    struct ibv_context *context;
    ...;
};

enum ibv_parent_domain_init_attr_mask {
    IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS, IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
//: since 64 CC_UNPROTECTED_ALLOC IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC
    IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC,
//: end
    ...
};
/* What "alloc" answers to leave the allocation to the driver: a pointer, so not a macro here. */
static void *const IBV_ALLOCATOR_USE_DEFAULT;
struct ibv_parent_domain_init_attr {
    struct ibv_pd *pd;
    struct ibv_td *td;
    uint32_t comp_mask;
    void *(*alloc)(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t resource_type);
    void (*free)(struct ibv_pd *pd, void *pd_context, void *ptr, uint64_t resource_type);
    void *pd_context;
    ...;
};

struct ibv_td *ibv_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *init_attr);
int ibv_dealloc_td(struct ibv_td *td);
struct ibv_pd *ibv_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);

/* DMA handles: hints for the placement of the data that a device writes. */
//: since 59 DMAH ibv_alloc_dmah
struct ibv_dmah {
    struct ibv_context *context;
    ...;
};
enum ibv_tph_mem_type { IBV_TPH_MEM_TYPE_VM, IBV_TPH_MEM_TYPE_PM, ... };
enum ibv_dmah_init_attr_mask {
    IBV_DMAH_INIT_ATTR_MASK_CPU_ID, IBV_DMAH_INIT_ATTR_MASK_PH, IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE, ...
};
struct ibv_dmah_init_attr {
    uint32_t comp_mask;
    uint32_t cpu_id;
    uint8_t ph;
    uint8_t tph_mem_type;
    ...;
};
struct ibv_dmah *ibv_alloc_dmah(struct ibv_context *context, struct ibv_dmah_init_attr *attr);
int ibv_dealloc_dmah(struct ibv_dmah *dmah);
//: end

/* Buffers that a parent domain allocates. */
//: since 64 ALLOC_BUF ibv_alloc_buf
struct ibv_buf;
void *ibv_alloc_buf(struct ibv_pd *pd, size_t size, struct ibv_buf **buf);
void ibv_free_buf(struct ibv_buf *buf);
struct ibv_mr *ibv_reg_buf_mr(struct ibv_pd *pd, struct ibv_buf *buf, void *addr, size_t length, int access);
//: end
