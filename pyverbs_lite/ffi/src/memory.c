/*
 * Memory of other kinds than a buffer at an address: huge pages, and windows that are bound through an engine.
 */
#include <sys/mman.h>

#ifndef MAP_HUGETLB
#define MAP_HUGETLB 0 /* asked for by nobody then */
#endif
#define PVL_MAP_HUGETLB MAP_HUGETLB

/*
 * Post one request that binds a window of type 2, or without mw one that invalidates the window that has rkey.
 *
 * Returns 0 once it is posted, PVL_NO_SLOT, PVL_STOPPED, or a positive errno.
 */
static int pvl_post_window(struct pvl_engine *engine, struct pvl_op *op, struct ibv_mw *mw, uint32_t rkey,
                           struct ibv_mr *mr, uint64_t addr, uint64_t length, int access)
{
    struct ibv_send_wr wr = {.opcode = mw ? IBV_WR_BIND_MW : IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_send_wr *bad = NULL;
    uint32_t slot;
    int rc;

    if (mw) {
        wr.bind_mw.mw = mw;
        wr.bind_mw.rkey = rkey;
        wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
            .mr = mr, .addr = addr, .length = length, .mw_access_flags = (unsigned int)access,
        };
    } else {
        wr.invalidate_rkey = rkey;
    }
    pthread_mutex_lock(&engine->lock);
    if (engine->stopped) {
        pthread_mutex_unlock(&engine->lock);
        return PVL_STOPPED;
    }
    if (pvl_room_left(engine) == 0) {
        pthread_mutex_unlock(&engine->lock);
        return PVL_NO_SLOT;
    }
    slot = engine->free[engine->free_count - 1];
    wr.wr_id = pvl_wr_id(slot, 0);
    rc = ibv_post_send(engine->qp, &wr, &bad);
    if (rc == 0) {
        pvl_occupy(engine, &(struct pvl_slot){.op = op, .opcode = wr.opcode, .count = 1});
    }
    pthread_mutex_unlock(&engine->lock);
    return rc < 0 ? -rc : rc;
}

/* Register memory so that no interrupt can lose the region; returns 0 or a positive errno. */
static int pvl_register_alone(struct pvl_region *region, struct ibv_pd *pd, uint64_t addr, uint64_t length, int access)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, (void *)(uintptr_t)addr, length, access);

    if (!mr)
        return errno ? errno : EIO;
    region->lkey = mr->lkey;
    region->mr = mr;
    return 0;
}

/*
 * Register a range of a dma-buf for an operation of an engine, as pvl_register() does memory.
 *
 * Returns 0, PVL_STOPPED, or a positive errno.
 */
static int pvl_register_dmabuf(struct pvl_engine *engine, struct pvl_region *region, struct ibv_pd *pd, uint64_t offset,
                               uint64_t length, uint64_t iova, int fd, int access)
{
#if PVL_HAS_DMABUF_MR > 0
    if (pvl_registers(engine))
        return PVL_STOPPED;
    return pvl_registered(engine, region, ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access));
#else
    (void)engine, (void)region, (void)pd, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
    return EOPNOTSUPP;
#endif
}
