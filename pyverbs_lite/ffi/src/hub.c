/*
 * One completion channel for the engines of many connections, and their control connections beside it.
 *
 * Whoever turns the hub, a thread of its own or an event loop, reads the channel's events, learns from the CQ which
 * engine each is for, and rings there. The threads that use an engine sleep until that, and look at no clock meanwhile.
 *
 * The hub's lock is taken before an engine's, never after. An event of the channel is acknowledged in the call that took
 * it, so destroying a CQ waits for nobody else.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define PVL_HUB_TURN 64 /* descriptors looked at in one turn */
#define PVL_HUB_CHANNEL (~0ULL)
#define PVL_HUB_CALL (~1ULL)
/* A wait on an engine that is over looks at the clock: nobody may be left to ring. */
#define PVL_HUB_OVER_NS 100000000

struct pvl_seat {
    struct pvl_engine *engine; /* NULL: free */
    uint32_t turn;             /* how often the seat was taken: what epoll still has of one who left is not the next's */
};

struct pvl_hub {
    pthread_mutex_t lock;
    struct ibv_comp_channel *channel;
    int epoll_fd; /* readable when it is worth turning */
    int call_fd;  /* an eventfd: somebody wants it turned */
    int running; /* a thread turns it: nobody asks pvl_hub_next() who was rung for */
    int stopped;
    struct pvl_seat *seats;
    uint32_t count;
    struct pvl_engine *rung; /* those collected, by their `next_rung` */
};

