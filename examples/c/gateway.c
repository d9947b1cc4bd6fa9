/* A gateway's own way of sending, in C: ask for the best worker, send there oneself, tell the router how it goes.
 *
 *     cc -I bindings/c/include gateway.c -lkvasir && ./a.out NAMESPACE < bodies
 *
 * Each line of standard input is an OpenAI body for chat or completions.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kvasir.h"

static int failed(const char *what, QueryRouterResult code) {
    char why[512];
    kvasir_last_error(why, sizeof why);
    fprintf(stderr, "%s: code %" PRIu32 ": %s\n", what, code, why);
    return 1;
}

/* Where one request goes, and its life there. */
static int serve(RouterHandles *routers, const char *body, unsigned number) {
    CRoutingResult found;
    QueryRouterResult code = route_decode_request(routers, body, NULL, false, &found);
    if (code != QUERY_ROUTER_RESULT_OK) return failed("route_decode_request", code);

    char id[32];
    snprintf(id, sizeof id, "request-%u", number);
    code = add_request(routers, id, found.token_ids, found.token_count, found.decode_worker_id, found.decode_dp_rank);
    if (code != QUERY_ROUTER_RESULT_OK) {
        free_routing_result(&found);
        return failed("add_request", code);
    }
    printf("worker %" PRIu64 " rank %" PRIu32 " tokens", found.decode_worker_id, found.decode_dp_rank);
    for (size_t at = 0; at < found.token_count; at++) printf(" %" PRIu32, found.token_ids[at]);
    printf("\n");
    fflush(stdout);
    free_routing_result(&found);

    /* Here a gateway sends the request to that worker, and passes its answer on. */
    mark_prefill_complete(routers, id);
    free_request(routers, id);
    return 0;
}

int main(int count, char **words) {
    static char body[1 << 20];
    RouterHandles *routers = NULL;
    QueryRouterResult code = create_routers(count > 1 ? words[1] : "dynamo", NULL, false, &routers);
    if (code != QUERY_ROUTER_RESULT_OK) return failed("create_routers", code);
    int result = 0;
    for (unsigned number = 1; fgets(body, sizeof body, stdin) != NULL; number++) {
        if (strspn(body, " \r\n") != strlen(body)) result |= serve(routers, body, number);
    }
    destroy(routers);
    return result;
}
