/*
 * Memory that is registered for one operation, and of other kinds than a buffer at an address: huge pages, and windows
 * that are bound through an engine.
 */
#include <sys/mman.h>

#ifndef MAP_HUGETLB
#define MAP_HUGETLB 0 /* asked for by nobody then */
#endif
#define PVL_MAP_HUGETLB MAP_HUGETLB

/* Memory registered for one operation. Python owns this; it says whether there is a region, whatever interrupts. */
struct pvl_region {
    struct ibv_mr *mr;
    uint32_t lkey;
};

/* Have pvl_stop() wait until pvl_registered(), for much memory takes long, and the lock is not held; or PVL_STOPPED. */
static int pvl_registers(struct pvl_engine *engine)
{
    int rc;

    pthread_mutex_lock(&engine->lock);
    rc = engine->stopped ? PVL_STOPPED : 0;
    engine->registering += !rc;
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* Enter what a verb has registered, or that it has not: errno says why. Returns 0 or a positive errno. */
static int pvl_registered(struct pvl_engine *engine, struct pvl_region *region, struct ibv_mr *mr)
{
    int rc = mr ? 0 : errno ? errno : EIO;

    if (mr) {
        region->lkey = mr->lkey;
        region->mr = mr;
    }
    pthread_mutex_lock(&engine->lock);
    engine->registering--;
    engine->stats.registrations += !!mr;
    if (engine->sleepers)
        pthread_cond_broadcast(&engine->news);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/* Returns 0, PVL_STOPPED, or a positive errno. */
static int pvl_register(struct pvl_engine *engine, struct pvl_region *region, struct ibv_pd *pd, uint64_t addr,
                        uint64_t length, int access)
{
    if (pvl_registers(engine))
        return PVL_STOPPED;
    return pvl_registered(engine, region, ibv_reg_mr(pd, (void *)(uintptr_t)addr, length, access));
}

/* Returns 0, also where there is no region any more, or an errno. Threads may try at the same time. */
static int pvl_deregister(struct pvl_region *region)
{
    struct ibv_mr *mr = __atomic_exchange_n(&region->mr, NULL, __ATOMIC_ACQ_REL);
    int rc = mr ? ibv_dereg_mr(mr) : 0;

    if (rc)
        __atomic_store_n(&region->mr, mr, __ATOMIC_RELEASE);
    return rc;
}

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
