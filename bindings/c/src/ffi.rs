//! The functions that C calls. `include/kvasir.h` is written from this file.
//!
//! What always holds, and makes the `unsafe` here sound as far as a library can: pointers to text and arrays are read during the call and
//! never kept; null, an address that does not fit the type, an array of impossible length and text that is not UTF-8 are error codes;
//! handles are numbers that are looked up and never followed; memory that is lent is remembered, and freed once. What stays with the
//! caller: a pointer that is not null points to as much as the header says, and an `out` pointer to memory that may be written.

#![expect(
    unsafe_code,
    reason = "the boundary: exported names, and pointers of callers"
)]

mod codes;
mod pointers;

use std::ffi::c_char;
use std::sync::Arc;

use kvasir_discovery::EndpointName;

use self::codes::{asked, caught, told};
use self::pointers::{array, check_out, json, name_or, pods, text};
use crate::handles::Handles;
use crate::loans::Loans;
use crate::publisher::{self, PublisherSpec};
use crate::routers::{BookedPrompt, Routed, RouterFailure, Routers};
use crate::said;

/// No text lies at an address below this: programs of older libraries give a number where newer ones give a name.
const LOWEST_ADDRESS: usize = 4096;
/// What a component is called where none is named.
const COMPONENT: &str = "backend";
/// What an endpoint is called where none is named.
const ENDPOINT: &str = "generate";

static ROUTERS: Handles<Routers> = Handles::new();
static LENT: Loans = Loans::new();

/// What the publisher's functions answer.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DynamoLlmResult {
    /// It was done.
    Ok = 0,
    /// It was not; kvasir_last_error says why.
    Err = 1,
}

/// What the routers' functions answer.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryRouterResult {
    /// It was done.
    Ok = 0,
    /// The handle was destroyed, or never was one.
    ErrInvalidHandle = 1,
    /// An argument cannot be followed.
    ErrInvalidParam = 2,
    /// The routers cannot be had: an option, the store, or this machine stands in the way.
    ErrInitFailed = 3,
    /// No worker can be named.
    ErrQueryFailed = 4,
    /// Prompts are to be computed apart, and there are no prefill workers.
    ErrDisaggEnforced = 5,
    /// It took too long.
    ErrTimeout = 6,
    /// All workers have as much as they can take: come again later.
    ErrBackpressure = 7,
}

/// Stands for the routers of one model. Made by create_routers, ended by destroy; never looked into.
#[repr(C)]
pub struct RouterHandles {
    _opaque: [u8; 0],
}

/// Where a request should go. Owned by the caller, and what it points to lent until free_routing_result.
#[repr(C)]
#[derive(Debug)]
pub struct CRoutingResult {
    /// Whether the prompt is computed by another worker than the answer.
    pub is_disaggregated: bool,
    /// The worker for the prompt; 0 unless route_prefill_request was asked.
    pub prefill_worker_id: u64,
    /// The worker for the answer; 0 unless route_decode_request was asked.
    pub decode_worker_id: u64,
    /// The data-parallel rank of the first.
    pub prefill_dp_rank: u32,
    /// The data-parallel rank of the second.
    pub decode_dp_rank: u32,
    /// The prompt as tokens, for add_request; null if token_count is 0.
    pub token_ids: *mut u32,
    /// How many.
    pub token_count: usize,
    /// Whose cache the prompt may share, for add_request_with_cache_namespace: UTF-8 without an end, null if there is none.
    pub cache_namespace: *mut u8,
    /// How many bytes.
    pub cache_namespace_len: usize,
}

/// Opens the one publisher of this process, for the worker that this process is. component may be null or empty: "backend". The endpoint is
/// "generate". Planes are those of the environment (DYN_DISCOVERY_BACKEND, DYN_EVENT_PLANE, ...). Again with the same arguments is no mistake.
///
/// # Safety
/// Each text is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dynamo_llm_init(
    namespace_name: *const c_char,
    component: *const c_char,
    kv_block_size: u32,
) -> DynamoLlmResult {
    // SAFETY: what this function asks of its caller is what the other one does.
    unsafe {
        kvasir_publisher_init(
            namespace_name,
            component,
            std::ptr::null(),
            kv_block_size,
            0,
            0,
        )
    }
}

