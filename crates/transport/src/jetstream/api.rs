//! Requests to JetStream: streams and their consumers.

use std::time::Duration;

use async_nats::{Client, HeaderMap, Request};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};

use super::JetStreamError;
use crate::nats::NatsLink;

/// Longest wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Within this time a message that is sent twice is stored once.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);
/// A consumer that nobody reads for this long is taken away by the server.
const INACTIVE: Duration = Duration::from_secs(300);
/// Messages that a consumer is given before it has said that it is done with them.
const UNACKNOWLEDGED_MAX: u64 = 20_000;
/// Pages of names that are read; a page has some hundred.
const PAGES_MAX: usize = 64;

/// JetStream at the server of a link. Clones are one.
#[derive(Clone, Debug)]
pub struct JetStream {
    link: NatsLink,
}

/// How a stream stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamState {
    /// When it was made: one of the same name that was made later is another one.
    pub created: String,
    /// Messages that it holds.
    pub messages: u64,
    /// Number of the first of them; one more than the last if there is none.
    pub first: u64,
    /// Number of the last message that it was given.
    pub last: u64,
    /// How long it keeps a message; zero if for ever.
    pub max_age: Duration,
}

/// How a consumer stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerState {
    /// Its name.
    pub name: String,
    /// Every message up to this number is done with.
    pub ack_floor: u64,
}

impl JetStream {
    /// JetStream over this connection.
    #[must_use]
    pub const fn new(link: NatsLink) -> Self {
        Self { link }
    }

    /// The connection.
    #[must_use]
    pub const fn link(&self) -> &NatsLink {
        &self.link
    }

    pub(super) async fn client(&self) -> Result<Client, JetStreamError> {
        let ended = || JetStreamError::Unreachable("the process ends".to_owned());
        self.link.client().await.ok_or_else(ended)
    }

    /// Asks, and reads what is answered.
    pub(super) async fn ask(&self, api: &str, body: &Value) -> Result<Value, JetStreamError> {
        let body = if body.is_null() {
            Bytes::new()
        } else {
            Bytes::from(body.to_string())
        };
        self.send(&format!("$JS.API.{api}"), None, body).await
    }

    /// Sends a message that JetStream answers.
    pub(super) async fn send(
        &self,
        subject: &str,
        headers: Option<HeaderMap>,
        body: Bytes,
    ) -> Result<Value, JetStreamError> {
        let client = self.client().await?;
        let mut request = Request::new().payload(body).timeout(Some(TIMEOUT));
        if let Some(headers) = headers {
            request = request.headers(headers);
        }
        let answer = client.send_request(subject.to_owned(), request).await;
        let answer =
            answer.map_err(|error| JetStreamError::of_request(error.kind(), error.to_string()))?;
        if answer.status.is_some_and(|status| status.as_u16() == 503) {
            return Err(JetStreamError::NotEnabled);
        }
        let unreadable = |error: serde_json::Error| JetStreamError::Unreadable(error.to_string());
        let answer: Value = serde_json::from_slice(&answer.payload).map_err(unreadable)?;
        match answer.get("error") {
            None => Ok(answer),
            Some(error) => Err(JetStreamError::of_code(
                number(error, "err_code"),
                number(error, "code"),
                text(error, "description"),
            )),
        }
    }

    /// Has a stream of all subjects `{name}.*` that keeps messages for `max_age`. One that is there already is given that
    /// age if `adjust` says so, and is left alone otherwise.
    pub async fn ensure_stream(
        &self,
        name: &str,
        max_age: Duration,
        adjust: bool,
    ) -> Result<StreamState, JetStreamError> {
        let config = json!({
            "name": name,
            "subjects": [format!("{name}.*")],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_age": nanos(max_age),
            "duplicate_window": nanos(DUPLICATE_WINDOW.min(max_age)),
        });
        let found = match self.stream_info(name).await {
            Err(JetStreamError::NotFound(_)) => None,
            found => Some(found?),
        };
        let api = match found {
            None => "CREATE",
            Some(state) if state.max_age == max_age || !adjust => return Ok(state),
            Some(_) => "UPDATE",
        };
        let made = match api {
            "CREATE" => self.create_stream(name, &config).await,
            _ => self.ask(&format!("STREAM.{api}.{name}"), &config).await,
        };
        match made {
            Ok(info) => Ok(stream_state(&info)),
            // Somebody else made it meanwhile, with another age.
            // Or it was made in another way, and stays as it is.
            Err(JetStreamError::Refused { code, text }) => {
                tracing::info!(stream = name, code, text, "the stream is used as it is");
                self.stream_info(name).await
            }
            Err(error) => Err(error),
        }
    }

    /// Makes a stream, or finds it as it is to be. A server that is still deleting one of that name gives it the old one's numbers, and takes its files away
    /// a moment later: nothing can be written to it then. Such a one is taken away, and whoever asks again later gets a sound one.
    pub(super) async fn create_stream(
        &self,
        name: &str,
        config: &Value,
    ) -> Result<Value, JetStreamError> {
        let info = self.ask(&format!("STREAM.CREATE.{name}"), config).await?;
        let is_new = info.get("did_create").and_then(Value::as_bool) == Some(true);
        if is_new && stream_state(&info).last > 0 {
            self.delete_stream(name).await?;
            let why = format!("stream {name} is still being deleted");
            return Err(JetStreamError::Unreachable(why));
        }
        Ok(info)
    }