static int pvl_hub_watch(struct pvl_hub *hub, int fd, uint64_t key)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = key};

    return epoll_ctl(hub->epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

static void pvl_hub_free(struct pvl_hub *hub)
{
    if (hub->epoll_fd >= 0)
        close(hub->epoll_fd);
    if (hub->call_fd >= 0)
        close(hub->call_fd);
    pthread_mutex_destroy(&hub->lock);
    free(hub->seats);
    free(hub);
}

/* Make a hub for a channel, whose descriptor must be non-blocking. */
static struct pvl_hub *pvl_hub_new(struct ibv_comp_channel *channel)
{
    struct pvl_hub *hub = calloc(1, sizeof(*hub));
    int saved;

    if (!hub)
        return NULL;
    pthread_mutex_init(&hub->lock, NULL);
    hub->channel = channel;
    hub->call_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    hub->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (hub->call_fd < 0 || hub->epoll_fd < 0 || pvl_hub_watch(hub, channel->fd, PVL_HUB_CHANNEL) ||
        pvl_hub_watch(hub, hub->call_fd, PVL_HUB_CALL)) {
        saved = errno;
        pvl_hub_free(hub);
        errno = saved;
        return NULL;
    }
    return hub;
}

/* Let an engine be rung for from now on; before its CQ is armed for the first time. Returns 0 or an errno. */
static int pvl_hub_join(struct pvl_hub *hub, struct pvl_engine *engine)
{
    uint32_t seat = 0;
    int rc = 0;

    pthread_mutex_lock(&hub->lock);
    while (seat < hub->count && hub->seats[seat].engine)
        seat++;
    if (seat == hub->count) {
        uint32_t count = hub->count ? 2 * hub->count : 16;
        struct pvl_seat *seats = realloc(hub->seats, count * sizeof(*seats));

        if (seats) {
            memset(seats + hub->count, 0, (count - hub->count) * sizeof(*seats));
            hub->seats = seats;
            hub->count = count;
        } else {
            rc = ENOMEM;
        }
    }
    if (rc == 0) {
        hub->seats[seat].engine = engine;
        engine->seat = seat;
        engine->key = (uint64_t)++hub->seats[seat].turn << 32 | seat;
        engine->cq->cq_context = engine;
        engine->hub = hub;
    }
    pthread_mutex_unlock(&hub->lock);
    return rc;
}

/* When this returns, nobody rings for the engine, nor will. */
static void pvl_hub_leave(struct pvl_engine *engine)
{
    struct pvl_hub *hub = engine->hub;

    pthread_mutex_lock(&hub->lock);
    if (hub->seats[engine->seat].engine == engine) {
        hub->seats[engine->seat].engine = NULL;
        engine->cq->cq_context = NULL;
        for (struct pvl_engine **link = &hub->rung; *link; link = &(*link)->next_rung)
            if (*link == engine) {
                *link = engine->next_rung;
                break;
            }
    }
    pthread_mutex_unlock(&hub->lock);
}

/* Wake who waits on an engine, to look what is the matter. Under the engine's lock. */
static void pvl_ring(struct pvl_engine *engine, int what)
{
    engine->rung |= what;
    pthread_cond_broadcast(&engine->bell);
}

/* Wake everybody who waits on an engine, from Python. */
static void pvl_nudge(struct pvl_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    pvl_ring(engine, PVL_WOKE_SIGNAL);
    pthread_cond_broadcast(&engine->news);
    pthread_mutex_unlock(&engine->lock);
}

/* Under the hub's lock. */
static void pvl_hub_ring(struct pvl_hub *hub, struct pvl_engine *engine, int what)
{
    pthread_mutex_lock(&engine->lock);
    if (what == PVL_WOKE_PEER)
        engine->listens = 0; /* epoll tells of it once */
    pvl_ring(engine, what);
    engine->told |= what;
    if (!hub->running && !engine->collected) {
        engine->collected = 1;
        engine->next_rung = hub->rung;
        hub->rung = engine;
    }
    pthread_mutex_unlock(&engine->lock);
}

/* Read the events of the channel; returns 0 or a negative errno. */
static int pvl_hub_drain(struct pvl_hub *hub)
{
    struct ibv_cq *cq;
    void *engine;

    for (;;) {
        errno = 0; /* ibv_get_cq_event() leaves it alone when it reads too little */
        if (ibv_get_cq_event(hub->channel, &cq, &engine) == 0) {
            pthread_mutex_lock(&hub->lock);
            if (cq->cq_context) /* looked up under the lock, for it may have left meanwhile */
                pvl_hub_ring(hub, cq->cq_context, PVL_WOKE_EVENT);
            pthread_mutex_unlock(&hub->lock);
            ibv_ack_cq_events(cq, 1);
        } else if (errno == EAGAIN) {
            return 0;
        } else if (errno != EINTR) {
            return errno ? -errno : -EIO;
        }
    }
}

/* Ring where another thread has poked: see look.c. */
static void pvl_hub_pokes(struct pvl_hub *hub)
{
    pthread_mutex_lock(&hub->lock);
    for (uint32_t seat = 0; seat < hub->count; seat++) {
        struct pvl_engine *engine = hub->seats[seat].engine;

        if (engine && __atomic_exchange_n(&engine->poked, 0, __ATOMIC_ACQ_REL))
            pvl_hub_ring(hub, engine, PVL_WOKE_EVENT);
    }
    pthread_mutex_unlock(&hub->lock);
}

/* Ring for whom there is something; waits for that up to timeout_ms, or for ever (-1). Returns 0 or a negative errno. */
static int pvl_hub_turn(struct pvl_hub *hub, int timeout_ms)
{
    struct epoll_event events[PVL_HUB_TURN];
    int n = epoll_wait(hub->epoll_fd, events, PVL_HUB_TURN, timeout_ms), rc = 0;

    if (n < 0)
        return errno == EINTR ? 0 : -errno;
    for (int i = 0; i < n && rc == 0; i++) {
        uint64_t key = events[i].data.u64, count;

        if (key == PVL_HUB_CHANNEL) {
            rc = pvl_hub_drain(hub);
            if (rc == 0 && events[i].events & (EPOLLERR | EPOLLHUP))
                rc = -ENODEV; /* the device is gone: the descriptor would be readable for ever */
        } else if (key == PVL_HUB_CALL) {
            eventfd_read(hub->call_fd, &count);
            pvl_hub_pokes(hub);
        } else {
            pthread_mutex_lock(&hub->lock);
            if ((uint32_t)key < hub->count) {
                struct pvl_seat *seat = &hub->seats[(uint32_t)key];

                if (seat->engine && seat->turn == key >> 32)
                    pvl_hub_ring(hub, seat->engine, PVL_WOKE_PEER);
            }
            pthread_mutex_unlock(&hub->lock);
        }
    }
    return rc;
}

/* Turn until pvl_hub_stop(); returns 0 or a negative errno. */
static int pvl_hub_run(struct pvl_hub *hub)
{
    int rc = 0;

    hub->running = 1;
    while (rc == 0 && !__atomic_load_n(&hub->stopped, __ATOMIC_ACQUIRE))
        rc = pvl_hub_turn(hub, -1);
    return rc;
}

static void pvl_hub_stop(struct pvl_hub *hub)
{
    __atomic_store_n(&hub->stopped, 1, __ATOMIC_RELEASE);
    eventfd_write(hub->call_fd, 1);
}

/* Return the key of an engine that was rung for since it was returned last, and what for; or 0. */
static uint64_t pvl_hub_next(struct pvl_hub *hub, int *what)
{
    struct pvl_engine *engine;
    uint64_t key = 0;

    pthread_mutex_lock(&hub->lock);
    engine = hub->rung;
    if (engine) {
        hub->rung = engine->next_rung;
        key = engine->key;
        pthread_mutex_lock(&engine->lock);
        engine->collected = 0;
        *what = engine->told;
        engine->told = 0;
        pthread_mutex_unlock(&engine->lock);
    }
    pthread_mutex_unlock(&hub->lock);
    return key;
}

/* Be rung for when the peer says something, or is gone; once, until this is called again. */
static void pvl_hub_listen(struct pvl_engine *engine)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT, .data.u64 = engine->key};
    int fd, needed;

    pthread_mutex_lock(&engine->lock);
    fd = engine->peer_fd;
    needed = fd >= 0 && !engine->listens && !engine->stopped;
    if (needed)
        engine->listens = 1;
    pthread_mutex_unlock(&engine->lock);
    if (needed && epoll_ctl(engine->hub->epoll_fd, EPOLL_CTL_MOD, fd, &event) && errno == ENOENT)
        epoll_ctl(engine->hub->epoll_fd, EPOLL_CTL_ADD, fd, &event); /* where it is closed, whoever did so rings */
}

