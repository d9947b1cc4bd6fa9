//! Credentials of the API server: a service account, client certificates, authorities.

use std::sync::Arc;

use kvasir_discovery::{Bucket, KubernetesOptions, KubernetesStore, Store};
use kvasir_tasks::Tasks;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use crate::api_server::ApiServer;
use crate::rig::{Folder, next};

fn pem(name: &str) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tls/");
    format!("{root}{name}")
}

/// A server that is `localhost`; it asks for certificates of our authority if it is told to.
async fn server(asks: bool) -> ApiServer {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap();
    let builder = match asks {
        false => builder.with_no_client_auth(),
        true => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates("ca.pem") {
                roots.add(certificate).unwrap();
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let key = PrivateKeyDer::from_pem_file(pem("server-key.pem")).unwrap();
    let config = builder.with_single_cert(certificates("server.pem"), key);
    let config = Arc::new(config.unwrap());
    ApiServer::start_with(Some(TlsAcceptor::from(config))).await
}

fn certificates(name: &str) -> Vec<CertificateDer<'static>> {
    let read = CertificateDer::pem_file_iter(pem(name)).unwrap();
    read.collect::<Result<_, _>>().unwrap()
}

/// The first thing that a watch with this kubeconfig tells.
async fn first_word(server: &ApiServer, cluster: &str, user: &str) -> String {
    let folder = Folder::new();
    std::fs::create_dir_all(folder.path()).unwrap();
    let url = server.url().replace("127.0.0.1", "localhost");
    let config = format!(
        "{{current-context: c, contexts: [{{name: c, context: {{cluster: k, user: u, namespace: ns}}}}],\n\
         clusters: [{{name: k, cluster: {{server: '{url}', {cluster}}}}}], users: [{{name: u, user: {{{user}}}}}]}}"
    );
    let path = folder.path().join("config");
    std::fs::write(&path, config).unwrap();
    let options = KubernetesOptions {
        kubeconfig: Some(path.display().to_string()),
        ..KubernetesOptions::default()
    };
    let tasks = Tasks::new();
    let store = KubernetesStore::new(options, None, &tasks).unwrap();
    let said = next(&mut store.watch(&[Bucket::Instances])).await;
    tasks.stop();
    said
}

#[tokio::test]
async fn a_server_is_believed_only_if_its_authority_vouches_for_it() {
    let server = server(false).await;
    let authority = |name: &str| format!("certificate-authority: '{}'", pem(name));
    server.ask_for_token("secret");
    let ours = authority("ca.pem");
    assert_eq!(first_word(&server, &ours, "token: secret").await, "synced");
    assert_eq!(first_word(&server, &ours, "token: wrong").await, "lost");
    let other = authority("other-ca.pem");
    assert_eq!(first_word(&server, &other, "token: secret").await, "lost");
}

#[tokio::test]
async fn a_client_certificate_is_shown() {
    use base64::Engine;
    let server = server(true).await;
    let data = |name: &str| {
        let bytes = std::fs::read(pem(name)).unwrap();
        base64::engine::general_purpose::STANDARD.encode(bytes)
    };
    let authority = format!("certificate-authority-data: {}", data("ca.pem"));
    let files = format!(
        "client-certificate: '{}', client-key: '{}'",
        pem("server.pem"),
        pem("server-key.pem")
    );
    assert_eq!(first_word(&server, &authority, &files).await, "synced");
    let inline = format!(
        "client-certificate-data: {}, client-key-data: {}",
        data("server.pem"),
        data("server-key.pem")
    );
    assert_eq!(first_word(&server, &authority, &inline).await, "synced");
    assert_eq!(first_word(&server, &authority, "token: x").await, "lost");
}

#[tokio::test]
async fn in_a_pod_the_service_account_is_used() {
    let server = server(false).await;
    server.ask_for_token("mounted");
    let folder = Folder::new();
    std::fs::create_dir_all(folder.path()).unwrap();
    std::fs::copy(pem("ca.pem"), folder.path().join("ca.crt")).unwrap();
    std::fs::write(folder.path().join("token"), "mounted\n").unwrap();
    std::fs::write(folder.path().join("namespace"), "ns").unwrap();
    let port = server.url().rsplit(':').next().unwrap().parse().unwrap();
    let options = KubernetesOptions {
        service_account: folder.path().to_owned(),
        service: Some(("127.0.0.1".into(), port)),
        ..KubernetesOptions::default()
    };
    let tasks = Tasks::new();
    let store = KubernetesStore::new(options, None, &tasks).unwrap();
    assert_eq!(
        store.address(),
        format!("https://127.0.0.1:{port} namespace ns")
    );
    assert_eq!(next(&mut store.watch(&[Bucket::Instances])).await, "synced");
    let error = store.lease().await.err().unwrap().to_string();
    assert!(error.contains("POD_NAME"), "{error}");
    tasks.stop();
}
