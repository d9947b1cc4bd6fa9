/* libkvasir: an engine tells of its cache, a gateway asks which worker a request should go to.
 *
 * Written by `cargo xtask docs` from bindings/c/src/ffi.rs; not to be changed by hand.
 *
 * Any function may be called from any thread. Pointers that are given are read during the call and never kept. What a result points to
 * belongs to the library and is given back with free_routing_result. A handle is looked up and never followed: one that was destroyed is an
 * error code. Where a call fails, kvasir_last_error says why.
 *
 * A process that forks uses the library in the child only if the parent had not begun to.
 */
#ifndef KVASIR_H
#define KVASIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What the publisher's functions answer. */
typedef uint32_t DynamoLlmResult;
enum {
    /* It was done. */
    DYNAMO_LLM_RESULT_OK = 0,
    /* It was not; kvasir_last_error says why. */
    DYNAMO_LLM_RESULT_ERR = 1,
};

/* What the routers' functions answer. */
typedef uint32_t QueryRouterResult;
enum {
    /* It was done. */
    QUERY_ROUTER_RESULT_OK = 0,
    /* The handle was destroyed, or never was one. */
    QUERY_ROUTER_RESULT_ERR_INVALID_HANDLE = 1,
    /* An argument cannot be followed. */
    QUERY_ROUTER_RESULT_ERR_INVALID_PARAM = 2,
    /* The routers cannot be had: an option, the store, or this machine stands in the way. */
    QUERY_ROUTER_RESULT_ERR_INIT_FAILED = 3,
    /* No worker can be named. */
    QUERY_ROUTER_RESULT_ERR_QUERY_FAILED = 4,
    /* Prompts are to be computed apart, and there are no prefill workers. */
    QUERY_ROUTER_RESULT_ERR_DISAGG_ENFORCED = 5,
    /* It took too long. */
    QUERY_ROUTER_RESULT_ERR_TIMEOUT = 6,
    /* All workers have as much as they can take: come again later. */
    QUERY_ROUTER_RESULT_ERR_BACKPRESSURE = 7,
};

/* Stands for the routers of one model. Made by create_routers, ended by destroy; never looked into. */
typedef struct RouterHandles RouterHandles;

/* Where a request should go. Owned by the caller, and what it points to lent until free_routing_result. */
typedef struct CRoutingResult {
    /* Whether the prompt is computed by another worker than the answer. */
    bool is_disaggregated;
    /* The worker for the prompt; 0 unless route_prefill_request was asked. */
    uint64_t prefill_worker_id;
    /* The worker for the answer; 0 unless route_decode_request was asked. */
    uint64_t decode_worker_id;
    /* The data-parallel rank of the first. */
    uint32_t prefill_dp_rank;
    /* The data-parallel rank of the second. */
    uint32_t decode_dp_rank;
    /* The prompt as tokens, for add_request; null if token_count is 0. */
    uint32_t *token_ids;
    /* How many. */
    size_t token_count;
    /* Whose cache the prompt may share, for add_request_with_cache_namespace: UTF-8 without an end, null if there is none. */
    uint8_t *cache_namespace;
    /* How many bytes. */
    size_t cache_namespace_len;
} CRoutingResult;

/* Opens the one publisher of this process, for the worker that this process is. component may be null or empty: "backend". The endpoint is
 * "generate". Planes are those of the environment (DYN_DISCOVERY_BACKEND, DYN_EVENT_PLANE, ...). Again with the same arguments is no mistake.
 *
 * Safety
 * Each text is null or ends with a zero byte.
 */
DynamoLlmResult dynamo_llm_init(const char *namespace_name, const char *component, uint32_t kv_block_size);

/* The same for a worker that another process announced, and for one of its ranks. endpoint may be null or empty: "generate". worker_id 0 is
 * this process itself.
 *
 * Safety
 * Each text is null or ends with a zero byte.
 */
DynamoLlmResult kvasir_publisher_init(const char *namespace_name, const char *component, const char *endpoint, uint32_t kv_block_size, uint64_t worker_id, uint32_t dp_rank);

/* Takes back what the publisher announced, and ends it. */
DynamoLlmResult dynamo_llm_shutdown(void);

/* Does nothing: routers count load by what they book. Kept for programs that call it. */
DynamoLlmResult dynamo_llm_load_publisher_create(void);

/* The id that routers know this process's cache under; 0 if there is no publisher. */
uint64_t kvasir_publisher_worker_id(void);

