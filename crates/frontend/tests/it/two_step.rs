//! Prompts that one token worker computes and another answers: what each of them is asked, and what follows when one fails.

use std::sync::Arc;

use kvasir_frontend::{AppOptions, MigrationOptions, ServedModel, SourceName, WorkerSource};
use kvasir_router::{BypassPolicy, BypassTerms, RouterMode, TwoStepTerms};
use kvasir_text::{ModelFolders, TextModel};
use kvasir_transport::{Call, MemoryPlane, PlaneError, WorkerInbox};
use kvasir_types::{
    BootstrapAddress, EventFeed, FinishReason, ModelCard, PlaneEndpoint, Role, TokenItem,
    TransferRule, Transport, WorkerId, WorkerRank, WorkerRecord,
};
use serde_json::{Value, json};

use crate::client::{Answer, Client};
use crate::discovery::MODEL;
use crate::rig::{CHAT, Rig, Setup, in_time, until};

const PREFILL: u64 = 11;
const DECODE: u64 = 21;
const ASK: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":4,"nvext":{"extra_fields":["worker_id","timing"]}}"#;
const PARAMS: &str = r#"{"remote_block_ids":[[1,2]]}"#;

const STRICT: TwoStepTerms = TwoStepTerms {
    serves_alone: false,
    falls_back: false,
};

/// A frontend, and workers whose part the test plays.
struct Split {
    rig: Rig,
    plane: MemoryPlane,
    source: WorkerSource,
}

fn record(id: u64, role: Role, bootstrap: bool) -> WorkerRecord {
    let endpoint = PlaneEndpoint {
        plane: "memory".into(),
        address: id.to_string().into(),
        codec: Default::default(),
    };
    let mut record = WorkerRecord::new(WorkerId(id), Transport::Plane(endpoint));
    record.events = EventFeed::Delivered;
    record.block_size = Some(16);
    record.role = role;
    record.bootstrap = bootstrap.then(|| BootstrapAddress {
        host: "10.0.0.1".into(),
        port: 8998,
    });
    record.models = vec![ModelCard {
        name: "m".into(),
        root: None,
        max_model_len: Some(4096),
        parent: None,
        migration_limit: 1,
    }];
    record
}

impl Split {
    async fn new() -> Self {
        Self::with(TwoStepTerms::default()).await
    }

    async fn with(two_step: TwoStepTerms) -> Self {
        Self::with_options(AppOptions {
            two_step,
            ..AppOptions::default()
        })
        .await
    }

    /// One whose prompts go past the prefill workers on these terms.
    async fn with_bypass(policy: BypassPolicy) -> Self {
        Self::with_options(AppOptions {
            bypass: Some(BypassTerms {
                policy,
                uncached_tokens: u64::MAX,
                uncached_share: 2.0,
                // One token of a batch of unknown size.
                prefill_busy: Some(1e-7),
                decode_busy: None,
            }),
            ..AppOptions::default()
        })
        .await
    }

    async fn with_options(options: AppOptions) -> Self {
        let plane = MemoryPlane::new();
        let shared = Arc::new(plane.clone());
        let folders = ModelFolders::load(Some(MODEL)).unwrap();
        let mut setup = Setup::in_mode(RouterMode::Kv);
        setup.options = AppOptions {
            migration: MigrationOptions {
                limit: 3,
                ..MigrationOptions::default()
            },
            ..options
        };
        let rig = Rig::with_fleet(0, setup, |fleet| {
            let connect = Arc::new(move |_: WorkerId, _: &PlaneEndpoint| Ok(shared.clone() as _));
            fleet
                .with_plane("memory", connect)
                .with_model_folders(folders)
        })
        .await;
        let source = rig.app.members().source(SourceName::new("test", "plane"));
        Self { rig, plane, source }
    }

    async fn decode(&self) -> WorkerInbox {
        self.decode_as(DECODE).await
    }

    async fn decode_as(&self, id: u64) -> WorkerInbox {
        self.decode_of(record(id, Role::Decode, false)).await
    }

    async fn decode_of(&self, record: WorkerRecord) -> WorkerInbox {
        let inbox = self.plane.join(record.id);
        let before = self.rig.app.models().get("m");
        let before = before.map_or(0, |model| model.specs().len());
        self.source.join(record).unwrap();
        self.rig.joined(before + 1).await;
        inbox
    }

    async fn prefill(&self, bootstrap: bool) -> WorkerInbox {
        let record = record(PREFILL, Role::Prefill, bootstrap);
        self.prefill_of(record).await
    }