/// The same for a worker that another process announced, and for one of its ranks. endpoint may be null or empty: "generate". worker_id 0 is
/// this process itself.
///
/// # Safety
/// Each text is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_publisher_init(
    namespace_name: *const c_char,
    component: *const c_char,
    endpoint: *const c_char,
    kv_block_size: u32,
    worker_id: u64,
    dp_rank: u32,
) -> DynamoLlmResult {
    told(|| {
        // SAFETY: asked of the caller.
        let (namespace, component, endpoint) = unsafe {
            (
                text("namespace_name", namespace_name)?,
                name_or("component", component, COMPONENT)?,
                name_or("endpoint", endpoint, ENDPOINT)?,
            )
        };
        publisher::open(PublisherSpec {
            endpoint: EndpointName::new(namespace, component, endpoint),
            block_size: kv_block_size,
            worker: (worker_id != 0).then_some(worker_id),
            rank: dp_rank,
        })
    })
}

/// Takes back what the publisher announced, and ends it.
#[unsafe(no_mangle)]
pub extern "C" fn dynamo_llm_shutdown() -> DynamoLlmResult {
    told(|| match publisher::close() {
        true => Ok(()),
        false => Err("there is no publisher to end".into()),
    })
}

/// Does nothing: routers count load by what they book. Kept for programs that call it.
#[unsafe(no_mangle)]
pub extern "C" fn dynamo_llm_load_publisher_create() -> DynamoLlmResult {
    DynamoLlmResult::Ok
}

/// The id that routers know this process's cache under; 0 if there is no publisher.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_publisher_worker_id() -> u64 {
    caught(0, || publisher::get().map_or(0, |known| known.worker_id()))
}

/// Blocks appeared in the cache, one after the other: num_block_tokens and block_ids have num_blocks entries, token_ids all their tokens.
/// block_ids are the engine's own names. A block that is not full ends what is told. parent_hash names the block before the first one; null
/// if there is none. lora_name may be null. event_id is not used: events are numbered here.
///
/// # Safety
/// Each array has as many entries as said, parent_hash is null or points to a number, lora_name is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dynamo_kv_event_publish_stored(
    event_id: u64,
    token_ids: *const u32,
    num_block_tokens: *const usize,
    block_ids: *const u64,
    num_blocks: usize,
    parent_hash: *const u64,
    lora_name: *const c_char,
) -> DynamoLlmResult {
    let _ = event_id;
    told(|| {
        let known = publisher::get()?;
        if (1..LOWEST_ADDRESS).contains(&lora_name.addr()) {
            return Err(
                "lora_name is a small number: this library takes an adapter's name, not its id"
                    .into(),
            );
        }
        let block = known.block_size() as usize;
        // SAFETY: asked of the caller.
        let (sizes, names, parent, lora) = unsafe {
            (
                array("num_block_tokens", num_block_tokens, num_blocks)?,
                array("block_ids", block_ids, num_blocks)?,
                array(
                    "parent_hash",
                    parent_hash,
                    usize::from(!parent_hash.is_null()),
                )?,
                name_or("lora_name", lora_name, "")?,
            )
        };
        let full = sizes.iter().take_while(|size| **size == block).count();
        // SAFETY: asked of the caller: these are the tokens of full blocks, and all blocks have theirs.
        let tokens = unsafe { array("token_ids", token_ids, full.saturating_mul(block))? };
        let names = names.get(..full).unwrap_or(names);
        known.stored(tokens, names, parent.first().copied(), lora);
        Ok(())
    })
}

/// Blocks left the cache.
///
/// # Safety
/// block_ids has num_blocks entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dynamo_kv_event_publish_removed(
    event_id: u64,
    block_ids: *const u64,
    num_blocks: usize,
) -> DynamoLlmResult {
    let _ = event_id;
    told(|| {
        let known = publisher::get()?;
        // SAFETY: asked of the caller.
        known.removed(unsafe { array("block_ids", block_ids, num_blocks)? });
        Ok(())
    })
}

/// The cache is empty.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_event_publish_cleared() -> DynamoLlmResult {
    told(|| {
        publisher::get()?.cleared();
        Ok(())
    })
}

