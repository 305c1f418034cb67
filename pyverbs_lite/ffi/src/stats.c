/*
 * What a connection has done: counted where it is done, under the engine's lock, and copied for Python when asked for.
 */
#include <stdint.h>

struct pvl_stats {
    uint64_t sends, send_bytes;
    uint64_t recvs, recv_bytes;
    uint64_t writes, write_bytes;
    uint64_t reads, read_bytes;
    uint64_t atomics;
    uint64_t errors;        /* requests that failed, but for those that were flushed because of it */
    uint64_t polls;         /* how often a thread began to look for completions */
    uint64_t sleeps;        /* how often a thread slept until there was something */
    uint64_t credit_waits;  /* messages that the peer had no receive for at first */
    uint64_t registrations; /* of memory, by this connection */
    uint32_t in_flight;
    uint32_t in_flight_peak;
};

/* Count requests that were posted; what the library sends for itself is nobody's. */
static void pvl_count(struct pvl_stats *stats, int opcode, uint32_t count, uint64_t bytes)
{
    switch (opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
        stats->sends += count;
        stats->send_bytes += bytes;
        break;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        stats->writes += count;
        stats->write_bytes += bytes;
        break;
    case IBV_WR_RDMA_READ:
        stats->reads += count;
        stats->read_bytes += bytes;
        break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        stats->atomics += count;
        break;
    }
}
