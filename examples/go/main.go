// A gateway in Go asks libkvasir for the best worker of one request.
//
//	CGO_CFLAGS=-I.../bindings/c/include CGO_LDFLAGS=-L.../target/release go run main.go NAMESPACE BODY
package main

/*
#cgo LDFLAGS: -lkvasir
#include <stdlib.h>
#include "kvasir.h"
*/
import "C"

import (
	"os"
	"strconv"
	"unsafe"
)

// lastError is what the library says of the call that failed on this thread.
func lastError() string {
	var why [512]C.char
	C.kvasir_last_error(&why[0], C.size_t(len(why)))
	return C.GoString(&why[0])
}

func fail(what string, code C.QueryRouterResult) {
	os.Stderr.WriteString(what + ": code " + strconv.Itoa(int(code)) + ": " + lastError() + "\n")
	os.Exit(1)
}

func main() {
	namespace, body, id := C.CString(os.Args[1]), C.CString(os.Args[2]), C.CString("request-1")
	for _, text := range []*C.char{namespace, body, id} {
		defer C.free(unsafe.Pointer(text))
	}
	var routers *C.RouterHandles
	if code := C.create_routers(namespace, nil, false, &routers); code != C.QUERY_ROUTER_RESULT_OK {
		fail("create_routers", code)
	}
	defer C.destroy(routers)

	var found C.CRoutingResult
	if code := C.route_decode_request(routers, body, nil, false, &found); code != C.QUERY_ROUTER_RESULT_OK {
		fail("route_decode_request", code)
	}
	defer C.free_routing_result(&found)
	worker, rank := found.decode_worker_id, found.decode_dp_rank
	if code := C.add_request(routers, id, found.token_ids, found.token_count, worker, rank); code != C.QUERY_ROUTER_RESULT_OK {
		fail("add_request", code)
	}
	os.Stdout.WriteString("worker " + strconv.FormatUint(uint64(worker), 10) + " tokens " + strconv.Itoa(int(found.token_count)) + "\n")

	// Here a gateway sends the request to that worker, and passes its answer on.
	C.mark_prefill_complete(routers, id)
	C.free_request(routers, id)
}
