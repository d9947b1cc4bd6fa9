/* What a program may get wrong, against the real library: each is a code and a word, and none harms the process.
 *
 *     misuse NAMESPACE BODY WORKER_ID
 *
 * NAMESPACE has a worker. Prints "all is well" at the end.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvasir.h"

#define CHECK(what)                                                                        \
    do {                                                                                   \
        if (!(what)) {                                                                     \
            char why[512];                                                                 \
            kvasir_last_error(why, sizeof why);                                            \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #what, why);        \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

#define SAYS(words)                                       \
    do {                                                  \
        char said[512];                                   \
        kvasir_last_error(said, sizeof said);             \
        CHECK(strstr(said, words) != NULL);               \
    } while (0)

static RouterHandles *routers;
static const char *body;
static uint64_t worker;

/* Layout that Rust promises with repr(C), as this compiler has it. */
static void layout(void) {
    CHECK(sizeof(CRoutingResult) == 64 && offsetof(CRoutingResult, prefill_worker_id) == 8);
    CHECK(offsetof(CRoutingResult, token_ids) == 32 && offsetof(CRoutingResult, cache_namespace_len) == 56);
    CHECK(sizeof(QueryRouterResult) == 4 && sizeof(DynamoLlmResult) == 4);
}

static void handles(void) {
    CRoutingResult found;
    RouterHandles *wrong[] = {NULL, (RouterHandles *)1, (RouterHandles *)0xdeadbeef, (RouterHandles *)&found, (RouterHandles *)UINTPTR_MAX};
    for (size_t at = 0; at < sizeof wrong / sizeof *wrong; at++) {
        CHECK(route_decode_request(wrong[at], body, NULL, false, &found) == QUERY_ROUTER_RESULT_ERR_INVALID_HANDLE);
        CHECK(route_prefill_request(wrong[at], body, NULL, &found) == QUERY_ROUTER_RESULT_ERR_INVALID_HANDLE);
        CHECK(add_request(wrong[at], "a", NULL, 0, 1, 0) == QUERY_ROUTER_RESULT_ERR_INVALID_HANDLE);
        CHECK(mark_prefill_complete(wrong[at], "a") == QUERY_ROUTER_RESULT_ERR_INVALID_HANDLE);
        CHECK(free_request(wrong[at], "a") == QUERY_ROUTER_RESULT_ERR_INVALID_HANDLE);
        destroy(wrong[at]);
    }
    SAYS("handle");
}