    async fn prefill_of(&self, record: WorkerRecord) -> WorkerInbox {
        let inbox = self.plane.join(record.id);
        self.source.join(record).unwrap();
        until("the pool is there", || self.pool_workers() == 1).await;
        inbox
    }

    fn pool_workers(&self) -> usize {
        let pools = self.rig.app.prefill_pools().all();
        pools.iter().map(|pool| pool.specs().len()).sum()
    }

    /// Sends a request whose answer is read later.
    async fn ask(&self) -> Client {
        self.ask_for(ASK).await
    }

    async fn ask_for(&self, body: &str) -> Client {
        let mut client = self.rig.client().await;
        client.post(CHAT, "connection: close\r\n", body).await;
        client
    }

    /// Nothing is booked in either pool, and no request is under way.
    async fn at_rest(&self) {
        let app = &self.rig.app;
        until("requests end", || app.in_flight().count() == 0).await;
        until("bookings of answers end", || self.rig.booked() == 0).await;
        let booked = || -> u64 {
            let of = |pool: &Arc<ServedModel>| {
                let ranks: Vec<WorkerRank> =
                    pool.specs().iter().flat_map(|s| s.rank_iter()).collect();
                pool.host.ask(|router| {
                    let loads = ranks.iter().filter_map(|rank| router.load(*rank));
                    let sum = loads.map(|load| u64::from(load.requests) + load.prefill_tokens);
                    sum.sum::<u64>()
                })
            };
            app.prefill_pools().all().iter().map(of).sum()
        };
        until("bookings of prompts end", || booked() == 0).await;
    }
}

async fn next(inbox: &mut WorkerInbox) -> Call {
    in_time("a request comes", inbox.next()).await.unwrap()
}

fn words(text: &str) -> Vec<u32> {
    TextModel::builtin().unwrap().encode_chat(text).unwrap()
}

/// Answers a request with "yes".
fn answer(call: &Call) {
    call.reply.push(TokenItem {
        tokens: words("yes"),
        finish: Some(FinishReason::Stop),
        ..TokenItem::default()
    });
}

/// What a prefill worker says.
fn prefilled(call: &Call, params: Option<&str>, finish: FinishReason) {
    call.reply.push(TokenItem {
        tokens: words("x")[..1].to_vec(),
        cached_tokens: Some(3),
        disaggregated_params: params.map(Into::into),
        finish: Some(finish),
        ..TokenItem::default()
    });
}

async fn got(client: &mut Client) -> Answer {
    in_time("the answer comes", client.answer()).await
}

fn content(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["choices"][0]["message"]["content"].clone()
}

#[tokio::test]
async fn the_prompt_goes_to_one_worker_and_the_answer_comes_from_another() {
    let split = Split::new().await;
    let (mut prefill, mut decode) = (split.prefill(false).await, split.decode().await);
    let mut client = split.ask().await;
    let first = next(&mut prefill).await;
    let asked = &first.request;
    assert_eq!((&*asked.model, asked.sampling.max_tokens), ("m", 1));
    assert_eq!(asked.context.prefill.unwrap().worker, WorkerId(PREFILL));
    assert!(decode.try_next().is_none(), "it waits for the prompt");
    prefilled(&first, Some(PARAMS), FinishReason::Length);
    let second = next(&mut decode).await;
    let asked = &second.request;
    assert_eq!((asked.id, asked.sampling.max_tokens), (first.request.id, 4));
    assert_eq!(asked.tokens, first.request.tokens);
    assert_eq!(asked.context.prefill.unwrap().worker, WorkerId(PREFILL));
    let result = asked.context.prefill_result.as_ref().unwrap();
    assert_eq!(&*result.disaggregated_params, PARAMS);
    assert_eq!(result.cached_tokens, Some(3));
    assert_eq!(asked.context.bootstrap, None);
    answer(&second);
    let answer = got(&mut client).await;
    assert_eq!(content(&answer), "yes");
    let body = answer.json();
    let expected = json!({"prefill_worker_id": PREFILL, "prefill_dp_rank": 0, "decode_worker_id": DECODE, "decode_dp_rank": 0});
    assert_eq!(body["nvext"]["worker_id"], expected);
    let timing = &body["nvext"]["timing"];
    assert!(
        timing["kv_transfer_estimated_latency_ms"].is_number(),
        "{timing}"
    );
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    split.at_rest().await;
}

