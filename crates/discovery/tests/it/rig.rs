//! What tests of backends share: records to announce, a folder that goes, and waiting for what a watch tells.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvasir_discovery::{Change, Instance, Record, RequestTransport, Watch};

/// Longest wait for something that comes within milliseconds on a quiet machine.
pub(crate) const SOON: Duration = Duration::from_secs(30);

pub(crate) fn endpoint(id: u64, address: &str) -> Record {
    Record::Endpoint(Instance {
        component: "backend".into(),
        endpoint: "generate".into(),
        namespace: "dynamo".into(),
        instance_id: id,
        transport: RequestTransport::Tcp(address.into()),
        device_type: None,
        request_plane_codec: Some("msgpack".into()),
    })
}

/// A folder of this test alone.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvasir-discovery-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The files of a bucket, in order.
    pub(crate) fn files(&self, bucket: &str) -> Vec<String> {
        let folder = std::fs::read_dir(self.0.join(bucket));
        let names = folder.into_iter().flatten().flatten();
        let mut names: Vec<String> = names
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The next change in a few words; fails if none comes.
pub(crate) async fn next(watch: &mut Watch) -> String {
    let change = tokio::time::timeout(SOON, watch.next()).await;
    match change.expect("no change came") {
        Change::Added(key, record) => format!("+{} {}", key.key, address(&record)),
        Change::Updated(key, record) => format!("~{} {}", key.key, address(&record)),
        Change::Removed(key) => format!("-{}", key.key),
        Change::Synced => "synced".into(),
        Change::Lost(_) => "lost".into(),
        Change::Restored => "restored".into(),
    }
}

fn address(record: &Record) -> String {
    match record {
        Record::Endpoint(Instance {
            transport: RequestTransport::Tcp(address),
            ..
        }) => address.clone(),
        other => other.key().key,
    }
}