/* Blocks appeared in the cache, one after the other: num_block_tokens and block_ids have num_blocks entries, token_ids all their tokens.
 * block_ids are the engine's own names. A block that is not full ends what is told. parent_hash names the block before the first one; null
 * if there is none. lora_name may be null. event_id is not used: events are numbered here.
 *
 * Safety
 * Each array has as many entries as said, parent_hash is null or points to a number, lora_name is null or ends with a zero byte.
 */
DynamoLlmResult dynamo_kv_event_publish_stored(uint64_t event_id, const uint32_t *token_ids, const size_t *num_block_tokens, const uint64_t *block_ids, size_t num_blocks, const uint64_t *parent_hash, const char *lora_name);

/* Blocks left the cache.
 *
 * Safety
 * block_ids has num_blocks entries.
 */
DynamoLlmResult dynamo_kv_event_publish_removed(uint64_t event_id, const uint64_t *block_ids, size_t num_blocks);

/* The cache is empty. */
DynamoLlmResult kvasir_kv_event_publish_cleared(void);

/* Makes the routers of the first model in a namespace (or in one whose name begins so), and waits up to two minutes for its first worker.
 * component may be null or empty: any. Settings are those of kvasir frontend, from the environment (DYN_ROUTER_TEMPERATURE,
 * DYN_USE_KV_EVENTS, ...). With enforce_disagg there must be prefill workers. Writes out_handle on success, and nothing else.
 *
 * Safety
 * Each text is null or ends with a zero byte; out_handle is null or may be written.
 */
QueryRouterResult create_routers(const char *namespace_name, const char *component, bool enforce_disagg, RouterHandles **out_handle);

/* The best worker for a request's prompt, where prompts are computed apart. request_json is an OpenAI body, for chat or completions.
 * pods_json may be null: a list of the pods that may be chosen, [{"pod": {"podName": "..."}}]. A question: nothing is booked. Writes
 * out_result on success, and nothing else.
 *
 * Safety
 * Each text is null or ends with a zero byte; out_result is null or may be written.
 */
QueryRouterResult route_prefill_request(RouterHandles *handle, const char *request_json, const char *pods_json, CRoutingResult *out_result);

/* The best worker for a request's answer. With is_disaggregated its prompt is computed elsewhere, and load alone counts; without, all of it
 * is done there. Otherwise as route_prefill_request.
 *
 * Safety
 * Each text is null or ends with a zero byte; out_result is null or may be written.
 */
QueryRouterResult route_decode_request(RouterHandles *handle, const char *request_json, const char *pods_json, bool is_disaggregated, CRoutingResult *out_result);

/* Books a request at the worker that it is sent to, until free_request. dp_rank 4294967295 leaves the rank of a worker that has one open.
 *
 * Safety
 * request_id is null or ends with a zero byte; token_ids has token_count entries.
 */
QueryRouterResult add_request(RouterHandles *handle, const char *request_id, const uint32_t *token_ids, size_t token_count, uint64_t worker_id, uint32_t dp_rank);

/* The same for a prompt that shares a cache with its namespace alone: cache_namespace as CRoutingResult has it.
 *
 * Safety
 * request_id is null or ends with a zero byte; token_ids has token_count entries, cache_namespace cache_namespace_len bytes.
 */
QueryRouterResult add_request_with_cache_namespace(RouterHandles *handle, const char *request_id, const uint32_t *token_ids, size_t token_count, uint64_t worker_id, uint32_t dp_rank, const uint8_t *cache_namespace, size_t cache_namespace_len);

/* The first token of a request came: its prompt is no work any more. A request that is not booked is no mistake, and kvasir_last_error names it.
 *
 * Safety
 * request_id is null or ends with a zero byte.
 */
QueryRouterResult mark_prefill_complete(RouterHandles *handle, const char *request_id);

/* A request ended, however. One that is not booked is no mistake, and kvasir_last_error names it.
 *
 * Safety
 * request_id is null or ends with a zero byte.
 */
QueryRouterResult free_request(RouterHandles *handle, const char *request_id);

/* Gives back what a result points to; the result then points to nothing. Again, or for a result that nobody wrote, nothing happens.
 *
 * Safety
 * result is null or points to a CRoutingResult that may be written.
 */
void free_routing_result(CRoutingResult *result);

/* Ends routers: their bookings go, calls that run go on to their end. A handle that is none is no mistake. */
void destroy(RouterHandles *handle);

/* Why the last call on this thread that failed did: copies at most size bytes of text, the last a zero byte, and says how many the
 * whole text has. Null or 0 asks for its length alone.
 *
 * Safety
 * buffer is null or has size bytes that may be written.
 */
size_t kvasir_last_error(char *buffer, size_t size);

/* The version of this library. Not to be freed. */
const char *kvasir_version(void);

#ifdef __cplusplus
}
#endif

#endif /* KVASIR_H */
