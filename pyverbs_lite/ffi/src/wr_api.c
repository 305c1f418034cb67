/*
 * A batch of the work request API, from start to complete, without coming back to the interpreter.
 *
 * Between ibv_wr_start() and ibv_wr_complete() a provider holds a lock of the QP, often one that spins. An exception in
 * between (Ctrl-C) would leave it held for ever, and another thread that posts would spin on it with no chance for us
 * to run on; so all is done here. The requests are those of ibv_post_send(), of which a few members say more:
 *
 *   IBV_SEND_INLINE   the one SGE is memory of this process, and its lkey means nothing
 *   ATOMIC_WRITE      the one SGE is 8 bytes of memory of this process
 *   FLUSH             wr.atomic: compare_add is the length, swap the type and, from bit 8 on, the level
 */
#include <errno.h>
#include <stdint.h>
#include <infiniband/verbs.h>

static int pvl_wr_build(struct ibv_qp_ex *qp, const struct ibv_send_wr *wr)
{
    uint64_t addr = wr->wr.rdma.remote_addr;
    uint32_t rkey = wr->wr.rdma.rkey;

    switch (wr->opcode) {
    case IBV_WR_SEND:
        ibv_wr_send(qp);
        return 0;
    case IBV_WR_SEND_WITH_IMM:
        ibv_wr_send_imm(qp, wr->imm_data);
        return 0;
    case IBV_WR_SEND_WITH_INV:
        ibv_wr_send_inv(qp, wr->invalidate_rkey);
        return 0;
    case IBV_WR_TSO:
        ibv_wr_send_tso(qp, wr->tso.hdr, wr->tso.hdr_sz, wr->tso.mss);
        return 0;
    case IBV_WR_RDMA_WRITE:
        ibv_wr_rdma_write(qp, rkey, addr);
        return 0;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        ibv_wr_rdma_write_imm(qp, rkey, addr, wr->imm_data);
        return 0;
    case IBV_WR_RDMA_READ:
        ibv_wr_rdma_read(qp, rkey, addr);
        return 0;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        ibv_wr_atomic_cmp_swp(qp, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr, wr->wr.atomic.compare_add,
                              wr->wr.atomic.swap);
        return 0;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        ibv_wr_atomic_fetch_add(qp, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr, wr->wr.atomic.compare_add);
        return 0;
    case IBV_WR_LOCAL_INV:
        ibv_wr_local_inv(qp, wr->invalidate_rkey);
        return 0;
    case IBV_WR_BIND_MW:
        ibv_wr_bind_mw(qp, wr->bind_mw.mw, wr->bind_mw.rkey, &wr->bind_mw.bind_info);
        return 0;
#if PVL_HAS_ATOMIC_WRITE > 0
    case IBV_WR_ATOMIC_WRITE:
        ibv_wr_atomic_write(qp, rkey, addr, (const void *)(uintptr_t)wr->sg_list->addr);
        return 0;
#endif
#if PVL_HAS_FLUSH > 0
    case IBV_WR_FLUSH:
        ibv_wr_flush(qp, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr, wr->wr.atomic.compare_add,
                     wr->wr.atomic.swap & 0xff, wr->wr.atomic.swap >> 8);
        return 0;
#endif
    default:
        return EOPNOTSUPP;
    }
}

static int pvl_wr_has_data(const struct ibv_send_wr *wr)
{
    switch (wr->opcode) {
    case IBV_WR_LOCAL_INV:
    case IBV_WR_BIND_MW:
        return 0;
#if PVL_HAS_ATOMIC_WRITE > 0
    case IBV_WR_ATOMIC_WRITE:
        return 0;
#endif
#if PVL_HAS_FLUSH > 0
    case IBV_WR_FLUSH:
        return 0;
#endif
    default:
        return 1;
    }
}

static void pvl_wr_set_data(struct ibv_qp_ex *qp, const struct ibv_send_wr *wr)
{
    const struct ibv_sge *sge = wr->sg_list;

    if (wr->num_sge == 0)
        ibv_wr_set_sge(qp, 0, 0, 0); /* a setter must follow, or some providers never finish the request */
    else if (wr->send_flags & IBV_SEND_INLINE)
        ibv_wr_set_inline_data(qp, (void *)(uintptr_t)sge->addr, sge->length);
    else if (wr->num_sge == 1)
        ibv_wr_set_sge(qp, sge->lkey, sge->addr, sge->length);
    else
        ibv_wr_set_sge_list(qp, wr->num_sge, sge);
}

/* Post all of a list, or nothing. Returns 0 or an errno. */
static int pvl_wr_post(struct ibv_qp_ex *qp, const struct ibv_send_wr *wr)
{
    ibv_wr_start(qp);
    for (; wr; wr = wr->next) {
        int rc;

        qp->wr_id = wr->wr_id;
        qp->wr_flags = wr->send_flags;
        rc = pvl_wr_build(qp, wr);
        if (rc) {
            ibv_wr_abort(qp);
            return rc;
        }
        if (qp->qp_base.qp_type == IBV_QPT_UD)
            ibv_wr_set_ud_addr(qp, wr->wr.ud.ah, wr->wr.ud.remote_qpn, wr->wr.ud.remote_qkey);
        else if (qp->qp_base.qp_type == IBV_QPT_XRC_SEND && wr->opcode != IBV_WR_LOCAL_INV &&
                 wr->opcode != IBV_WR_BIND_MW)
            ibv_wr_set_xrc_srqn(qp, wr->qp_type.xrc.remote_srqn);
        if (pvl_wr_has_data(wr))
            pvl_wr_set_data(qp, wr);
    }
    return ibv_wr_complete(qp);
}
