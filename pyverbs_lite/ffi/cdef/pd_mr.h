/* Protection domains and memory regions. */
struct ibv_pd {
    struct ibv_context *context;
    uint32_t handle;
    ...;
};

enum ibv_access_flags {
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC,
    IBV_ACCESS_MW_BIND, IBV_ACCESS_ZERO_BASED, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_HUGETLB,
//: with FLUSH
    IBV_ACCESS_FLUSH_GLOBAL, IBV_ACCESS_FLUSH_PERSISTENT,
//: end
    IBV_ACCESS_RELAXED_ORDERING, ...
};
#define IBV_ACCESS_OPTIONAL_RANGE ...
#define IBV_ACCESS_OPTIONAL_FIRST ...

struct ibv_mr {
    struct ibv_context *context;
    struct ibv_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle;
    uint32_t lkey;
    uint32_t rkey;
    ...;
};

enum ibv_rereg_mr_flags {
    IBV_REREG_MR_CHANGE_TRANSLATION, IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_ACCESS,
    IBV_REREG_MR_FLAGS_SUPPORTED, ...
};
enum ibv_rereg_mr_err_code {
    IBV_REREG_MR_ERR_INPUT, IBV_REREG_MR_ERR_DONT_FORK_NEW, IBV_REREG_MR_ERR_DO_FORK_OLD,
    IBV_REREG_MR_ERR_CMD, IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW, ...
};
enum ibv_advise_mr_advice {
    IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
//: since 32 ADVISE_MR_NO_FAULT IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT
    IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
//: end
    ...
};
#define IBV_ADVISE_MR_FLAG_FLUSH ...

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access);
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                unsigned int access);
struct ibv_mr *ibv_alloc_null_mr(struct ibv_pd *pd);
int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access);
int ibv_advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags,
                  struct ibv_sge *sg_list, uint32_t num_sge);
int ibv_dereg_mr(struct ibv_mr *mr);

//: since 34 DMABUF_MR ibv_reg_dmabuf_mr
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                 int access);
//: end

//: since 59 REG_MR_EX ibv_reg_mr_ex
enum ibv_mr_init_attr_mask {
    IBV_REG_MR_MASK_IOVA, IBV_REG_MR_MASK_ADDR, IBV_REG_MR_MASK_FD, IBV_REG_MR_MASK_FD_OFFSET,
    IBV_REG_MR_MASK_DMAH,
//: with ALLOC_BUF
    IBV_REG_MR_MASK_BUF,
//: end
    ...
};
struct ibv_mr_init_attr {
    size_t length;
    int access;
    uint64_t comp_mask;
    uint64_t iova;
    void *addr;
    int fd;
    uint64_t fd_offset;
    struct ibv_dmah *dmah;
//: with ALLOC_BUF
    struct ibv_buf *buf;
//: end
    ...;
};
struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, struct ibv_mr_init_attr *mr_init_attr);
//: end
