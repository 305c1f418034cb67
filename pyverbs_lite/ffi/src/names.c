/*
 * Names for types that C leaves without one.
 *
 * Where an unnamed struct or union holds a struct whose size we leave to the compiler, cffi needs a name to ask the
 * compiler about it.
 */
typedef __typeof__(((struct ibv_send_wr *)0)->bind_mw) pvl_bind_mw;
typedef __typeof__(((struct rdma_addr *)0)->addr) pvl_ib_addr;
typedef __typeof__(((struct rdma_cm_event *)0)->param) pvl_cm_event_param;
