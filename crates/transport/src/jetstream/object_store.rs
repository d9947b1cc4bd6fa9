//! Large values in JetStream's object store, as other clients of NATS read and write them.
//!
//! A bucket is a stream of its own: a value lies there in chunks, and a message of its name says which chunks it has. That message is what changes a
//! value, in one step; chunks that none names are garbage.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::HeaderMap;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use bytes::Bytes;
use ring::digest::{Context, SHA256};
use serde_json::{Value, json};

use super::api::{number, text};
use super::{JetStream, JetStreamError};

/// Bytes of one chunk, as other clients have it.
const CHUNK_BYTES: usize = 128 << 10;
/// A value that is larger is not read.
const VALUE_BYTES_MAX: u64 = 1 << 30;
/// Times that a value is read again because it changed meanwhile.
const READS_MAX: usize = 10;
/// Between two of them.
const READ_PAUSE: Duration = Duration::from_millis(100);
/// Chunks that no value names and that are older than this are garbage: no upload takes as long.
const GARBAGE_AGE: Duration = Duration::from_secs(600);

/// A bucket of the object store.
#[derive(Clone, Debug)]
pub struct ObjectStore {
    jetstream: JetStream,
    bucket: String,
}

/// What a bucket says of a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectHead {
    /// Changes with every change of the value; 0 if there never was one.
    pub revision: u64,
    /// What its writer says of it.
    pub labels: BTreeMap<String, String>,
    /// Names its chunks; empty if there is no value.
    chunks: String,
    size: u64,
    digest: String,
}

impl ObjectHead {
    /// Whether there is a value.
    #[must_use]
    pub fn is_there(&self) -> bool {
        !self.chunks.is_empty()
    }
}

impl ObjectStore {
    /// A bucket of this name.
    #[must_use]
    pub fn new(jetstream: &JetStream, bucket: &str) -> Self {
        Self {
            jetstream: jetstream.clone(),
            bucket: bucket.to_owned(),
        }
    }

    fn stream(&self) -> String {
        format!("OBJ_{}", self.bucket)
    }

    fn head_subject(&self, name: &str) -> String {
        format!("$O.{}.M.{}", self.bucket, URL_SAFE.encode(name))
    }

    fn chunk_subject(&self, chunks: &str) -> String {
        format!("$O.{}.C.{chunks}", self.bucket)
    }

    /// Makes the bucket, unless it is there.
    pub async fn ensure(&self) -> Result<(), JetStreamError> {
        let (stream, bucket) = (self.stream(), &self.bucket);
        match self.jetstream.stream_info(&stream).await {
            Err(JetStreamError::NotFound(_)) => {}
            found => return found.map(drop),
        }
        let config = json!({
            "name": stream,
            "subjects": [format!("$O.{bucket}.C.>"), format!("$O.{bucket}.M.>")],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "allow_rollup_hdrs": true,
            "allow_direct": true,
        });
        match self.jetstream.create_stream(&stream, &config).await {
            // Somebody else made it meanwhile, in his own way.
            Err(JetStreamError::Refused { .. }) => {
                self.jetstream.stream_info(&stream).await.map(drop)
            }
            made => made.map(drop),
        }
    }

    /// Takes the bucket away with all that it holds; fine if there is none.
    pub async fn delete(&self) -> Result<(), JetStreamError> {
        self.jetstream.delete_stream(&self.stream()).await
    }

    /// What the bucket says of a value now.
    pub async fn head(&self, name: &str) -> Result<ObjectHead, JetStreamError> {
        // A stream that somebody is just creating is asked for no message: nats-server 2.9 crashes of that (nil store in jsMsgGetRequest). One that holds
        // messages has been created.
        match self.jetstream.stream_info(&self.stream()).await {
            Ok(state) if state.messages > 0 => {}
            Ok(_) | Err(JetStreamError::NotFound(_)) => return Ok(ObjectHead::default()),
            Err(error) => return Err(error),
        }
        let which = json!({ "last_by_subj": self.head_subject(name) });
        let (revision, bytes) = match self.jetstream.message(&self.stream(), &which).await {
            Err(JetStreamError::NotFound(_)) => return Ok(ObjectHead::default()),
            found => found?,
        };
        let unreadable = |error: serde_json::Error| JetStreamError::Unreadable(error.to_string());
        let info: Value = serde_json::from_slice(&bytes).map_err(unreadable)?;
        if info["deleted"] == true {
            return Ok(ObjectHead {
                revision,
                ..ObjectHead::default()
            });
        }
        let labels = info["metadata"].as_object().into_iter().flatten();
        let labels = labels.filter_map(|(name, value)| {
            let value = value.as_str()?;
            Some((name.clone(), value.to_owned()))
        });
        Ok(ObjectHead {
            revision,
            labels: labels.collect(),
            chunks: text(&info, "nuid").to_owned(),
            size: number(&info, "size"),
            digest: text(&info, "digest").to_owned(),
        })
    }

    /// A value and what the bucket says of it; none if there is none. One that is being replaced is read again.
    pub async fn get(&self, name: &str) -> Result<Option<(ObjectHead, Vec<u8>)>, JetStreamError> {
        let mut failed = JetStreamError::NotFound(name.to_owned());
        for _ in 0..READS_MAX {
            let head = self.head(name).await?;
            if !head.is_there() {
                return Ok(None);
            }
            match self.read(&head).await {
                Ok(bytes) => return Ok(Some((head, bytes))),
                Err(error) if error.is_passing() => return Err(error),
                Err(error) => failed = error,
            }
            tokio::time::sleep(READ_PAUSE).await;
        }
        Err(failed)
    }