#[tokio::test]
async fn pools_come_and_go_in_any_order() {
    let split = Split::new().await;
    let mut decode = split.decode().await;
    // Nobody computes prompts yet.
    let mut client = split.ask().await;
    let call = next(&mut decode).await;
    assert_eq!(call.request.context.prefill, None);
    answer(&call);
    assert_eq!(content(&got(&mut client).await), "yes");
    for _ in 0..2 {
        let mut prefill = split.prefill(false).await;
        let mut client = split.ask().await;
        let call = next(&mut prefill).await;
        prefilled(&call, Some(PARAMS), FinishReason::Length);
        answer(&next(&mut decode).await);
        assert_eq!(content(&got(&mut client).await), "yes");
        split.source.leave(WorkerId(PREFILL));
        until("the pool is gone", || split.pool_workers() == 0).await;
        let mut client = split.ask().await;
        answer(&next(&mut decode).await);
        assert_eq!(content(&got(&mut client).await), "yes");
    }
    split.at_rest().await;
}

/// As a Dynamo frontend says it, and what it says of one that is missing.
#[tokio::test]
async fn the_page_of_a_model_says_who_computes_what() {
    for (terms, alone) in [(TwoStepTerms::default(), true), (STRICT, false)] {
        let split = Split::with(terms).await;
        let _decode = split.decode().await;
        let decode = json!({"workers": 1, "needs": [["prefill"]]});
        let page = |ready, types: Value, present: Value, missing: Value| {
            json!({"model": "m", "ready": ready, "namespaces": {"dynamo":
                {"ready": ready, "worker_types": types, "present": present, "missing_worker_types": missing}}})
        };
        let got = split.rig.get("/v1/models/m/ready").await;
        let expected = page(
            alone,
            json!({"decode": decode}),
            json!(["decode"]),
            json!(["prefill"]),
        );
        assert_eq!((got.status == 200, got.json()), (alone, expected));
        let _prefill = split.prefill(false).await;
        let types = json!({"decode": decode, "prefill": {"workers": 1, "needs": [["decode"]]}});
        let got = split.rig.get("/v1/models/m/ready").await;
        let expected = page(true, types, json!(["decode", "prefill"]), json!([]));
        assert_eq!((got.status, got.json()), (200, expected));
    }
}

/// How a prefill worker fails a request.
type FailCall = fn(Call);

/// What a prefill worker does, and the status that the client gets from a kind and from a strict frontend.
#[tokio::test]
async fn whoever_answers_computes_a_prompt_that_nobody_else_does() {
    let fails: [(&str, FailCall, [u16; 2]); 3] = [
        (
            "it fails",
            |call| call.reply.fail(PlaneError::Engine("broken".into())),
            [200, 500],
        ),
        (
            "it says nothing",
            |call| prefilled(&call, None, FinishReason::Length),
            [200, 503],
        ),
        (
            "it is full",
            |call| call.reply.fail(PlaneError::Overloaded(WorkerId(PREFILL))),
            [503, 503],
        ),
    ];
    for (what, fail, expected) in fails {
        for (terms, expected) in [TwoStepTerms::default(), STRICT].into_iter().zip(expected) {
            let split = Split::with(terms).await;
            let mut decode = split.decode().await;
            if terms == STRICT {
                let status = got(&mut split.ask().await).await.status;
                assert_eq!(status, 503, "nobody is there");
            }
            let mut prefill = split.prefill(false).await;
            let mut client = split.ask().await;
            fail(next(&mut prefill).await);
            if expected == 200 {
                let call = next(&mut decode).await;
                assert_eq!(call.request.context.prefill_result, None);
                answer(&call);
            }
            let answer = got(&mut client).await;
            assert_eq!(answer.status, expected, "{what}: {}", answer.text());
            split.at_rest().await;
        }
    }
}

#[tokio::test]
async fn a_prompt_whose_first_token_is_the_last_needs_no_second_worker() {
    let split = Split::new().await;
    let (mut prefill, mut decode) = (split.prefill(false).await, split.decode().await);
    let mut client = split.ask().await;
    let call = next(&mut prefill).await;
    prefilled(&call, Some(PARAMS), FinishReason::Stop);
    let answer = got(&mut client).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["usage"]["completion_tokens"], 1);
    assert!(decode.try_next().is_none());
    split.at_rest().await;
}