/// Makes the routers of the first model in a namespace (or in one whose name begins so), and waits up to two minutes for its first worker.
/// component may be null or empty: any. Settings are those of kvasir frontend, from the environment (DYN_ROUTER_TEMPERATURE,
/// DYN_USE_KV_EVENTS, ...). With enforce_disagg there must be prefill workers. Writes out_handle on success, and nothing else.
///
/// # Safety
/// Each text is null or ends with a zero byte; out_handle is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn create_routers(
    namespace_name: *const c_char,
    component: *const c_char,
    enforce_disagg: bool,
    out_handle: *mut *mut RouterHandles,
) -> QueryRouterResult {
    asked(|| {
        check_out("out_handle", out_handle)?;
        // SAFETY: asked of the caller.
        let (namespace, component) = unsafe {
            (
                text("namespace_name", namespace_name).map_err(RouterFailure::InvalidParam)?,
                name_or("component", component, "").map_err(RouterFailure::InvalidParam)?,
            )
        };
        let component = (!component.is_empty()).then_some(component);
        let routers = Routers::open(namespace, component, enforce_disagg)?;
        let handle = ROUTERS.put(routers);
        // SAFETY: not null and aligned, by the check above; that it may be written is asked of the caller.
        unsafe { out_handle.write(std::ptr::without_provenance_mut(handle as usize)) };
        Ok(())
    })
}

/// The best worker for a request's prompt, where prompts are computed apart. request_json is an OpenAI body, for chat or completions.
/// pods_json may be null: a list of the pods that may be chosen, [{"pod": {"podName": "..."}}]. A question: nothing is booked. Writes
/// out_result on success, and nothing else.
///
/// # Safety
/// Each text is null or ends with a zero byte; out_result is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn route_prefill_request(
    handle: *mut RouterHandles,
    request_json: *const c_char,
    pods_json: *const c_char,
    out_result: *mut CRoutingResult,
) -> QueryRouterResult {
    asked(|| {
        check_out("out_result", out_result)?;
        let routers = behind(handle)?;
        // SAFETY: asked of the caller.
        let (body, pods) = unsafe { (json("request_json", request_json)?, pods(pods_json)?) };
        let routed = routers.route_prefill(body, pods)?;
        let mut result = lend(routed, true);
        std::mem::swap(&mut result.prefill_worker_id, &mut result.decode_worker_id);
        std::mem::swap(&mut result.prefill_dp_rank, &mut result.decode_dp_rank);
        // SAFETY: not null and aligned, by the check above; that it may be written is asked of the caller.
        unsafe { out_result.write(result) };
        Ok(())
    })
}

/// The best worker for a request's answer. With is_disaggregated its prompt is computed elsewhere, and load alone counts; without, all of it
/// is done there. Otherwise as route_prefill_request.
///
/// # Safety
/// Each text is null or ends with a zero byte; out_result is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn route_decode_request(
    handle: *mut RouterHandles,
    request_json: *const c_char,
    pods_json: *const c_char,
    is_disaggregated: bool,
    out_result: *mut CRoutingResult,
) -> QueryRouterResult {
    asked(|| {
        check_out("out_result", out_result)?;
        let routers = behind(handle)?;
        // SAFETY: asked of the caller.
        let (body, pods) = unsafe { (json("request_json", request_json)?, pods(pods_json)?) };
        let routed = routers.route_decode(body, pods, is_disaggregated)?;
        // SAFETY: not null and aligned, by the check above; that it may be written is asked of the caller.
        unsafe { out_result.write(lend(routed, is_disaggregated)) };
        Ok(())
    })
}

/// Books a request at the worker that it is sent to, until free_request. dp_rank 4294967295 leaves the rank of a worker that has one open.
///
/// # Safety
/// request_id is null or ends with a zero byte; token_ids has token_count entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn add_request(
    handle: *mut RouterHandles,
    request_id: *const c_char,
    token_ids: *const u32,
    token_count: usize,
    worker_id: u64,
    dp_rank: u32,
) -> QueryRouterResult {
    let none = std::ptr::null();
    // SAFETY: what this function asks of its caller is what the other one does.
    unsafe {
        add_request_with_cache_namespace(
            handle,
            request_id,
            token_ids,
            token_count,
            worker_id,
            dp_rank,
            none,
            0,
        )
    }
}

/// The same for a prompt that shares a cache with its namespace alone: cache_namespace as CRoutingResult has it.
///
/// # Safety
/// request_id is null or ends with a zero byte; token_ids has token_count entries, cache_namespace cache_namespace_len bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn add_request_with_cache_namespace(
    handle: *mut RouterHandles,
    request_id: *const c_char,
    token_ids: *const u32,
    token_count: usize,
    worker_id: u64,
    dp_rank: u32,
    cache_namespace: *const u8,
    cache_namespace_len: usize,
) -> QueryRouterResult {
    asked(|| {
        let routers = behind(handle)?;
        let bad = RouterFailure::InvalidParam;
        // SAFETY: asked of the caller.
        let (name, tokens, namespace) = unsafe {
            (
                text("request_id", request_id).map_err(bad)?,
                array("token_ids", token_ids, token_count).map_err(bad)?,
                array("cache_namespace", cache_namespace, cache_namespace_len).map_err(bad)?,
            )
        };
        let namespace = std::str::from_utf8(namespace)
            .map_err(|_| bad("cache_namespace is not UTF-8".into()))?;
        let prompt = BookedPrompt {
            tokens,
            target: (worker_id, dp_rank),
            cache_namespace: namespace,
        };
        routers.add_request(name, &prompt)
    })
}