static void arguments(void) {
    CRoutingResult found;
    uint32_t tokens[32] = {0};
    CHECK(create_routers(NULL, NULL, false, &routers) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    CHECK(create_routers("a", NULL, false, NULL) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    CHECK(create_routers("\xff", NULL, false, &routers) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    SAYS("UTF-8");
    CHECK(route_decode_request(routers, NULL, NULL, false, &found) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    CHECK(route_decode_request(routers, body, NULL, false, NULL) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    CHECK(route_decode_request(routers, body, NULL, false, (CRoutingResult *)((char *)&found + 1)) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    CHECK(route_decode_request(routers, "{", NULL, false, &found) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    SAYS("request_json");
    CHECK(route_decode_request(routers, "{\"model\": \"echo\"}", NULL, false, &found) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    SAYS("messages");
    CHECK(route_decode_request(routers, body, "{}", false, &found) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    SAYS("pods_json");
    CHECK(route_decode_request(routers, body, "[{\"pod\": {\"podName\": \"nobody\"}}]", false, &found) == QUERY_ROUTER_RESULT_ERR_QUERY_FAILED);
    CHECK(route_prefill_request(routers, body, NULL, &found) == QUERY_ROUTER_RESULT_ERR_QUERY_FAILED);
    SAYS("prefill");
    CHECK(add_request(routers, NULL, tokens, 32, worker, 0) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    CHECK(add_request(routers, "a", NULL, 32, worker, 0) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    CHECK(add_request(routers, "a", tokens, SIZE_MAX, worker, 0) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    CHECK(add_request(routers, "a", tokens, 32, worker + 1, 0) == QUERY_ROUTER_RESULT_ERR_QUERY_FAILED);
    CHECK(add_request(routers, "a", tokens, 32, worker, 9) == QUERY_ROUTER_RESULT_ERR_QUERY_FAILED);
    CHECK(add_request_with_cache_namespace(routers, "a", tokens, 32, worker, 0, (const uint8_t *)"\xff", 1) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    CHECK(add_request(routers, "a", tokens, 32, worker, UINT32_MAX) == QUERY_ROUTER_RESULT_OK);
    CHECK(add_request(routers, "a", tokens, 32, worker, 0) == QUERY_ROUTER_RESULT_ERR_INVALID_PARAM);
    SAYS("already exists");
    CHECK(mark_prefill_complete(routers, "a") == QUERY_ROUTER_RESULT_OK && free_request(routers, "a") == QUERY_ROUTER_RESULT_OK);
    CHECK(free_request(routers, "a") == QUERY_ROUTER_RESULT_OK);
    SAYS("Request a not found");
    char one[1];
    CHECK(kvasir_last_error(one, sizeof one) > 0 && one[0] == 0 && kvasir_last_error(NULL, 0) > 0);
}

static void loans(void) {
    CRoutingResult found, copy, nobodys;
    char pods[96];
    snprintf(pods, sizeof pods, "[{\"pod\": {\"workerId\": %llu}}, {\"podName\": \"other\"}]", (unsigned long long)worker);
    CHECK(route_decode_request(routers, body, pods, true, &found) == QUERY_ROUTER_RESULT_OK);
    CHECK(found.is_disaggregated && found.decode_worker_id == worker && found.prefill_worker_id == 0 && found.token_count > 0);
    CHECK(found.cache_namespace == NULL && found.cache_namespace_len == 0);
    copy = found;
    free_routing_result(&found);
    CHECK(found.token_ids == NULL && found.token_count == 0);
    free_routing_result(&found);
    free_routing_result(&copy);
    memset(&nobodys, 0x5a, sizeof nobodys);
    free_routing_result(&nobodys);
    free_routing_result(NULL);
    const char *salted = "{\"model\": \"echo\", \"prompt\": \"Once upon a time\", \"cache_salt\": \"tenant\"}";
    CHECK(route_decode_request(routers, salted, NULL, false, &found) == QUERY_ROUTER_RESULT_OK);
    CHECK(found.cache_namespace_len == 6 && memcmp(found.cache_namespace, "tenant", 6) == 0);
    CHECK(add_request_with_cache_namespace(routers, "s", found.token_ids, found.token_count, worker, 0, found.cache_namespace,
                                           found.cache_namespace_len) == QUERY_ROUTER_RESULT_OK);
    free_request(routers, "s");
    free_routing_result(&found);
}

static void publisher(void) {
    uint32_t tokens[32] = {0};
    uint64_t names[2] = {1, 2};
    size_t sizes[2] = {16, 16};
    CHECK(dynamo_kv_event_publish_removed(1, names, 2) == DYNAMO_LLM_RESULT_ERR);
    CHECK(dynamo_llm_shutdown() == DYNAMO_LLM_RESULT_ERR && kvasir_publisher_worker_id() == 0);
    CHECK(dynamo_llm_init(NULL, NULL, 16) == DYNAMO_LLM_RESULT_ERR);
    CHECK(dynamo_llm_init("elsewhere", NULL, 0) == DYNAMO_LLM_RESULT_ERR);
    SAYS("kv_block_size");
    CHECK(dynamo_llm_init("elsewhere", NULL, 16) == DYNAMO_LLM_RESULT_OK && kvasir_publisher_worker_id() != 0);
    CHECK(dynamo_llm_init("elsewhere", "backend", 16) == DYNAMO_LLM_RESULT_OK);
    CHECK(dynamo_llm_init("elsewhere", NULL, 32) == DYNAMO_LLM_RESULT_ERR);
    CHECK(dynamo_llm_load_publisher_create() == DYNAMO_LLM_RESULT_OK);
    CHECK(dynamo_kv_event_publish_stored(1, tokens, sizes, names, 2, NULL, NULL) == DYNAMO_LLM_RESULT_OK);
    sizes[1] = 3;
    CHECK(dynamo_kv_event_publish_stored(1, tokens, sizes, names, 2, &names[1], "adapter") == DYNAMO_LLM_RESULT_OK);
    CHECK(dynamo_kv_event_publish_stored(1, NULL, sizes, names, 2, NULL, NULL) == DYNAMO_LLM_RESULT_ERR);
    CHECK(dynamo_kv_event_publish_stored(1, tokens, NULL, names, 2, NULL, NULL) == DYNAMO_LLM_RESULT_ERR);
    CHECK(dynamo_kv_event_publish_stored(1, tokens, sizes, names, SIZE_MAX, NULL, NULL) == DYNAMO_LLM_RESULT_ERR);
    CHECK(dynamo_kv_event_publish_stored(1, tokens, sizes, names, 2, NULL, (const char *)7) == DYNAMO_LLM_RESULT_ERR);
    SAYS("not its id");
    CHECK(dynamo_kv_event_publish_removed(1, names, 2) == DYNAMO_LLM_RESULT_OK && kvasir_kv_event_publish_cleared() == DYNAMO_LLM_RESULT_OK);
    CHECK(dynamo_llm_shutdown() == DYNAMO_LLM_RESULT_OK && dynamo_llm_shutdown() == DYNAMO_LLM_RESULT_ERR);
    CHECK(dynamo_kv_event_publish_removed(1, names, 2) == DYNAMO_LLM_RESULT_ERR);
}

/* Asks, books and frees until the handle is destroyed by another thread. */
static void *asks(void *unused) {
    (void)unused;
    char id[64];
    for (unsigned at = 0;; at++) {
        CRoutingResult found;
        QueryRouterResult code = route_decode_request(routers, body, NULL, false, &found);
        if (code == QUERY_ROUTER_RESULT_ERR_INVALID_HANDLE) return NULL;
        CHECK(code == QUERY_ROUTER_RESULT_OK && found.decode_worker_id == worker);
        snprintf(id, sizeof id, "%p-%u", (void *)&found, at);
        code = add_request(routers, id, found.token_ids, found.token_count, worker, 0);
        CHECK(code == QUERY_ROUTER_RESULT_OK || code == QUERY_ROUTER_RESULT_ERR_INVALID_HANDLE);
        free_routing_result(&found);
        mark_prefill_complete(routers, id);
        free_request(routers, id);
    }
}

int main(int count, char **words) {
    CHECK(count == 4 && kvasir_version()[0] != 0);
    const char *namespace = words[1];
    body = words[2];
    worker = strtoull(words[3], NULL, 10);
    layout();
    handles();
    CHECK(create_routers(namespace, NULL, false, &routers) == QUERY_ROUTER_RESULT_OK);
    arguments();
    loans();
    publisher();
    RouterHandles *apart = NULL;
    CHECK(create_routers(namespace, "backend", true, &apart) == QUERY_ROUTER_RESULT_ERR_DISAGG_ENFORCED && apart == NULL);
    SAYS("enforce_disagg");

    pthread_t threads[4];
    for (int at = 0; at < 4; at++) CHECK(pthread_create(&threads[at], NULL, asks, NULL) == 0);
    usleep(200000);
    destroy(routers);
    for (int at = 0; at < 4; at++) CHECK(pthread_join(threads[at], NULL) == 0);
    destroy(routers);
    handles();

    pid_t child = fork();
    if (child == 0) {
        RouterHandles *other = NULL;
        _exit(create_routers(namespace, NULL, false, &other) == QUERY_ROUTER_RESULT_ERR_INIT_FAILED ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    printf("all is well\n");
    return 0;
}