#[tokio::test]
async fn two_workers_that_meet_are_asked_at_once() {
    let split = Split::new().await;
    let (mut prefill, mut decode) = (split.prefill(true).await, split.decode().await);
    let mut client = split.ask().await;
    let (first, second) = (next(&mut prefill).await, next(&mut decode).await);
    let room = first.request.context.bootstrap.clone().unwrap();
    assert_eq!((&*room.address.host, room.address.port), ("10.0.0.1", 8998));
    assert!(room.room > 0 && room.room < 1 << 63 && room.handoff.is_some());
    assert_eq!(second.request.context.bootstrap, Some(room));
    assert_eq!(second.request.sampling.max_tokens, 4);
    answer(&second);
    assert_eq!(content(&got(&mut client).await), "yes");
    // The other is heard to its end, which nobody waits for.
    assert!(!first.reply.is_closed());
    prefilled(&first, None, FinishReason::Length);
    split.at_rest().await;
}

#[tokio::test]
async fn a_meeting_that_one_does_not_come_to_is_left() {
    let split = Split::new().await;
    let (mut prefill, mut decode) = (split.prefill(true).await, split.decode().await);
    let mut client = split.ask().await;
    let (first, waiting) = (next(&mut prefill).await, next(&mut decode).await);
    first.reply.fail(PlaneError::Engine("broken".into()));
    let alone = next(&mut decode).await;
    in_time("it waits no longer", waiting.reply.closed()).await;
    assert_eq!(alone.request.context.bootstrap, None);
    answer(&alone);
    assert_eq!(content(&got(&mut client).await), "yes");
    split.at_rest().await;
}

/// Whether or not the worker of the prompt is still there.
#[tokio::test]
async fn a_transfer_is_not_used_twice() {
    for dies in [false, true] {
        let split = Split::new().await;
        let (mut prefill, mut decode) = (split.prefill(false).await, split.decode().await);
        let mut client = split.ask().await;
        let call = next(&mut prefill).await;
        prefilled(&call, Some(PARAMS), FinishReason::Length);
        if dies {
            drop((call, prefill));
            split.source.leave(WorkerId(PREFILL));
            until("the pool is gone", || split.pool_workers() == 0).await;
        }
        let first = next(&mut decode).await;
        assert!(first.request.context.prefill_result.is_some());
        first
            .reply
            .fail(PlaneError::Engine("no such blocks".into()));
        let second = next(&mut decode).await;
        assert_eq!(second.request.context.prefill_result, None);
        // A worker that has not forgotten the first would refuse a second of its name.
        assert_ne!(second.request.id, first.request.id);
        answer(&second);
        assert_eq!(content(&got(&mut client).await), "yes");
        split.at_rest().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_stops_what_can_be_stopped() {
    let split = Split::new().await;
    let mut decode = split.decode().await;
    let mut prefill = split.prefill(false).await;
    // While the prompt is computed: nobody else is asked.
    let client = split.ask().await;
    let call = next(&mut prefill).await;
    drop(client);
    in_time("the prompt is given up", call.reply.closed()).await;
    assert!(decode.try_next().is_none());
    split.at_rest().await;
    // The prompt is there: it is fetched, since only that frees it, and then nobody goes on.
    let client = split.ask().await;
    let call = next(&mut prefill).await;
    prefilled(&call, Some(PARAMS), FinishReason::Length);
    let fetching = next(&mut decode).await;
    drop(client);
    until("the client is gone", || {
        split.rig.app.in_flight().count() == 0
    })
    .await;
    assert!(!fetching.reply.is_closed());
    fetching.reply.push(TokenItem {
        tokens: words("yes")[..1].to_vec(),
        ..TokenItem::default()
    });
    in_time("the answer is given up", fetching.reply.closed()).await;
    split.at_rest().await;
}

#[tokio::test]
async fn a_client_that_leaves_a_meeting_stops_both() {
    let split = Split::new().await;
    let (mut prefill, mut decode) = (split.prefill(true).await, split.decode().await);
    let client = split.ask().await;
    let (first, second) = (next(&mut prefill).await, next(&mut decode).await);
    drop(client);
    in_time("both are stopped", async {
        first.reply.closed().await;
        second.reply.closed().await;
    })
    .await;
    split.at_rest().await;
}

/// An answer that breaks off goes on at another worker, and its prompt is computed anew by a prefill worker.
#[tokio::test]
async fn an_answer_that_breaks_off_goes_on_over_both_workers() {
    let split = Split::new().await;
    let mut prefill = split.prefill(false).await;
    let mut decode = split.decode().await;
    let ask = ASK.replace("\"max_tokens\":4", "\"max_tokens\":4,\"stream\":true");
    let mut client = split.ask_for(&ask).await;
    let call = next(&mut prefill).await;
    let prompt = call.request.tokens.len();
    prefilled(&call, Some(PARAMS), FinishReason::Length);
    let first = next(&mut decode).await;
    first.reply.push(TokenItem {
        tokens: words("yes")[..1].to_vec(),
        ..TokenItem::default()
    });
    let mut other = split.decode_as(DECODE + 1).await;
    first.reply.fail(PlaneError::Disconnected(WorkerId(DECODE)));
    let call = next(&mut prefill).await;
    assert_eq!(call.request.tokens.len(), prompt + 1);
    prefilled(&call, Some(PARAMS), FinishReason::Length);
    let second = next(&mut other).await;
    assert!(second.request.context.prefill_result.is_some());
    answer(&second);
    let answer = got(&mut client).await;
    assert!(
        answer.text().ends_with("[DONE]\n\n") && !answer.text().contains("error"),
        "{}",
        answer.text()
    );
    split.at_rest().await;
}

const NOTE: &str = "x-bypass-remote-prefill";

/// A streamed request whose client wants to know of a bypass.
fn ask_note() -> String {
    let nvext = format!(r#""nvext":{{"annotations":["{NOTE}"]}}"#);
    format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],"max_tokens":4,"stream":true,{nvext}}}"#
    )
}

