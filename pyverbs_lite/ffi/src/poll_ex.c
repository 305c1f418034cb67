/*
 * Polling an extended CQ: reads every field that was asked for, and leaves nothing open behind.
 *
 * Between ibv_start_poll() and ibv_end_poll() most drivers hold the lock of the CQ, and the driver's own calls that need
 * it (another poll, a resize, destroying a QP) then spin for ever. So no Python runs in between.
 *
 * Every completion is a batch of its own, without ibv_next_poll(): before rdma-core 59, that of rxe ended the batch when
 * it found nothing more, and the ibv_end_poll() that has to follow then stepped over a completion still to come.
 */

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <infiniband/verbs.h>

struct pvl_wc_extra {
    uint64_t completion_ts;
    uint64_t completion_wallclock_ns;
    uint64_t tm_tag;
    uint32_t tm_priv;
    uint32_t flow_tag;
    uint32_t slid;
    uint16_t cvlan;
};

static void pvl_read_wc_ex(struct ibv_cq_ex *cq, uint64_t fields, struct ibv_wc *wc, struct pvl_wc_extra *extra)
{
    struct ibv_wc_tm_info tm;

    memset(wc, 0, sizeof(*wc));
    memset(extra, 0, sizeof(*extra));
    wc->wr_id = cq->wr_id;
    wc->status = cq->status;
    wc->vendor_err = ibv_wc_read_vendor_err(cq);
    if (fields & IBV_WC_EX_WITH_QP_NUM)
        wc->qp_num = ibv_wc_read_qp_num(cq);
    if (wc->status != IBV_WC_SUCCESS)
        return; /* nothing else of a failed completion means anything */
    wc->opcode = ibv_wc_read_opcode(cq);
    wc->wc_flags = ibv_wc_read_wc_flags(cq);
    if (fields & IBV_WC_EX_WITH_BYTE_LEN)
        wc->byte_len = ibv_wc_read_byte_len(cq);
    if (fields & IBV_WC_EX_WITH_IMM)
        wc->imm_data = ibv_wc_read_imm_data(cq); /* or the invalidated rkey: whoever reads the flags knows */
    if (fields & IBV_WC_EX_WITH_SRC_QP)
        wc->src_qp = ibv_wc_read_src_qp(cq);
    if (fields & IBV_WC_EX_WITH_SLID)
        extra->slid = ibv_wc_read_slid(cq);
    if (fields & IBV_WC_EX_WITH_SL)
        wc->sl = ibv_wc_read_sl(cq);
    if (fields & IBV_WC_EX_WITH_DLID_PATH_BITS)
        wc->dlid_path_bits = ibv_wc_read_dlid_path_bits(cq);
    if (fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
        extra->completion_ts = ibv_wc_read_completion_ts(cq);
    if (fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
        extra->completion_wallclock_ns = ibv_wc_read_completion_wallclock_ns(cq);
    if (fields & IBV_WC_EX_WITH_CVLAN)
        extra->cvlan = ibv_wc_read_cvlan(cq);
    if (fields & IBV_WC_EX_WITH_FLOW_TAG)
        extra->flow_tag = ibv_wc_read_flow_tag(cq);
    if (fields & IBV_WC_EX_WITH_TM_INFO) {
        memset(&tm, 0, sizeof(tm));
        ibv_wc_read_tm_info(cq, &tm);
        extra->tm_tag = tm.tag;
        extra->tm_priv = tm.priv;
    }
}

/*
 * Take up to max_wc completions, and spin up to spin_ns for the first one.
 *
 * Returns 0 or a negative errno. How many were taken goes to *got, as in pvl_wait(), so that an interrupt after the call
 * does not lose them.
 */
static int pvl_poll_ex(struct ibv_cq_ex *cq, uint64_t fields, struct ibv_wc *wc, struct pvl_wc_extra *extra,
                       int max_wc, int64_t spin_ns, int *got)
{
    struct ibv_poll_cq_attr attr = {0};
    int64_t end = spin_ns > 0 ? pvl_now_ns() + spin_ns : 0;
    int n, rc;

    for (;;) {
        for (n = 0; n < max_wc; n++) {
            rc = ibv_start_poll(cq, &attr);
            if (rc)
                break;
            pvl_read_wc_ex(cq, fields, &wc[n], &extra[n]);
            ibv_end_poll(cq);
        }
        *got = n;
        if (n)
            return 0; /* an error that came after some shows again at the next poll */
        if (rc != ENOENT)
            return rc < -1 ? rc : rc > 0 ? -rc : -EIO;
        if (!end || pvl_now_ns() >= end)
            return 0;
        sched_yield();
    }
}
