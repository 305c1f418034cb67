/* Work requests. */
enum ibv_wr_opcode {
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ,
    IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_LOCAL_INV, IBV_WR_BIND_MW,
    IBV_WR_SEND_WITH_INV, IBV_WR_TSO, IBV_WR_DRIVER1,
//: with FLUSH
    IBV_WR_FLUSH,
//: end
//: with ATOMIC_WRITE
    IBV_WR_ATOMIC_WRITE,
//: end
    ...
};
enum ibv_send_flags {
    IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_SEND_INLINE, IBV_SEND_IP_CSUM, ...
};
struct ibv_sge {
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
    ...;
};
struct ibv_data_buf {
    void *addr;
    size_t length;
    ...;
};
/* A struct of another struct of unknown size needs a name (see src/names.c). */
typedef struct {
    struct ibv_mw *mw;
    uint32_t rkey;
    struct ibv_mw_bind_info bind_info;
    ...;
} pvl_bind_mw;
/* imm_data is big-endian; the unions are as in C. */
struct ibv_send_wr {
    uint64_t wr_id;
    struct ibv_send_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
    enum ibv_wr_opcode opcode;
    unsigned int send_flags;
    union {
        __be32 imm_data;
        uint32_t invalidate_rkey;
    };
    union {
        struct {
            uint64_t remote_addr;
            uint32_t rkey;
        } rdma;
        struct {
            uint64_t remote_addr;
            uint64_t compare_add;
            uint64_t swap;
            uint32_t rkey;
        } atomic;
        struct {
            struct ibv_ah *ah;
            uint32_t remote_qpn;
            uint32_t remote_qkey;
        } ud;
    } wr;
    union {
        struct {
            uint32_t remote_srqn;
        } xrc;
    } qp_type;
    union {
        pvl_bind_mw bind_mw;
        struct {
            void *hdr;
            uint16_t hdr_sz;
            uint16_t mss;
        } tso;
    };
    ...;
};
struct ibv_recv_wr {
    uint64_t wr_id;
    struct ibv_recv_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
    ...;
};

int ibv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int ibv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);

//: since 49 WR_OPCODE_STR ibv_wr_opcode_str
const char *ibv_wr_opcode_str(enum ibv_wr_opcode opcode);
//: end

/* A list of file descriptors. */
//: since 57 FD_ARR sizeof(struct ibv_fd_arr)
struct ibv_fd_arr {
    int *arr;
    uint32_t count;
    ...;
};
//: end