fn notes(call: &Call) -> Vec<&str> {
    let notes = call.request.context.annotations.iter();
    notes.map(|note| &**note).collect()
}

#[tokio::test]
async fn a_short_prompt_goes_past_the_prefill_workers() {
    let split = Split::with_bypass(BypassPolicy::IslBounding).await;
    let (mut prefill, mut decode) = (split.prefill(false).await, split.decode().await);
    let mut client = split.ask_for(&ask_note()).await;
    let call = next(&mut decode).await;
    assert_eq!(notes(&call), [NOTE]);
    assert_eq!(call.request.context.prefill, None);
    answer(&call);
    let told = got(&mut client).await;
    let told = told.text();
    let first = told.lines().next().unwrap();
    assert_eq!(first, format!("event: {NOTE}"), "{told}");
    assert!(prefill.try_next().is_none());
    split.at_rest().await;
    // One that fails there takes the usual way.
    let mut client = split.ask().await;
    let call = next(&mut decode).await;
    call.reply.fail(PlaneError::Overloaded(WorkerId(DECODE)));
    let call = next(&mut prefill).await;
    prefilled(&call, Some(PARAMS), FinishReason::Length);
    let call = next(&mut decode).await;
    assert!(call.request.context.prefill_result.is_some() && notes(&call).is_empty());
    answer(&call);
    assert_eq!(content(&got(&mut client).await), "yes");
    split.at_rest().await;
    // One whose client names a prefill worker goes there.
    let pinned = ASK.replace(
        "\"nvext\":{",
        &format!("\"nvext\":{{\"prefill_worker_id\":{PREFILL},"),
    );
    let mut client = split.ask_for(&pinned).await;
    let call = next(&mut prefill).await;
    prefilled(&call, Some(PARAMS), FinishReason::Length);
    answer(&next(&mut decode).await);
    assert_eq!(content(&got(&mut client).await), "yes");
    split.at_rest().await;
}

#[tokio::test]
async fn a_prompt_goes_past_prefill_workers_that_have_much_to_do() {
    let split = Split::with_bypass(BypassPolicy::PrefillLoad).await;
    let (mut prefill, mut decode) = (split.prefill(false).await, split.decode().await);
    // A client cannot say that its request is one.
    let mut first = split.ask_for(&ask_note()).await;
    let computing = next(&mut prefill).await;
    assert!(notes(&computing).is_empty());
    let mut second = split.ask().await;
    answer(&next(&mut decode).await);
    assert_eq!(content(&got(&mut second).await), "yes");
    prefilled(&computing, Some(PARAMS), FinishReason::Length);
    answer(&next(&mut decode).await);
    let told = got(&mut first).await;
    assert!(!told.text().contains(NOTE), "{}", told.text());
    split.at_rest().await;
}

fn place(name: &str) -> Arc<str> {
    format!("dynamo.topology/zone={name}").into()
}