/* What pvl_wait() does, for an engine that is rung for. */
static int pvl_hub_wait(struct pvl_engine *engine, int64_t timeout_ns, int *got, int *woke)
{
    int64_t spin_ns = engine->spin_ns < timeout_ns ? engine->spin_ns : timeout_ns, end;
    struct timespec limit;
    int n = pvl_wait(engine->cq, NULL, -1, engine->wc, PVL_BATCH, spin_ns, spin_ns, got, woke);

    if (n || *got || timeout_ns <= spin_ns)
        return n;
    *woke = 0;
    if (engine->over && timeout_ns > PVL_HUB_OVER_NS)
        timeout_ns = PVL_HUB_OVER_NS;
    end = pvl_now_ns() + timeout_ns;
    limit.tv_sec = end / 1000000000;
    limit.tv_nsec = end % 1000000000;
    for (;;) {
        n = ibv_req_notify_cq(engine->cq, 0);
        if (n)
            return n < 0 ? n : -n;
        n = ibv_poll_cq(engine->cq, PVL_BATCH, engine->wc);
        if (n)
            return n < 0 ? -EIO : (*got = n, 0);
        if (*woke) /* what woke us has been followed by one more look at the CQ: what came first counts */
            return 0;
        pvl_hub_listen(engine);
        pvl_naps++;
        pthread_mutex_lock(&engine->lock);
        while (!engine->rung && !engine->stopped && !*woke)
            if (pthread_cond_timedwait(&engine->bell, &engine->lock, &limit) == ETIMEDOUT)
                *woke = PVL_WOKE_TIMEOUT;
        *woke |= engine->rung & ~PVL_WOKE_EVENT;
        engine->rung = 0;
        if (engine->stopped)
            *woke |= PVL_WOKE_SIGNAL;
        pthread_mutex_unlock(&engine->lock);
    }
}
