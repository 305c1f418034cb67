"""Types of the compiled module; written by ``python build_verbs.py --stub``, never by hand."""

from typing import Any, Final

class CData:
    """A C value: a pointer, a struct, a union or an array."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...
    def __add__(self, offset: int) -> CData: ...
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> CData: ...
    def __exit__(self, *exc: object) -> None: ...

class FFI:
    """The module's ``ffi``: makes, reads and casts C data."""

    NULL: Final[CData]
    errno: int
    def new(self, cdecl: str | Any, init: Any = ...) -> CData: ...
    def cast(self, cdecl: str | Any, source: Any) -> CData: ...
    def from_buffer(self, cdecl: Any, python_buffer: Any = ..., require_writable: bool = ...) -> CData: ...
    def buffer(self, cdata: CData, size: int = ...) -> Any: ...
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    def unpack(self, cdata: CData, length: int) -> Any: ...
    def memmove(self, dest: Any, src: Any, n: int) -> None: ...
    def gc(self, cdata: CData, destructor: Any) -> CData: ...
    def release(self, cdata: CData) -> None: ...
    def sizeof(self, cdecl: Any) -> int: ...
    def typeof(self, cdecl: Any) -> Any: ...
    def addressof(self, cdata: Any, *fields: str | int) -> CData: ...
    def list_types(self) -> tuple[list[str], list[str], list[str]]: ...