/// The first token of a request came: its prompt is no work any more. A request that is not booked is no mistake, and kvasir_last_error names it.
///
/// # Safety
/// request_id is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mark_prefill_complete(
    handle: *mut RouterHandles,
    request_id: *const c_char,
) -> QueryRouterResult {
    asked(|| {
        let routers = behind(handle)?;
        // SAFETY: asked of the caller.
        let name = unsafe { text("request_id", request_id).map_err(RouterFailure::InvalidParam)? };
        if !routers.mark_prefill_complete(name) {
            said::set(format!("Request {name} not found"));
        }
        Ok(())
    })
}

/// A request ended, however. One that is not booked is no mistake, and kvasir_last_error names it.
///
/// # Safety
/// request_id is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_request(
    handle: *mut RouterHandles,
    request_id: *const c_char,
) -> QueryRouterResult {
    asked(|| {
        let routers = behind(handle)?;
        // SAFETY: asked of the caller.
        let name = unsafe { text("request_id", request_id).map_err(RouterFailure::InvalidParam)? };
        if !routers.free_request(name) {
            said::set(format!("Request {name} not found"));
        }
        Ok(())
    })
}

/// Gives back what a result points to; the result then points to nothing. Again, or for a result that nobody wrote, nothing happens.
///
/// # Safety
/// result is null or points to a CRoutingResult that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_routing_result(result: *mut CRoutingResult) {
    caught((), || {
        if result.is_null() || !result.is_aligned() {
            return;
        }
        // SAFETY: not null and aligned; that it points to a result is asked of the caller. Any bytes are one, but for the flag, which is not read.
        unsafe {
            LENT.take_back((&raw const (*result).token_ids).read().addr());
            LENT.take_back((&raw const (*result).cache_namespace).read().addr());
            (&raw mut (*result).token_ids).write(std::ptr::null_mut());
            (&raw mut (*result).token_count).write(0);
            (&raw mut (*result).cache_namespace).write(std::ptr::null_mut());
            (&raw mut (*result).cache_namespace_len).write(0);
        }
    });
}

/// Ends routers: their bookings go, calls that run go on to their end. A handle that is none is no mistake.
#[unsafe(no_mangle)]
pub extern "C" fn destroy(handle: *mut RouterHandles) {
    caught((), || drop(ROUTERS.take(handle.addr() as u64)));
}

/// Why the last call on this thread that failed did: copies at most size bytes of text, the last a zero byte, and says how many the
/// whole text has. Null or 0 asks for its length alone.
///
/// # Safety
/// buffer is null or has size bytes that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_last_error(buffer: *mut c_char, size: usize) -> usize {
    let copied = said::with(|message| {
        if !buffer.is_null() && size > 0 {
            let count = message.floor_char_boundary(size - 1);
            // SAFETY: asked of the caller: there are `size` bytes, and `count` is less.
            unsafe {
                std::ptr::copy_nonoverlapping(message.as_ptr(), buffer.cast(), count);
                buffer.add(count).write(0);
            }
        }
        message.len()
    });
    copied.unwrap_or(0)
}

/// The version of this library. Not to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Lends what was found out about a request, its worker as the one for the answer.
fn lend(routed: Routed, is_disaggregated: bool) -> CRoutingResult {
    let (token_count, cache_namespace_len) = (routed.tokens.len(), routed.cache_namespace.len());
    CRoutingResult {
        is_disaggregated,
        prefill_worker_id: 0,
        decode_worker_id: routed.target.worker.0,
        prefill_dp_rank: 0,
        decode_dp_rank: routed.target.rank.0,
        token_ids: LENT.tokens(routed.tokens),
        token_count,
        cache_namespace: LENT.bytes(routed.cache_namespace),
        cache_namespace_len,
    }
}

/// The routers that a handle stands for.
fn behind(handle: *mut RouterHandles) -> Result<Arc<Routers>, RouterFailure> {
    let found = ROUTERS.get(handle.addr() as u64);
    found.ok_or(RouterFailure::InvalidHandle)
}
