/*
 * Waiting for completions without holding the interpreter.
 *
 * One rule: poll; spin briefly, giving the CPU away each time round; arm; poll again, because a completion
 * that came between the last poll and the arming raises no event; then sleep on the channel's descriptor.
 * Whoever calls this from Python has released the GIL, and comes back at least once per timeout_ns, so that
 * signal handlers run.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>
#include <infiniband/verbs.h>

#define PVL_WOKE_PEER 1    /* peer_fd is readable or was hung up */
#define PVL_WOKE_SIGNAL 2  /* a signal interrupted the sleep: let the interpreter run its handlers */
#define PVL_WOKE_TIMEOUT 4 /* timeout_ns passed */
#define PVL_WOKE_EVENT 16 /* hub.c: the CQ has got something */
#define PVL_WOKE_CONTROL 8 /* pvl_progress(): control bytes arrived, or something that is no message */

/* Without a channel there is nothing to sleep on: look again this often. */
#define PVL_BLIND_SLEEP_NS 200000

static __thread uint32_t pvl_naps; /* how often this thread has slept in pvl_sleep() */

static int64_t pvl_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int pvl_set_nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return -1;
    return fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

/*
 * Take and acknowledge every event that waits on the channel; its descriptor must be non-blocking.
 *
 * Returns how many there were, or a negative errno. Both steps are here because an exception between them (Ctrl-C)
 * would leave an event unacknowledged, and destroying its CQ would wait for that for ever.
 */
static int pvl_drain_events(struct ibv_comp_channel *channel)
{
    struct ibv_cq *cq;
    void *cq_context;
    int count = 0;

    for (;;) {
        errno = 0; /* ibv_get_cq_event() leaves it alone when it reads too little */
        if (ibv_get_cq_event(channel, &cq, &cq_context) == 0) {
            ibv_ack_cq_events(cq, 1);
            count++;
        } else if (errno == EAGAIN) {
            return count;
        } else if (errno != EINTR) {
            return errno ? -errno : -EIO;
        }
    }
}

/* Take and acknowledge one event, if there is one; returns 1, 0, or a negative errno. Each try is a system call. */
static int pvl_drain_event(struct ibv_comp_channel *channel)
{
    struct ibv_cq *cq;
    void *cq_context;

    errno = 0; /* see pvl_drain_events() */
    if (ibv_get_cq_event(channel, &cq, &cq_context) == 0) {
        ibv_ack_cq_events(cq, 1);
        return 1;
    }
    if (errno == EAGAIN || errno == EINTR)
        return 0;
    return errno ? -errno : -EIO;
}

/*
 * Sleep until the channel or the peer's descriptor is readable, or so long; returns PVL_WOKE_* bits.
 *
 * Of the channel's events one is taken, for each is a system call: one more that is there ends the next sleep at once.
 */
static int pvl_sleep(struct ibv_comp_channel *channel, int peer_fd, int64_t left)
{
    struct pollfd fds[2] = {
        {.fd = channel ? channel->fd : -1, .events = POLLIN},
        {.fd = peer_fd, .events = POLLIN | POLLRDHUP}, /* poll() passes over a negative descriptor */
    };
    int blind = !channel && left > PVL_BLIND_SLEEP_NS;
    struct timespec limit;
    int n;

    if (left <= 0)
        return PVL_WOKE_TIMEOUT;
    if (blind)
        left = PVL_BLIND_SLEEP_NS;
    limit.tv_sec = left / 1000000000;
    limit.tv_nsec = left % 1000000000;
    pvl_naps++;
    n = ppoll(fds, 2, &limit, NULL);
    if (n < 0)
        return errno == EINTR ? PVL_WOKE_SIGNAL : -errno;
    if (n == 0)
        return blind ? 0 : PVL_WOKE_TIMEOUT;
    if (fds[0].revents) {
        n = pvl_drain_event(channel);
        if (n < 0)
            return n;
        if (n == 0 && fds[0].revents & (POLLERR | POLLHUP | POLLNVAL))
            return -ENODEV; /* the device is gone: the descriptor would be readable for ever */
    }
    return fds[1].revents ? PVL_WOKE_PEER : 0;
}

/*
 * Sleep until a descriptor is ready for some of the events, or has failed, or a signal comes, or so long; say whether it
 * is ready, or return a negative errno. Python's poll() reads the clock besides, so as to go on after a signal.
 */
static int pvl_await_fd(int fd, int events, int64_t timeout_ns)
{
    struct pollfd one = {.fd = fd, .events = (short)events};
    struct timespec limit = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    int n = ppoll(&one, 1, &limit, NULL);

    if (n < 0)
        return errno == EINTR ? 0 : -errno;
    return n;
}

/*
 * Wait until the CQ has completions, and take up to max_wc of them.
 *
 * Returns 0 or a negative errno. How many were taken goes to *got and not into the return value: an exception
 * that the interpreter raises between this call and the next line (Ctrl-C) must not lose them. Where *got is 0,
 * *woke says why. With timeout_ns 0 this only polls. channel may be NULL (then the wait looks again every
 * PVL_BLIND_SLEEP_NS); peer_fd may be -1.
 *
 * The clock is a system call on some machines, and then costs as much as a transfer. So it is read neither before the
 * first look nor at every later one, and the first sleep is as long as if the time before it were nothing.
 */
static int pvl_wait(struct ibv_cq *cq, struct ibv_comp_channel *channel, int peer_fd, struct ibv_wc *wc,
                    int max_wc, int64_t spin_ns, int64_t timeout_ns, int *got, int *woke)
{
    int64_t start = 0, left = timeout_ns;
    int n;

    *woke = 0;
    if (spin_ns > timeout_ns)
        spin_ns = timeout_ns;
    for (unsigned int round = 0;; round++) {
        n = ibv_poll_cq(cq, max_wc, wc);
        if (n)
            return n < 0 ? -EIO : (*got = n, 0);
        if (timeout_ns <= 0) {
            *woke = PVL_WOKE_TIMEOUT;
            return 0;
        }
        if (spin_ns <= 0)
            break;
        if (round % 4 == 3) {
            int64_t now = pvl_now_ns();

            if (!start)
                start = now;
            left = timeout_ns - (now - start);
            if (now - start >= spin_ns)
                break;
        }
        sched_yield();
    }
    for (unsigned int sleeps = 0;; sleeps++) {
        if (channel && (n = ibv_req_notify_cq(cq, 0)))
            return n < 0 ? n : -n;
        n = ibv_poll_cq(cq, max_wc, wc);
        if (n)
            return n < 0 ? -EIO : (*got = n, 0);
        n = pvl_sleep(channel, peer_fd, left);
        if (n < 0)
            return n;
        *woke = n;
        n = ibv_poll_cq(cq, max_wc, wc); /* before the next arming, which is a system call; and what came first counts */
        if (n)
            return n < 0 ? -EIO : (*got = n, 0);
        if (*woke)
            return 0;
        /* An event that was left over has ended the first sleep at once. */
        if (sleeps) {
            int64_t now = pvl_now_ns();

            if (!start)
                start = now;
            left = timeout_ns - (now - start);
        }
    }
}