class Lib:
    """The module's ``lib``: functions and constants under their C names."""

    EIO: Final[int]
    IBV_ACCESS_HUGETLB: Final[int]
    IBV_ACCESS_LOCAL_WRITE: Final[int]
    IBV_ACCESS_MW_BIND: Final[int]
    IBV_ACCESS_ON_DEMAND: Final[int]
    IBV_ACCESS_RELAXED_ORDERING: Final[int]
    IBV_ACCESS_REMOTE_ATOMIC: Final[int]
    IBV_ACCESS_REMOTE_READ: Final[int]
    IBV_ACCESS_REMOTE_WRITE: Final[int]
    IBV_ACCESS_ZERO_BASED: Final[int]
    IBV_ATOMIC_GLOB: Final[int]
    IBV_ATOMIC_HCA: Final[int]
    IBV_ATOMIC_NONE: Final[int]
    IBV_DEVICE_AUTO_PATH_MIG: Final[int]
    IBV_DEVICE_BAD_PKEY_CNTR: Final[int]
    IBV_DEVICE_BAD_QKEY_CNTR: Final[int]
    IBV_DEVICE_CHANGE_PHY_PORT: Final[int]
    IBV_DEVICE_CURR_QP_STATE_MOD: Final[int]
    IBV_DEVICE_INIT_TYPE: Final[int]
    IBV_DEVICE_MANAGED_FLOW_STEERING: Final[int]
    IBV_DEVICE_MEM_MGT_EXTENSIONS: Final[int]
    IBV_DEVICE_MEM_WINDOW: Final[int]
    IBV_DEVICE_MEM_WINDOW_TYPE_2A: Final[int]
    IBV_DEVICE_MEM_WINDOW_TYPE_2B: Final[int]
    IBV_DEVICE_N_NOTIFY_CQ: Final[int]
    IBV_DEVICE_PORT_ACTIVE_EVENT: Final[int]
    IBV_DEVICE_RAW_IP_CSUM: Final[int]
    IBV_DEVICE_RAW_MULTI: Final[int]
    IBV_DEVICE_RC_IP_CSUM: Final[int]
    IBV_DEVICE_RC_RNR_NAK_GEN: Final[int]
    IBV_DEVICE_RESIZE_MAX_WR: Final[int]
    IBV_DEVICE_SHUTDOWN_PORT: Final[int]
    IBV_DEVICE_SRQ_RESIZE: Final[int]
    IBV_DEVICE_SYS_IMAGE_GUID: Final[int]
    IBV_DEVICE_UD_AV_PORT_ENFORCE: Final[int]
    IBV_DEVICE_UD_IP_CSUM: Final[int]
    IBV_DEVICE_XRC: Final[int]
    IBV_EVENT_CLIENT_REREGISTER: Final[int]
    IBV_EVENT_COMM_EST: Final[int]
    IBV_EVENT_CQ_ERR: Final[int]
    IBV_EVENT_DEVICE_FATAL: Final[int]
    IBV_EVENT_GID_CHANGE: Final[int]
    IBV_EVENT_LID_CHANGE: Final[int]
    IBV_EVENT_PATH_MIG: Final[int]
    IBV_EVENT_PATH_MIG_ERR: Final[int]
    IBV_EVENT_PKEY_CHANGE: Final[int]
    IBV_EVENT_PORT_ACTIVE: Final[int]
    IBV_EVENT_PORT_ERR: Final[int]
    IBV_EVENT_QP_ACCESS_ERR: Final[int]
    IBV_EVENT_QP_FATAL: Final[int]
    IBV_EVENT_QP_LAST_WQE_REACHED: Final[int]
    IBV_EVENT_QP_REQ_ERR: Final[int]
    IBV_EVENT_SM_CHANGE: Final[int]
    IBV_EVENT_SQ_DRAINED: Final[int]
    IBV_EVENT_SRQ_ERR: Final[int]
    IBV_EVENT_SRQ_LIMIT_REACHED: Final[int]
    IBV_EVENT_WQ_FATAL: Final[int]
    IBV_GID_TYPE_IB: Final[int]
    IBV_GID_TYPE_ROCE_V1: Final[int]
    IBV_GID_TYPE_ROCE_V2: Final[int]
    IBV_LINK_LAYER_ETHERNET: Final[int]
    IBV_LINK_LAYER_INFINIBAND: Final[int]
    IBV_LINK_LAYER_UNSPECIFIED: Final[int]
    IBV_MIG_ARMED: Final[int]
    IBV_MIG_MIGRATED: Final[int]
    IBV_MIG_REARM: Final[int]
    IBV_MTU_1024: Final[int]
    IBV_MTU_2048: Final[int]
    IBV_MTU_256: Final[int]
    IBV_MTU_4096: Final[int]
    IBV_MTU_512: Final[int]
    IBV_NODE_CA: Final[int]
    IBV_NODE_RNIC: Final[int]
    IBV_NODE_ROUTER: Final[int]
    IBV_NODE_SWITCH: Final[int]
    IBV_NODE_UNKNOWN: Final[int]
    IBV_NODE_UNSPECIFIED: Final[int]
    IBV_NODE_USNIC: Final[int]
    IBV_NODE_USNIC_UDP: Final[int]
    IBV_PORT_ACTIVE: Final[int]
    IBV_PORT_ACTIVE_DEFER: Final[int]
    IBV_PORT_ARMED: Final[int]
    IBV_PORT_DOWN: Final[int]
    IBV_PORT_INIT: Final[int]
    IBV_PORT_NOP: Final[int]
    IBV_QPF_GRH_REQUIRED: Final[int]
    IBV_QPS_ERR: Final[int]
    IBV_QPS_INIT: Final[int]
    IBV_QPS_RESET: Final[int]
    IBV_QPS_RTR: Final[int]
    IBV_QPS_RTS: Final[int]
    IBV_QPS_SQD: Final[int]
    IBV_QPS_SQE: Final[int]
    IBV_QPS_UNKNOWN: Final[int]
    IBV_QPT_DRIVER: Final[int]
    IBV_QPT_RAW_PACKET: Final[int]
    IBV_QPT_RC: Final[int]
    IBV_QPT_UC: Final[int]
    IBV_QPT_UD: Final[int]
    IBV_QPT_XRC_RECV: Final[int]
    IBV_QPT_XRC_SEND: Final[int]
    IBV_QP_ACCESS_FLAGS: Final[int]
    IBV_QP_ALT_PATH: Final[int]
    IBV_QP_AV: Final[int]
    IBV_QP_CAP: Final[int]
    IBV_QP_CUR_STATE: Final[int]
    IBV_QP_DEST_QPN: Final[int]
    IBV_QP_EN_SQD_ASYNC_NOTIFY: Final[int]
    IBV_QP_MAX_DEST_RD_ATOMIC: Final[int]
    IBV_QP_MAX_QP_RD_ATOMIC: Final[int]
    IBV_QP_MIN_RNR_TIMER: Final[int]
    IBV_QP_PATH_MIG_STATE: Final[int]
    IBV_QP_PATH_MTU: Final[int]
    IBV_QP_PKEY_INDEX: Final[int]
    IBV_QP_PORT: Final[int]
    IBV_QP_QKEY: Final[int]
    IBV_QP_RATE_LIMIT: Final[int]
    IBV_QP_RETRY_CNT: Final[int]
    IBV_QP_RNR_RETRY: Final[int]
    IBV_QP_RQ_PSN: Final[int]
    IBV_QP_SQ_PSN: Final[int]
    IBV_QP_STATE: Final[int]
    IBV_QP_TIMEOUT: Final[int]
    IBV_SEND_FENCE: Final[int]
    IBV_SEND_INLINE: Final[int]
    IBV_SEND_IP_CSUM: Final[int]
    IBV_SEND_SIGNALED: Final[int]
    IBV_SEND_SOLICITED: Final[int]
    IBV_TRANSPORT_IB: Final[int]
    IBV_TRANSPORT_IWARP: Final[int]
    IBV_TRANSPORT_UNKNOWN: Final[int]
    IBV_TRANSPORT_UNSPECIFIED: Final[int]
    IBV_TRANSPORT_USNIC: Final[int]
    IBV_TRANSPORT_USNIC_UDP: Final[int]
    IBV_WC_BAD_RESP_ERR: Final[int]
    IBV_WC_BIND_MW: Final[int]
    IBV_WC_COMP_SWAP: Final[int]
    IBV_WC_DRIVER1: Final[int]
    IBV_WC_FATAL_ERR: Final[int]
    IBV_WC_FETCH_ADD: Final[int]
    IBV_WC_GENERAL_ERR: Final[int]
    IBV_WC_GRH: Final[int]
    IBV_WC_INV_EECN_ERR: Final[int]
    IBV_WC_INV_EEC_STATE_ERR: Final[int]
    IBV_WC_IP_CSUM_OK: Final[int]
    IBV_WC_LOCAL_INV: Final[int]
    IBV_WC_LOC_ACCESS_ERR: Final[int]
    IBV_WC_LOC_EEC_OP_ERR: Final[int]
    IBV_WC_LOC_LEN_ERR: Final[int]
    IBV_WC_LOC_PROT_ERR: Final[int]
    IBV_WC_LOC_QP_OP_ERR: Final[int]
    IBV_WC_LOC_RDD_VIOL_ERR: Final[int]
    IBV_WC_MW_BIND_ERR: Final[int]
    IBV_WC_RDMA_READ: Final[int]
    IBV_WC_RDMA_WRITE: Final[int]
    IBV_WC_RECV: Final[int]
    IBV_WC_RECV_RDMA_WITH_IMM: Final[int]
    IBV_WC_REM_ABORT_ERR: Final[int]
    IBV_WC_REM_ACCESS_ERR: Final[int]
    IBV_WC_REM_INV_RD_REQ_ERR: Final[int]
    IBV_WC_REM_INV_REQ_ERR: Final[int]
    IBV_WC_REM_OP_ERR: Final[int]
    IBV_WC_RESP_TIMEOUT_ERR: Final[int]
    IBV_WC_RETRY_EXC_ERR: Final[int]
    IBV_WC_RNR_RETRY_EXC_ERR: Final[int]
    IBV_WC_SEND: Final[int]
    IBV_WC_SUCCESS: Final[int]
    IBV_WC_TM_ADD: Final[int]
    IBV_WC_TM_DATA_VALID: Final[int]
    IBV_WC_TM_DEL: Final[int]
    IBV_WC_TM_ERR: Final[int]
    IBV_WC_TM_MATCH: Final[int]
    IBV_WC_TM_NO_TAG: Final[int]
    IBV_WC_TM_RECV: Final[int]
    IBV_WC_TM_RNDV_INCOMPLETE: Final[int]
    IBV_WC_TM_SYNC: Final[int]
    IBV_WC_TM_SYNC_REQ: Final[int]
    IBV_WC_TSO: Final[int]
    IBV_WC_WITH_IMM: Final[int]
    IBV_WC_WITH_INV: Final[int]
    IBV_WC_WR_FLUSH_ERR: Final[int]
    IBV_WR_ATOMIC_CMP_AND_SWP: Final[int]
    IBV_WR_ATOMIC_FETCH_AND_ADD: Final[int]
    IBV_WR_BIND_MW: Final[int]
    IBV_WR_DRIVER1: Final[int]
    IBV_WR_LOCAL_INV: Final[int]
    IBV_WR_RDMA_READ: Final[int]
    IBV_WR_RDMA_WRITE: Final[int]
    IBV_WR_RDMA_WRITE_WITH_IMM: Final[int]
    IBV_WR_SEND: Final[int]
    IBV_WR_SEND_WITH_IMM: Final[int]
    IBV_WR_SEND_WITH_INV: Final[int]
    IBV_WR_TSO: Final[int]
    PVL_FREE: Final[int]
    PVL_HAS_GID_TABLE: Final[int]
    PVL_PENDING: Final[int]
    PVL_WOKE_PEER: Final[int]
    PVL_WOKE_SIGNAL: Final[int]
    PVL_WOKE_TIMEOUT: Final[int]
    RDMA_PS_IB: Final[int]
    RDMA_PS_IPOIB: Final[int]
    RDMA_PS_TCP: Final[int]
    RDMA_PS_UDP: Final[int]
    def ibv_ack_cq_events(self, a0: CData, a1: int, /) -> None: ...
    def ibv_alloc_pd(self, a0: CData, /) -> CData: ...
    def ibv_close_device(self, a0: CData, /) -> int: ...
    def ibv_create_comp_channel(self, a0: CData, /) -> CData: ...
    def ibv_create_cq(self, a0: CData, a1: int, a2: CData, a3: CData, a4: int, /) -> CData: ...
    def ibv_create_qp(self, a0: CData, a1: CData, /) -> CData: ...
    def ibv_dealloc_pd(self, a0: CData, /) -> int: ...
    def ibv_dereg_mr(self, a0: CData, /) -> int: ...
    def ibv_destroy_comp_channel(self, a0: CData, /) -> int: ...
    def ibv_destroy_cq(self, a0: CData, /) -> int: ...
    def ibv_destroy_qp(self, a0: CData, /) -> int: ...
    def ibv_event_type_str(self, a0: int, /) -> CData: ...
    def ibv_fork_init(self) -> int: ...
    def ibv_free_device_list(self, a0: CData, /) -> None: ...
    def ibv_get_cq_event(self, a0: CData, a1: CData, a2: CData, /) -> int: ...
    def ibv_get_device_guid(self, a0: CData, /) -> int: ...
    def ibv_get_device_list(self, a0: CData, /) -> CData: ...
    def ibv_get_device_name(self, a0: CData, /) -> CData: ...
    def ibv_modify_qp(self, a0: CData, a1: CData, a2: int, /) -> int: ...
    def ibv_node_type_str(self, a0: int, /) -> CData: ...
    def ibv_open_device(self, a0: CData, /) -> CData: ...
    def ibv_poll_cq(self, a0: CData, a1: int, a2: CData, /) -> int: ...
    def ibv_port_state_str(self, a0: int, /) -> CData: ...
    def ibv_post_recv(self, a0: CData, a1: CData, a2: CData, /) -> int: ...
    def ibv_post_send(self, a0: CData, a1: CData, a2: CData, /) -> int: ...
    def ibv_query_device(self, a0: CData, a1: CData, /) -> int: ...
    def ibv_query_gid(self, a0: CData, a1: int, a2: int, a3: CData, /) -> int: ...
    def ibv_query_gid_ex(self, a0: CData, a1: int, a2: int, a3: CData, a4: int, /) -> int: ...
    def ibv_query_gid_table(self, a0: CData, a1: CData, a2: int, a3: int, /) -> int: ...
    def ibv_query_pkey(self, a0: CData, a1: int, a2: int, a3: CData, /) -> int: ...
    def ibv_query_port(self, a0: CData, a1: int, a2: CData, /) -> int: ...
    def ibv_query_qp(self, a0: CData, a1: CData, a2: int, a3: CData, /) -> int: ...
    def ibv_reg_mr(self, a0: CData, a1: CData, a2: int, a3: int, /) -> CData: ...
    def ibv_req_notify_cq(self, a0: CData, a1: int, /) -> int: ...
    def ibv_wc_status_str(self, a0: int, /) -> CData: ...
    def pvl_engine_free(self, a0: CData, /) -> None: ...
    def pvl_engine_new(self, a0: CData, a1: CData, a2: CData, a3: int, a4: int, /) -> CData: ...
    def pvl_post_recv(self, a0: CData, a1: int, /) -> int: ...
    def pvl_post_send(self, a0: CData, a1: int, a2: int, a3: int, a4: int, a5: int, a6: int, a7: int, a8: int, a9: int, a10: int, a11: int, /) -> int: ...
    def pvl_progress(self, a0: CData, a1: int, a2: int, /) -> int: ...
    def pvl_set_nonblocking(self, a0: int, /) -> int: ...
    def pvl_take_arrival(self, a0: CData, /) -> int: ...
    def pvl_wait(self, a0: CData, a1: CData, a2: int, a3: CData, a4: int, a5: int, a6: int, a7: CData, a8: CData, /) -> int: ...
    def rdma_create_event_channel(self) -> CData: ...
    def rdma_create_id(self, a0: CData, a1: CData, a2: CData, a3: int, /) -> int: ...
    def rdma_destroy_event_channel(self, a0: CData, /) -> None: ...
    def rdma_destroy_id(self, a0: CData, /) -> int: ...

ffi: Final[FFI]
lib: Final[Lib]
