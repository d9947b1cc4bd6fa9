/* An engine that tells routers what its cache holds, in C.
 *
 *     cc -I bindings/c/include engine.c -lkvasir && ./a.out NAMESPACE COMPONENT WORKER_ID < prompts
 *
 * WORKER_ID is the worker that takes the requests; 0 is this process. Each line of standard input is a prompt's token ids: their full blocks are
 * stored. At the end of input all of them are removed.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvasir.h"

enum { BLOCK = 16, BLOCKS_MAX = 4096 };

static int failed(const char *what) {
    char why[512];
    kvasir_last_error(why, sizeof why);
    fprintf(stderr, "%s: %s\n", what, why);
    return 1;
}

/* An engine's own name of a prefix: any number that is the same for the same tokens. */
static uint64_t name_of(uint64_t before, const uint32_t *tokens) {
    uint64_t name = before ^ UINT64_C(0xcbf29ce484222325);
    for (int at = 0; at < BLOCK; at++) name = (name ^ tokens[at]) * UINT64_C(0x100000001b3);
    return name;
}

int main(int count, char **words) {
    static char line[1 << 20];
    static uint32_t tokens[BLOCKS_MAX * BLOCK];
    static uint64_t names[BLOCKS_MAX];
    static size_t sizes[BLOCKS_MAX];
    if (count != 4) {
        fprintf(stderr, "usage: %s NAMESPACE COMPONENT WORKER_ID\n", words[0]);
        return 2;
    }
    uint64_t worker = strtoull(words[3], NULL, 10);
    if (kvasir_publisher_init(words[1], words[2], "generate", BLOCK, worker, 0) != DYNAMO_LLM_RESULT_OK) {
        return failed("kvasir_publisher_init");
    }
    printf("publishes for worker %" PRIu64 "\n", kvasir_publisher_worker_id());
    fflush(stdout);
    size_t blocks = 0;
    while (fgets(line, sizeof line, stdin) != NULL) {
        size_t read = 0;
        char *next = line, *end;
        for (uint32_t token = strtoul(next, &end, 10); end != next && read < BLOCKS_MAX * BLOCK; token = strtoul(next, &end, 10)) {
            tokens[read++] = token;
            next = end;
        }
        blocks = read / BLOCK;
        for (size_t at = 0; at < blocks; at++) {
            names[at] = name_of(at == 0 ? 0 : names[at - 1], tokens + at * BLOCK);
            sizes[at] = BLOCK;
        }
        if (dynamo_kv_event_publish_stored(0, tokens, sizes, names, blocks, NULL, NULL) != DYNAMO_LLM_RESULT_OK) {
            return failed("dynamo_kv_event_publish_stored");
        }
        printf("stored %zu blocks\n", blocks);
        fflush(stdout);
    }
    if (dynamo_kv_event_publish_removed(0, names, blocks) != DYNAMO_LLM_RESULT_OK) {
        return failed("dynamo_kv_event_publish_removed");
    }
    return dynamo_llm_shutdown() == DYNAMO_LLM_RESULT_OK ? 0 : failed("dynamo_llm_shutdown");
}
