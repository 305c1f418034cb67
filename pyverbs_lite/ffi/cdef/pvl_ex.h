/* Our own C for extended CQs (see src/poll_ex.c): what a completion has beyond struct ibv_wc. */
struct pvl_wc_extra {
    uint64_t completion_ts;
    uint64_t completion_wallclock_ns;
    uint64_t tm_tag;
    uint32_t tm_priv;
    uint32_t flow_tag;
    uint32_t slid;
    uint16_t cvlan;
    ...;
};

int pvl_poll_ex(struct ibv_cq_ex *cq, uint64_t fields, struct ibv_wc *wc, struct pvl_wc_extra *extra, int max_wc,
                int64_t spin_ns, int *got);
