//! The store in a folder, against the real file system.

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use kvasir_discovery::{Bucket, FileStore, Store};
use kvasir_tasks::Tasks;

use crate::rig::{Folder, SOON, endpoint, next};

/// Files are touched, and old ones deleted, every third of it.
const TTL: Duration = Duration::from_secs(6);

fn name(id: u64) -> String {
    format!("dynamo%2Fbackend%2Fgenerate%2F{id:x}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_joins_changes_and_leaves() {
    let (folder, tasks) = (Folder::new(), Tasks::new());
    let store = FileStore::new(folder.path(), &tasks);
    let mut watch = store.watch(&Bucket::ALL);
    assert_eq!(next(&mut watch).await, "synced");
    let lease = store.lease().await.unwrap();
    let id = lease.id();
    lease.put(endpoint(id, "a")).await.unwrap();
    assert_eq!(folder.files("v1/instances"), [name(id)]);
    assert_eq!(
        next(&mut watch).await,
        format!("+dynamo/backend/generate/{id:x} a")
    );
    lease.put(endpoint(id, "b")).await.unwrap();
    assert_eq!(folder.files("v1/instances"), [name(id)]);
    assert_eq!(
        next(&mut watch).await,
        format!("~dynamo/backend/generate/{id:x} b")
    );
    lease.put(endpoint(7, "x")).await.unwrap();
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/7 x");
    lease.remove(endpoint(7, "x").key()).await.unwrap();
    assert_eq!(next(&mut watch).await, "-dynamo/backend/generate/7");
    lease.revoke().await.unwrap();
    assert!(folder.files("v1/instances").is_empty());
    assert_eq!(
        next(&mut watch).await,
        format!("-dynamo/backend/generate/{id:x}")
    );
    assert!(lease.put(endpoint(id, "a")).await.is_err());
    tasks.stop();
}

/// A dead worker's files are made old here instead of waited for: what is waited for has no upper bound that matters.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_live_worker_touches_its_files_and_what_nobody_touches_is_swept() {
    let (folder, tasks) = (Folder::new(), Tasks::new());
    let store = FileStore::new(folder.path(), &tasks).with_ttl(TTL);
    let (live, dead) = (store.lease().await.unwrap(), store.lease().await.unwrap());
    live.put(endpoint(1, "a")).await.unwrap();
    dead.put(endpoint(2, "b")).await.unwrap();
    dead.put(endpoint(3, "c")).await.unwrap();
    // As a process that dies: nobody touches its files any more.
    drop(dead);
    let bucket = folder.path().join("v1/instances");
    let file = |id| File::open(bucket.join(name(id))).unwrap();
    let old = || SystemTime::now() - 100 * TTL;
    file(2).set_modified(old()).unwrap();
    fs::write(bucket.join(".tmp_0123456789abcdef"), "{").unwrap();
    let mut watch = store.watch(&[Bucket::Instances]);
    // Folders have no order.
    let mut found = [next(&mut watch).await, next(&mut watch).await];
    found.sort();
    assert_eq!(
        found,
        [
            "+dynamo/backend/generate/1 a",
            "+dynamo/backend/generate/3 c"
        ]
    );
    assert_eq!(next(&mut watch).await, "synced");
    let written = file(1).metadata().unwrap().modified().unwrap();
    file(3).set_modified(old()).unwrap();
    assert_eq!(next(&mut watch).await, "-dynamo/backend/generate/3");
    assert_eq!(
        folder.files("v1/instances"),
        [".tmp_0123456789abcdef", &*name(1)]
    );
    let touched = async {
        while file(1).metadata().unwrap().modified().unwrap() <= written {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, touched).await.unwrap();
    tasks.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_somebody_deleted_is_announced_again() {
    let (folder, tasks) = (Folder::new(), Tasks::new());
    let store = FileStore::new(folder.path(), &tasks).with_ttl(TTL);
    let lease = store.lease().await.unwrap();
    lease.put(endpoint(1, "a")).await.unwrap();
    let mut watch = store.watch(&[Bucket::Instances]);
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/1 a");
    assert_eq!(next(&mut watch).await, "synced");
    fs::remove_file(folder.path().join("v1/instances").join(name(1))).unwrap();
    assert_eq!(next(&mut watch).await, "-dynamo/backend/generate/1");
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/1 a");
    tasks.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_that_is_gone_takes_nothing_away() {
    let (folder, tasks) = (Folder::new(), Tasks::new());
    let bucket = folder.path().join("v1/instances");
    fs::create_dir_all(&bucket).unwrap();
    fs::write(bucket.join(name(1)), endpoint(1, "a").to_bytes()).unwrap();
    fs::write(bucket.join("not%a%key"), "{}").unwrap();
    fs::write(bucket.join(name(2)), "no record").unwrap();
    let store = FileStore::new(folder.path(), &tasks);
    let mut watch = store.watch(&Bucket::ALL);
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/1 a");
    assert_eq!(next(&mut watch).await, "synced");
    let aside = folder.path().with_extension("aside");
    fs::rename(folder.path(), &aside).unwrap();
    assert_eq!(next(&mut watch).await, "lost");
    fs::rename(&aside, folder.path()).unwrap();
    fs::write(bucket.join(name(3)), endpoint(3, "c").to_bytes()).unwrap();
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/3 c");
    assert_eq!(next(&mut watch).await, "restored");
    tasks.stop();
}

/// Another process may hold a folder's lock for a moment: a writer waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_waits_for_the_lock_of_the_folder() {
    let (folder, tasks) = (Folder::new(), Tasks::new());
    let store = FileStore::new(folder.path(), &tasks);
    let bucket = folder.path().join("v1/instances");
    fs::create_dir_all(&bucket).unwrap();
    let held = File::open(&bucket).unwrap();
    held.lock().unwrap();
    let lease = store.lease().await.unwrap();
    let mut writing = tokio::task::JoinSet::new();
    writing.spawn(async move { lease.put(endpoint(1, "a")).await });
    let waits = tokio::time::timeout(Duration::from_millis(100), writing.join_next());
    assert!(waits.await.is_err() && folder.files("v1/instances").is_empty());
    held.unlock().unwrap();
    writing.join_next().await.unwrap().unwrap().unwrap();
    assert_eq!(folder.files("v1/instances"), [name(1)]);
    tasks.stop();
}