    async fn read(&self, head: &ObjectHead) -> Result<Vec<u8>, JetStreamError> {
        if head.size > VALUE_BYTES_MAX {
            let why = format!("a value of {} bytes is too large", head.size);
            return Err(JetStreamError::Unreadable(why));
        }
        let (stream, subject) = (self.stream(), self.chunk_subject(&head.chunks));
        let (mut bytes, mut next) = (Vec::new(), 1);
        while (bytes.len() as u64) < head.size {
            let which = json!({"seq": next, "next_by_subj": subject});
            let (sequence, chunk) = self.jetstream.message(&stream, &which).await?;
            bytes.extend_from_slice(&chunk);
            next = sequence + 1;
        }
        match digest(&bytes) == head.digest {
            true => Ok(bytes),
            false => Err(JetStreamError::Unreadable(
                "the bytes are not those that were written".to_owned(),
            )),
        }
    }

    /// Stores the bytes of a value; nobody sees them before [`Self::publish`]. `name` names these chunks and no others: it begins with the time
    /// in milliseconds, in 12 hexadecimal digits.
    pub async fn upload(&self, name: &str, bytes: &[u8]) -> Result<(), JetStreamError> {
        let subject = self.chunk_subject(name);
        for chunk in bytes.chunks(CHUNK_BYTES) {
            let chunk = Bytes::copy_from_slice(chunk);
            self.write(&subject, None, chunk).await?;
        }
        Ok(())
    }

    /// Writes one message. A bucket that was created while the server still deleted another one of that name refuses every write and holds nothing: it is
    /// deleted, so that the next [`Self::ensure`] creates a working one.
    async fn write(
        &self,
        subject: &str,
        headers: Option<HeaderMap>,
        body: Bytes,
    ) -> Result<(), JetStreamError> {
        let written = self.jetstream.send(subject, headers, body).await;
        if let Err(error) = &written
            && error.has_lost_files()
        {
            self.delete().await?;
        }
        written.map(drop)
    }

    /// Makes uploaded bytes the value of `name`, if it is still the one that `before` tells of.
    pub async fn publish(
        &self,
        name: &str,
        before: &ObjectHead,
        chunks: &str,
        bytes: &[u8],
        labels: &BTreeMap<String, String>,
    ) -> Result<(), JetStreamError> {
        let info = json!({
            "name": name,
            "bucket": self.bucket,
            "nuid": chunks,
            "size": bytes.len(),
            "chunks": bytes.len().div_ceil(CHUNK_BYTES),
            "digest": digest(bytes),
            "metadata": labels,
            "options": {"max_chunk_size": CHUNK_BYTES},
        });
        let mut headers = HeaderMap::new();
        let revision = before.revision.to_string();
        headers.insert("Nats-Expected-Last-Subject-Sequence", revision.as_str());
        headers.insert("Nats-Rollup", "sub");
        let body = Bytes::from(info.to_string());
        let subject = self.head_subject(name);
        self.write(&subject, Some(headers), body).await
    }

    /// Takes away the chunks of a value that was replaced, and those of uploads that were never finished. `now_ms` is the Unix time.
    pub async fn sweep(
        &self,
        name: &str,
        replaced: &ObjectHead,
        now_ms: u64,
    ) -> Result<(), JetStreamError> {
        let current = self.head(name).await?.chunks;
        let stream = self.stream();
        let filter = json!({ "subjects_filter": self.chunk_subject("*") });
        let api = format!("STREAM.INFO.{stream}");
        let info = self.jetstream.ask(&api, &filter).await?;
        let prefix = self.chunk_subject("");
        let subjects = info["state"]["subjects"].as_object();
        for subject in subjects.into_iter().flat_map(serde_json::Map::keys) {
            let Some(chunks) = subject.strip_prefix(&prefix) else {
                continue;
            };
            let is_replaced = chunks == replaced.chunks;
            if chunks != current && (is_replaced || is_garbage(chunks, now_ms)) {
                self.jetstream.purge_subject(&stream, subject).await?;
            }
        }
        Ok(())
    }
}

/// Whether chunks of this name are so old that nobody uploads them any more. What others name in another way is left alone.
fn is_garbage(chunks: &str, now_ms: u64) -> bool {
    let made = chunks
        .get(..12)
        .and_then(|at| u64::from_str_radix(at, 16).ok());
    made.is_some_and(|made| made.saturating_add(GARBAGE_AGE.as_millis() as u64) < now_ms)
}

fn digest(bytes: &[u8]) -> String {
    let mut context = Context::new(&SHA256);
    context.update(bytes);
    format!("SHA-256={}", URL_SAFE.encode(context.finish()))
}

#[cfg(test)]
mod tests {
    use super::is_garbage;

    #[test]
    fn chunks_of_an_old_upload_are_garbage() {
        let name = format!("{:012x}{:08x}", 1_000_000_u64, 7);
        assert!(!is_garbage(&name, 1_600_000) && is_garbage(&name, 1_600_001));
        assert!(!is_garbage("ZZZ", u64::MAX), "not named by us");
    }
}
