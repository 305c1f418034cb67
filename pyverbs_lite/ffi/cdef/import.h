/* Objects of another process, by its command descriptor and their handles. */
//: since 31 IMPORT_DEVICE ibv_import_device
struct ibv_context *ibv_import_device(int cmd_fd);
struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t pd_handle);
void ibv_unimport_pd(struct ibv_pd *pd);
struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t mr_handle);
void ibv_unimport_mr(struct ibv_mr *mr);
//: end

//: since 35 IMPORT_DM ibv_import_dm
enum ibv_dm_mask { IBV_DM_MASK_HANDLE, ... };
struct ibv_dm *ibv_import_dm(struct ibv_context *context, uint32_t dm_handle);
void ibv_unimport_dm(struct ibv_dm *dm);
//: end
