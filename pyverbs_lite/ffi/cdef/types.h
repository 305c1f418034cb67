/* Linux byte-order typedefs: the value in memory is big-endian. */
typedef uint16_t __be16;
typedef uint32_t __be32;
typedef uint64_t __be64;

/* The system's types that the verbs' structs are made of. */
typedef int... time_t;
struct timespec {
    time_t tv_sec;
    long tv_nsec;
    ...;
};
typedef union { ...; } pthread_mutex_t;
typedef union { ...; } pthread_cond_t;

/* Socket addresses: what librdmacm resolves, and what rdma_cm_id holds. */
typedef int... socklen_t;
typedef int... sa_family_t;
struct sockaddr {
    sa_family_t sa_family;
    char sa_data[...];
    ...;
};
struct in_addr {
    __be32 s_addr;
    ...;
};
struct in6_addr {
    uint8_t s6_addr[16];
    ...;
};
struct sockaddr_in {
    sa_family_t sin_family;
    __be16 sin_port;
    struct in_addr sin_addr;
    ...;
};
struct sockaddr_in6 {
    sa_family_t sin6_family;
    __be16 sin6_port;
    __be32 sin6_flowinfo;
    struct in6_addr sin6_addr;
    uint32_t sin6_scope_id;
    ...;
};
struct sockaddr_storage {
    sa_family_t ss_family;
    ...;
};

/* The system's own, for sleeping on descriptors. */
#define EIO ...
