/* Flow actions: IPsec ESP in the device. In C most of these names are macros for the kernel's own. */
enum ibv_flow_action_esp_mask { IBV_FLOW_ACTION_ESP_MASK_ESN, ... };
enum ibv_flow_action_esp_keymat { IBV_FLOW_ACTION_ESP_KEYMAT_AES_GCM, ... };
enum ibv_flow_action_esp_keymat_aes_gcm_iv_algo { IBV_FLOW_ACTION_IV_ALGO_SEQ, ... };
enum ibv_flow_action_esp_replay {
    IBV_FLOW_ACTION_ESP_REPLAY_NONE, IBV_FLOW_ACTION_ESP_REPLAY_BMP, ...
};
enum ibv_flow_action_esp_flags {
    IBV_FLOW_ACTION_ESP_FLAGS_INLINE_CRYPTO, IBV_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD,
    IBV_FLOW_ACTION_ESP_FLAGS_TUNNEL, IBV_FLOW_ACTION_ESP_FLAGS_TRANSPORT,
    IBV_FLOW_ACTION_ESP_FLAGS_DECRYPT, IBV_FLOW_ACTION_ESP_FLAGS_ENCRYPT,
    IBV_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW, ...
};

struct ibv_flow_action_esp_keymat_aes_gcm {
    uint64_t iv;
    uint32_t iv_algo;
    uint32_t salt;
    uint32_t icv_len;
    uint32_t key_len;
    uint32_t aes_key[8];
    ...;
};
struct ibv_flow_action_esp_replay_bmp {
    uint32_t size;
    ...;
};
struct ibv_flow_action_esp_encap {
    union {
        void *val_ptr;
        uint64_t val_ptr_data_u64;
    };
    union {
        struct ibv_flow_action_esp_encap *next_ptr;
        uint64_t next_ptr_data_u64;
    };
    uint16_t len;
    uint16_t type;
    ...;
};
struct ibv_flow_action_esp {
    uint32_t spi;
    uint32_t seq;
    uint32_t tfc_pad;
    uint32_t flags;
    uint64_t hard_limit_pkts;
    ...;
};
struct ibv_flow_action_esp_attr {
    struct ibv_flow_action_esp *esp_attr;
    enum ibv_flow_action_esp_keymat keymat_proto;
    uint16_t keymat_len;
    void *keymat_ptr;
    enum ibv_flow_action_esp_replay replay_proto;
    uint16_t replay_len;
    void *replay_ptr;
    struct ibv_flow_action_esp_encap *esp_encap;
    uint32_t comp_mask;
    uint32_t esn;
    ...;
};
struct ibv_flow_action {
    struct ibv_context *context;
    ...;
};

struct ibv_flow_action *ibv_create_flow_action_esp(struct ibv_context *ctx,
                                                   struct ibv_flow_action_esp_attr *esp);
int ibv_modify_flow_action_esp(struct ibv_flow_action *action, struct ibv_flow_action_esp_attr *esp);
int ibv_destroy_flow_action(struct ibv_flow_action *action);
