//! The store in etcd, against a real server that is stopped, started and wiped. Without one on this machine each test says so and is
//! skipped; `./test` installs it.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvasir_discovery::{Bucket, EtcdOptions, EtcdStore, Store};
use kvasir_tasks::Tasks;

use crate::rig::{Folder, SOON, endpoint, next};

/// Seconds; leases are kept alive every third of it.
const LEASE_TTL: u64 = 3;

/// A server of this test alone.
struct Etcd {
    folder: Folder,
    ports: [u16; 2],
    process: Option<Child>,
}

impl Etcd {
    /// None if etcd is not installed.
    fn start() -> Option<Self> {
        let version = Command::new("etcd").arg("--version").output();
        if !version.is_ok_and(|version| version.status.success()) {
            println!(
                "SKIPPED: etcd is not installed (Debian: etcd-server), so nothing is known of the etcd backend here"
            );
            return None;
        }
        let free = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (one, two) = (free(), free());
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let mut this = Self {
            folder: Folder::new(),
            ports: [port(&one), port(&two)],
            process: None,
        };
        drop((one, two));
        this.run();
        Some(this)
    }

    fn run(&mut self) {
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let (client, peer) = (url(self.ports[0]), url(self.ports[1]));
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(self.folder.path());
        for (option, value) in [
            ("--listen-client-urls", client.clone()),
            ("--advertise-client-urls", client),
            ("--listen-peer-urls", peer.clone()),
            ("--initial-advertise-peer-urls", peer.clone()),
            ("--initial-cluster", format!("default={peer}")),
        ] {
            command.arg(option).arg(value);
        }
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        self.process = Some(command.spawn().unwrap());
    }

    fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    fn wipe(&self) {
        let _ = std::fs::remove_dir_all(self.folder.path());
    }

    fn store(&self, tasks: &Tasks) -> EtcdStore {
        let options = EtcdOptions {
            endpoints: format!("http://127.0.0.1:{}", self.ports[0]),
            lease_ttl: LEASE_TTL,
            ..EtcdOptions::default()
        };
        EtcdStore::new(options, tasks).unwrap()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The next change that is not about reaching the server, which takes its time to start.
async fn next_record(watch: &mut kvasir_discovery::Watch) -> String {
    loop {
        let change = next(watch).await;
        if !matches!(&*change, "lost" | "restored") {
            return change;
        }
    }
}

async fn until(watch: &mut kvasir_discovery::Watch, wanted: &str) {
    let found = async { while next(watch).await != wanted {} };
    tokio::time::timeout(SOON, found).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_joins_changes_and_leaves_and_its_id_is_its_lease() {
    let Some(etcd) = Etcd::start() else { return };
    let tasks = Tasks::new();
    let store = etcd.store(&tasks);
    let mut watch = store.watch(&Bucket::ALL);
    assert_eq!(next_record(&mut watch).await, "synced");
    let lease = store.lease().await.unwrap();
    let id = lease.id();
    lease.put(endpoint(id, "a")).await.unwrap();
    assert_eq!(
        next_record(&mut watch).await,
        format!("+dynamo/backend/generate/{id:x} a")
    );
    lease.put(endpoint(id, "b")).await.unwrap();
    assert_eq!(
        next_record(&mut watch).await,
        format!("~dynamo/backend/generate/{id:x} b")
    );
    // More than one page of them, and the lease outlives its lifetime meanwhile.
    for number in 0..1100 {
        lease.put(endpoint(number, "x")).await.unwrap();
    }
    let mut second = store.watch(&[Bucket::Instances, Bucket::Models]);
    let mut found = 0;
    while next_record(&mut second).await != "synced" {
        found += 1;
    }
    assert_eq!(found, 1101);
    lease.revoke().await.unwrap();
    until(&mut watch, &format!("-dynamo/backend/generate/{id:x}")).await;
    assert!(lease.put(endpoint(id, "a")).await.is_err());
    tasks.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_takes_nothing_and_its_changes_are_told_when_it_is_back() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let tasks = Tasks::new();
    let store = etcd.store(&tasks);
    let mut watch = store.watch(&[Bucket::Instances]);
    assert_eq!(next_record(&mut watch).await, "synced");
    let lease = store.lease().await.unwrap();
    lease.put(endpoint(1, "a")).await.unwrap();
    until(&mut watch, "+dynamo/backend/generate/1 a").await;
    etcd.stop();
    until(&mut watch, "lost").await;
    assert!(lease.put(endpoint(2, "b")).await.is_err());
    assert!(watch.try_next().is_none());
    etcd.run();
    // What could not be written is, as soon as the lease is kept alive again.
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let change = next(&mut watch).await;
        match &*change {
            "restored" | "+dynamo/backend/generate/2 b" => seen.push(change),
            "lost" => {}
            other => panic!("{other}"),
        }
    }
    tasks.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_lost_is_granted_anew_with_its_records() {
    let Some(mut etcd) = Etcd::start() else {
        return;
    };
    let tasks = Tasks::new();
    let store = etcd.store(&tasks);
    let mut patient = store.watch(&[Bucket::Instances]);
    let mut watch = store.watch(&[Bucket::Instances]).with_grace(Duration::ZERO);
    assert_eq!(next_record(&mut watch).await, "synced");
    let lease = store.lease().await.unwrap();
    lease.put(endpoint(1, "a")).await.unwrap();
    until(&mut watch, "+dynamo/backend/generate/1 a").await;
    until(&mut patient, "+dynamo/backend/generate/1 a").await;
    // It comes back knowing nothing of anybody.
    etcd.stop();
    etcd.wipe();
    etcd.run();
    let id = lease.id();
    let putting = async {
        while lease.put(endpoint(id, "c")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, putting).await.unwrap();
    let new = format!("+dynamo/backend/generate/{id:x} c");
    until(&mut watch, &new).await;
    // The old record is there again; whether a watch ever missed it depends on who was quicker, it or the lease.
    let mut late = store.watch(&[Bucket::Instances]);
    until(&mut late, "+dynamo/backend/generate/1 a").await;
    // Who waits for records to come back hears of nothing but the new one.
    assert_eq!(next_record(&mut patient).await, new);
    lease.revoke().await.unwrap();
    until(&mut watch, "-dynamo/backend/generate/1").await;
    until(&mut patient, "-dynamo/backend/generate/1").await;
    tasks.stop();
}

#[tokio::test]
async fn what_is_not_there_is_named() {
    let tasks = Tasks::new();
    let options = EtcdOptions {
        endpoints: "http://127.0.0.1:9".into(),
        ..EtcdOptions::default()
    };
    let store = EtcdStore::new(options, &tasks).unwrap();
    let error = store.lease().await.err().unwrap().to_string();
    assert!(
        error.starts_with("http://127.0.0.1:9 cannot be reached: "),
        "{error}"
    );
    let mut watch = store.watch(&[Bucket::Instances]);
    assert_eq!(next(&mut watch).await, "lost");
    tasks.stop();
}
