/*
 * Looking without ever waiting, for whoever sleeps elsewhere: in an event loop that watches the channel's descriptor.
 */
#include <errno.h>
#include <sys/eventfd.h>

#define PVL_LOOKS 8 /* at most so many batches in one look, for the event loop has other things to do */

#define PVL_LOOKED_PART 1 /* there may be more: look again */
#define PVL_LOOKED_BUSY 2 /* another thread is polling; it enters what there is, and pokes */
#define PVL_LOOKED_FOUND 4 /* completions were entered */
#define PVL_LOOKED_EVENT 8 /* an event was taken */

/* Tell the event loop that a thread has entered completions, and maybe taken the events for them. Under the lock. */
static void pvl_poke(struct pvl_engine *engine)
{
    if (engine->poke_fd < 0)
        return;
    __atomic_store_n(&engine->poked, 1, __ATOMIC_RELEASE); /* for a hub, whose eventfd is everybody's */
    eventfd_write(engine->poke_fd, 1); /* it fails only where very many pokes have not been read */
}

/* Poke an eventfd from now on, or none (-1): when this returns, nobody writes to the one before. */
static void pvl_poke_at(struct pvl_engine *engine, int fd)
{
    pthread_mutex_lock(&engine->lock);
    engine->poke_fd = fd;
    pthread_mutex_unlock(&engine->lock);
}

/*
 * Enter the completions that are there. With `event`, take an event of the channel first, if there is one: where more
 * are, its descriptor stays readable. With `arm`, the next completion raises an event.
 *
 * Returns PVL_LOOKED_* bits, or a negative errno: -ESHUTDOWN after pvl_stop(). With PART or BUSY nothing was armed.
 */
static int pvl_look(struct pvl_engine *engine, int event, int arm)
{
    int n = 0, rc = 0;

    pthread_mutex_lock(&engine->lock);
    if (engine->stopped || engine->polling) {
        rc = engine->stopped ? -ESHUTDOWN : PVL_LOOKED_BUSY;
        engine->missed = 1; /* that thread pokes when it is done, for it may not have armed the CQ again */
        pthread_mutex_unlock(&engine->lock);
        return rc;
    }
    engine->stats.polls++;
    engine->polling = 1; /* the wc array is this thread's, and pvl_stop() waits */
    pthread_mutex_unlock(&engine->lock);
    if (event && !engine->hub) /* the hub has taken them */
        n = pvl_drain_event(engine->channel);
    rc = n > 0 ? PVL_LOOKED_EVENT : n;
    for (int round = 0; rc >= 0 && !(rc & PVL_LOOKED_PART); round++) {
        n = ibv_poll_cq(engine->cq, PVL_BATCH, engine->wc);
        if (n < 0) {
            rc = -EIO;
        } else if (n > 0) {
            pthread_mutex_lock(&engine->lock);
            pvl_enter(engine, n, 0);
            pthread_mutex_unlock(&engine->lock);
            rc |= round < PVL_LOOKS ? PVL_LOOKED_FOUND : PVL_LOOKED_FOUND | PVL_LOOKED_PART;
        } else if (arm) {
            n = ibv_req_notify_cq(engine->cq, 0);
            if (n)
                rc = n < 0 ? n : -n;
            arm = 0; /* and once more round: what came before the arming raises no event */
        } else {
            break;
        }
    }
    pthread_mutex_lock(&engine->lock);
    if (n == 0)
        pvl_found_nothing(engine);
    engine->polling = 0;
    if (engine->sleepers)
        pthread_cond_broadcast(&engine->news);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

/*
 * Enter the completions that are there, without any system call: their event, if one is due, is still to come.
 *
 * Returns how many there were, or -ESHUTDOWN after pvl_stop().
 */
static int pvl_peek(struct pvl_engine *engine)
{
    int n = 0;

    pthread_mutex_lock(&engine->lock);
    if (engine->stopped)
        n = -ESHUTDOWN;
    else if (!engine->polling)
        n = ibv_poll_cq(engine->cq, PVL_BATCH, engine->wc);
    if (n > 0)
        pvl_enter(engine, n, 0);
    pthread_mutex_unlock(&engine->lock);
    return n;
}

/* Return how many requests of a kind could be posted now, at least; any opcode of pvl_post() stands for its kind. */
static uint32_t pvl_room(struct pvl_engine *engine, int opcode)
{
    uint32_t room = 0;

    pthread_mutex_lock(&engine->lock);
    if (pvl_ready(engine, PVL_UNTIL_SLOT, NULL, 0) && pvl_has_credit(&engine->framing, pvl_kind(opcode)))
        room = pvl_room_left(engine);
    pthread_mutex_unlock(&engine->lock);
    return room;
}