    /// How a stream stands.
    pub async fn stream_info(&self, name: &str) -> Result<StreamState, JetStreamError> {
        let info = self
            .ask(&format!("STREAM.INFO.{name}"), &Value::Null)
            .await?;
        Ok(stream_state(&info))
    }

    /// Takes a stream away; fine if there is none.
    pub async fn delete_stream(&self, name: &str) -> Result<(), JetStreamError> {
        let deleted = self
            .ask(&format!("STREAM.DELETE.{name}"), &Value::Null)
            .await;
        found_or_not(deleted)
    }

    /// Takes messages away: those before number `before`, or all; fine if there is no such stream.
    pub async fn purge_stream(
        &self,
        name: &str,
        before: Option<u64>,
    ) -> Result<(), JetStreamError> {
        let body = match before {
            None => Value::Null,
            Some(before) => json!({ "seq": before }),
        };
        found_or_not(self.ask(&format!("STREAM.PURGE.{name}"), &body).await)
    }

    pub(super) async fn purge_subject(
        &self,
        stream: &str,
        subject: &str,
    ) -> Result<(), JetStreamError> {
        let body = json!({ "filter": subject });
        found_or_not(self.ask(&format!("STREAM.PURGE.{stream}"), &body).await)
    }

    /// Has a consumer that outlives its reader's connection and begins with message `first`; one of that name is made anew.
    pub(super) async fn create_durable(
        &self,
        stream: &str,
        name: &str,
        first: u64,
    ) -> Result<(), JetStreamError> {
        self.delete_consumer(stream, name).await?;
        let body = json!({"stream_name": stream, "config": {
            "durable_name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first.max(1),
            "ack_policy": "all",
            "ack_wait": nanos(Duration::from_secs(30)),
            "max_ack_pending": UNACKNOWLEDGED_MAX,
            "inactive_threshold": nanos(INACTIVE),
        }});
        let api = format!("CONSUMER.DURABLE.CREATE.{stream}.{name}");
        self.ask(&api, &body).await.map(drop)
    }

    /// Has a consumer for one reading, which begins with message `first`; its name.
    pub(super) async fn create_ephemeral(
        &self,
        stream: &str,
        first: u64,
    ) -> Result<String, JetStreamError> {
        let body = json!({"stream_name": stream, "config": {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first.max(1),
            "ack_policy": "none",
            "inactive_threshold": nanos(Duration::from_secs(30)),
            "mem_storage": true,
        }});
        let made = self
            .ask(&format!("CONSUMER.CREATE.{stream}"), &body)
            .await?;
        Ok(text(&made, "name").to_owned())
    }

    /// Takes a consumer away; fine if there is none.
    pub async fn delete_consumer(&self, stream: &str, name: &str) -> Result<(), JetStreamError> {
        let api = format!("CONSUMER.DELETE.{stream}.{name}");
        found_or_not(self.ask(&api, &Value::Null).await)
    }

    /// The consumers of a stream that outlive connections.
    pub async fn durable_consumers(
        &self,
        stream: &str,
    ) -> Result<Vec<ConsumerState>, JetStreamError> {
        let mut found = Vec::new();
        for _ in 0..PAGES_MAX {
            let body = json!({ "offset": found.len() });
            let page = self.ask(&format!("CONSUMER.LIST.{stream}"), &body).await?;
            let consumers = page["consumers"].as_array().map_or(&[][..], Vec::as_slice);
            found.extend(consumers.iter().map(|consumer| {
                let state = ConsumerState {
                    name: text(consumer, "name").to_owned(),
                    ack_floor: number(&consumer["ack_floor"], "stream_seq"),
                };
                (state, consumer["config"]["durable_name"].is_string())
            }));
            if consumers.is_empty() || found.len() as u64 >= number(&page, "total") {
                break;
            }
        }
        let durable = found.into_iter().filter(|(_, is_durable)| *is_durable);
        Ok(durable.map(|(state, _)| state).collect())
    }

    /// One message of a stream, as `which` names it: its number and its bytes.
    pub(super) async fn message(
        &self,
        stream: &str,
        which: &Value,
    ) -> Result<(u64, Vec<u8>), JetStreamError> {
        let answer = self.ask(&format!("STREAM.MSG.GET.{stream}"), which).await?;
        let message = &answer["message"];
        let bytes = STANDARD
            .decode(text(message, "data"))
            .map_err(|error| JetStreamError::Unreadable(error.to_string()))?;
        Ok((number(message, "seq"), bytes))
    }
}

fn found_or_not(answer: Result<Value, JetStreamError>) -> Result<(), JetStreamError> {
    match answer {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

fn stream_state(info: &Value) -> StreamState {
    let state = &info["state"];
    StreamState {
        created: text(info, "created").to_owned(),
        messages: number(state, "messages"),
        first: number(state, "first_seq"),
        last: number(state, "last_seq"),
        max_age: Duration::from_nanos(number(&info["config"], "max_age")),
    }
}

/// A number of an answer; 0 if it has none.
pub(super) fn number(value: &Value, name: &str) -> u64 {
    value.get(name).and_then(Value::as_u64).unwrap_or(0)
}

/// A text of an answer; empty if it has none.
pub(super) fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
