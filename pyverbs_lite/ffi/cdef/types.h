/* Linux byte-order typedefs: the value in memory is big-endian. */
typedef uint16_t __be16;
typedef uint32_t __be32;
typedef uint64_t __be64;

/* The system's own, for sleeping on descriptors. */
#define EIO ...
