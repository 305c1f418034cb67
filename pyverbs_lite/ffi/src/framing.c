/*
 * Headers of two-sided messages: they grant receives, so that no message is sent that the peer has none for.
 *
 * To send all the same would stall the queue in RNR retries, and iWARP has none: it ends the connection. Where no socket
 * carries the control channel, its bytes travel between the messages, with a count of their own, so that neither can use
 * up what the other needs. A PVL_CREDIT is free: a side tells so seldom that only a few can be on their way before the
 * peer has noticed one, and as many receives are kept for them (docs/handshake.md has the reckoning).
 */
#include <arpa/inet.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PVL_MESSAGE 1 /* the caller's; imm is there if has_imm */
#define PVL_CONTROL 2 /* bytes of the control channel */
#define PVL_CREDIT 3  /* nothing but the counts */
#define PVL_NOTICE 4  /* an RDMA write of `length` bytes came before it, with imm: for transports without immediates */

/* Opcodes of ours for pvl_post(), beside those of enum ibv_wr_opcode. */
#define PVL_WR_CONTROL 0x70000002
#define PVL_WR_NOTICE 0x70000004

/* All of it is big-endian; docs/handshake.md has it as a table. */
struct pvl_header {
    uint8_t kind;
    uint8_t has_imm;
    uint16_t control_offered; /* how many receives for control bytes the sender has posted, ever, modulo 2^16 */
    uint32_t offered;         /* how many for messages, modulo 2^32 */
    uint32_t imm;
    uint32_t length;
};
#define PVL_HEADER_BYTES 16
_Static_assert(sizeof(struct pvl_header) == PVL_HEADER_BYTES, "the header has padding");

struct pvl_op;
struct pvl_arrival;

struct pvl_framing {
    int no_imm;    /* whether the transport has no immediates */
    int malformed; /* whether a message came whose header is none */
    uint32_t granted, sent;   /* receives of the peer, and those used */
    uint32_t offered, told;   /* receives posted here, and those that the peer knows of */
    uint16_t control_granted, control_sent, control_offered, control_told;
    uint32_t worth_telling; /* so many new receives for messages are told of in a message of their own */
    uint16_t control_worth_telling; /* the same for control bytes; 0: those do not come this way */
    struct pvl_arrival *control; /* control bytes that have arrived: a ring as for messages */
    uint64_t control_arrived;
    uint64_t control_taken;
};

/* What kind of receive a request uses at the peer, or 0 if it uses none. */
static int pvl_kind(int opcode)
{
    switch (opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return PVL_MESSAGE;
    case PVL_WR_CONTROL:
        return PVL_CONTROL;
    case PVL_WR_NOTICE:
        return PVL_NOTICE;
    default:
        return 0;
    }
}

/* Whether the peer has a receive for a request. */
static int pvl_has_credit(const struct pvl_framing *framing, int kind)
{
    if (!kind)
        return 1;
    if (kind == PVL_CONTROL)
        return (int16_t)(framing->control_granted - framing->control_sent) > 0;
    return (int32_t)(framing->granted - framing->sent) > 0;
}

/* What posting a message changes, to be undone where it is refused. */
struct pvl_told {
    uint32_t sent, told;
    uint16_t control_sent, control_told;
};

static struct pvl_told pvl_told(const struct pvl_framing *framing)
{
    return (struct pvl_told){framing->sent, framing->told, framing->control_sent, framing->control_told};
}

static void pvl_untell(struct pvl_framing *framing, struct pvl_told before)
{
    framing->sent = before.sent;
    framing->told = before.told;
    framing->control_sent = before.control_sent;
    framing->control_told = before.control_told;
}

/* Write the header of a message that is posted next, and count the receive that it uses. */
static void pvl_frame(struct pvl_framing *framing, void *cell, int kind, int has_imm, uint32_t imm, uint32_t length)
{
    struct pvl_header header = {
        .kind = (uint8_t)kind,
        .has_imm = (uint8_t)has_imm,
        .control_offered = htons(framing->control_offered),
        .offered = htonl(framing->offered),
        .imm = htonl(imm),
        .length = htonl(length),
    };

    memcpy(cell, &header, sizeof(header));
    framing->told = framing->offered;
    framing->control_told = framing->control_offered;
    if (kind == PVL_CONTROL)
        framing->control_sent++;
    else if (kind != PVL_CREDIT)
        framing->sent++;
}