/// A decode worker in each of two zones, and a prefill worker in the second.
async fn in_zones(preferred: Option<u16>) -> (Split, WorkerInbox, [WorkerInbox; 2]) {
    let split = Split::new().await;
    let mut decode = Vec::new();
    for (id, zone) in [(DECODE, "a"), (DECODE + 1, "b")] {
        let mut record = record(id, Role::Decode, false);
        record.taints = vec![place(zone)];
        decode.push(split.decode_of(record).await);
    }
    let mut record = record(PREFILL, Role::Prefill, false);
    record.transfer = Some(TransferRule {
        domain: "zone".into(),
        taint: Some(place("b")),
        preferred,
    });
    let prefill = split.prefill_of(record).await;
    let Ok(decode) = decode.try_into() else {
        panic!("there are two")
    };
    (split, prefill, decode)
}

#[tokio::test]
async fn prompts_are_handed_over_within_a_zone() {
    // Of several blocks: a preference multiplies the cost, and that of a shorter one is nothing.
    let ask = ASK.replace("hi", &"light ".repeat(100));
    for preferred in [None, Some(1000)] {
        let (split, mut prefill, [mut far, mut near]) = in_zones(preferred).await;
        for _ in 0..8 {
            let mut client = split.ask_for(&ask).await;
            let call = next(&mut prefill).await;
            prefilled(&call, Some(PARAMS), FinishReason::Length);
            answer(&next(&mut near).await);
            assert_eq!(content(&got(&mut client).await), "yes");
        }
        assert!(far.try_next().is_none());
        // Nobody is near any more: where that is required, who is left computes the prompt.
        split.source.leave(WorkerId(DECODE + 1));
        split.rig.joined(1).await;
        let mut client = split.ask_for(&ask).await;
        let call = next(&mut prefill).await;
        prefilled(&call, Some(PARAMS), FinishReason::Length);
        let call = next(&mut far).await;
        let transferred = call.request.context.prefill_result.is_some();
        assert_eq!(transferred, preferred.is_some());
        answer(&call);
        assert_eq!(content(&got(&mut client).await), "yes");
        split.at_rest().await;
    }
}

#[tokio::test]
async fn a_prefill_worker_that_requires_a_place_and_names_none_gets_no_prompts() {
    let split = Split::new().await;
    let mut decode = split.decode().await;
    let mut record = record(PREFILL, Role::Prefill, false);
    record.transfer = Some(TransferRule {
        domain: "zone".into(),
        taint: None,
        preferred: None,
    });
    let mut prefill = split.prefill_of(record).await;
    assert_eq!(got(&mut split.ask().await).await.status, 503);
    assert!(prefill.try_next().is_none() && decode.try_next().is_none());
    split.at_rest().await;
}

/// Thresholds for prompts hold for the workers of prompts, whenever those come; a full pool is said to be full.
#[tokio::test]
async fn busy_thresholds_hold_in_both_pools() {
    let split = Split::new().await;
    let mut decode = split.decode().await;
    let set = async |body: &str| {
        let mut client = split.rig.client().await;
        client
            .post("/busy_threshold", "connection: close\r\n", body)
            .await;
        assert_eq!(got(&mut client).await.status, 200);
    };
    set(
        r#"{"model":"m","active_prefill_tokens_threshold":1,"active_decode_blocks_threshold":0.5}"#,
    )
    .await;
    let mut prefill = split.prefill(false).await;
    let pool = || {
        split.rig.app.prefill_pools().all()[0]
            .host
            .ask(|router| router.thresholds())
    };
    assert_eq!(
        (pool().active_prefill_tokens, pool().active_decode_blocks),
        (Some(1), None)
    );
    let mut first = split.ask().await;
    let computing = next(&mut prefill).await;
    let refused = got(&mut split.ask().await).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(
        decode.try_next().is_none(),
        "a full pool is no reason to go past it"
    );
    set(r#"{"model":"m","active_prefill_tokens_threshold":1000000}"#).await;
    assert_eq!(pool().active_prefill_tokens, Some(1_000_000));
    // They are in force once the load has changed.
    prefilled(&computing, Some(PARAMS), FinishReason::Length);
    answer(&next(&mut decode).await);
    assert_eq!(content(&got(&mut first).await), "yes");
    let mut clients = [split.ask().await, split.ask().await];
    let calls = [next(&mut prefill).await, next(&mut prefill).await];
    for call in calls {
        prefilled(&call, Some(PARAMS), FinishReason::Length);
        answer(&next(&mut decode).await);
    }
    for client in &mut clients {
        assert_eq!(content(&got(client).await), "yes");
    }
    split.at_rest().await;
}
