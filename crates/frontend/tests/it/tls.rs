//! TLS: clients that come in by it, workers that are reached by it, files that are wrong.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvasir_frontend::{AppOptions, Limits, MemberState, ServerTls};
use kvasir_tasks::Tasks;
use kvasir_upstream::{TlsFile, WorkerTls, parse_worker};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::engine::{ANSWER, DONE, FIRST, stream};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/tls")
        .join(name)
}

async fn secure_rig(engines: usize) -> Rig {
    let tls = ServerTls::read(&file("server.pem"), &file("server-key.pem")).unwrap();
    let limits = Limits {
        client_stall: Duration::from_millis(300),
        ..Limits::default()
    };
    let options = AppOptions {
        tls: Some(tls),
        limits,
        ..AppOptions::default()
    };
    let setup = Setup::options(options);
    Rig::with(engines, setup).await
}

async fn connect(rig: &Rig, protocols: &[&[u8]]) -> TlsStream<TcpStream> {
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(file("ca.pem")).unwrap();
    roots.add(ca).unwrap();
    let provider = Arc::new(ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|p| p.to_vec()).collect();
    let socket = TcpStream::connect(rig.address()).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    connector.connect(name, socket).await.unwrap()
}

#[tokio::test]
async fn http1_and_http2_come_in_under_tls() {
    let rig = secure_rig(1).await;
    let events = || stream(&[FIRST.as_bytes(), DONE.as_bytes()]);
    rig.stage.play(vec![events()]);
    let mut old = connect(&rig, &[b"http/1.1"]).await;
    assert_eq!(old.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{ASK_STREAM}",
        ASK_STREAM.len()
    );
    old.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    in_time("answer", old.read_to_string(&mut answer))
        .await
        .unwrap();
    assert!(
        answer.contains(FIRST.trim_end()) && answer.contains("[DONE]"),
        "{answer}"
    );

    rig.stage.play(vec![events()]);
    let new = connect(&rig, &[b"h2", b"http/1.1"]).await;
    assert_eq!(new.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) = hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(
        TokioExecutor::new(),
        TokioIo::new(new),
    )
    .await
    .unwrap();
    let driver = Tasks::new();
    driver.spawn(connection);
    let request = http::Request::post(format!("https://door{CHAT}"))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from_static(ASK_STREAM.as_bytes())))
        .unwrap();
    let answer = sender.send_request(request).await.unwrap();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, [FIRST, DONE].concat());
    drop(sender);
    driver.stop();
    rig.at_rest().await;
}

#[tokio::test]
async fn who_does_not_finish_the_handshake_is_left() {
    let rig = secure_rig(1).await;
    for begun in ["", "\u{16}\u{3}\u{1}", "GET / HTTP/1.1\r\nhost: x\r\n\r\n"] {
        let mut client = rig.client().await;
        client.send(begun).await;
        in_time("it is closed", async { while !client.closed().await {} }).await;
    }
    rig.at_rest().await;
}

/// Stands before an engine and takes TLS off.
async fn tls_engine(rig: &Rig, tasks: &Tasks) -> String {
    tls_engine_as(rig, tasks, "server").await
}

async fn tls_engine_as(rig: &Rig, tasks: &Tasks, name: &str) -> String {
    let chain = CertificateDer::from_pem_file(file(&format!("{name}.pem"))).unwrap();
    let key = PrivateKeyDer::from_pem_file(file(&format!("{name}-key.pem"))).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![chain], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (engine, spawner) = (rig.engines[0].address, tasks.clone());
    tasks.spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            spawner.spawn(async move {
                if let Ok(mut secure) = acceptor.accept(socket).await {
                    let mut plain = TcpStream::connect(engine).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut secure, &mut plain).await;
                }
            });
        }
    });
    format!("https://localhost:{port}")
}

#[tokio::test]
async fn workers_are_reached_by_https_if_their_authority_is_believed() {
    let tls = WorkerTls::with_authority(&file("ca.pem")).unwrap();
    let rig = Rig::with_fleet(1, Setup::usual(), |fleet| fleet.with_tls(tls)).await;
    let proxies = Tasks::new();
    let url = tls_engine(&rig, &proxies).await;
    assert!(rig.fleet.watch(parse_worker(&url).unwrap()));
    rig.joined(2).await;
    assert!(
        rig.fleet
            .forget(parse_worker(&rig.engines[0].url()).unwrap().id)
    );
    rig.joined(1).await;
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    rig.stage
        .play(vec![stream(&[FIRST.as_bytes(), DONE.as_bytes()])]);
    assert_eq!(
        rig.post(CHAT, ASK_STREAM).await.text(),
        [FIRST, DONE].concat()
    );
    let seen = rig.stage.seen().pop().unwrap();
    assert_eq!(seen.header("host"), [url.strip_prefix("https://").unwrap()]);

    let tls = WorkerTls::with_authority(&file("other-ca.pem")).unwrap();
    let rig = Rig::with_fleet(1, Setup::usual(), |fleet| fleet.with_tls(tls)).await;
    let url = tls_engine(&rig, &proxies).await;
    let address = parse_worker(&url).unwrap();
    assert!(rig.fleet.watch(address.clone()));
    until("it is not believed", || {
        let member = rig.app.members().get(address.id).unwrap();
        member.state == MemberState::Unreachable
    })
    .await;
    rig.joined(1).await;
    proxies.stop();
}

/// What `openssl req -x509` makes calls itself an authority: given to us, that very certificate is trusted, as curl does.
/// Another one of the same name and issuer is not, nor is it for another host.
#[tokio::test]
async fn a_certificate_that_an_engine_made_for_itself_is_trusted_if_it_is_given() {
    let proxies = Tasks::new();
    let cases = [
        ("self-signed", "self-signed", "localhost", true),
        ("self-signed", "self-signed", "127.0.0.1", false),
        ("self-signed-2", "self-signed", "localhost", false),
    ];
    for (given, shown, host, trusted) in cases {
        let tls = WorkerTls::with_authority(&file(&format!("{given}.pem"))).unwrap();
        let rig = Rig::with_fleet(1, Setup::usual(), |fleet| fleet.with_tls(tls)).await;
        let url = tls_engine_as(&rig, &proxies, shown).await;
        let worker = parse_worker(&url.replace("localhost", host)).unwrap();
        assert!(rig.fleet.watch(worker.clone()));
        let expected = match trusted {
            true => MemberState::Serving,
            false => MemberState::Unreachable,
        };
        until(&format!("{given} {shown} {host}"), || {
            rig.app.members().get(worker.id).unwrap().state == expected
        })
        .await;
    }
    proxies.stop();
}

#[test]
fn files_that_are_wrong_are_named() {
    let read = |certificate: &str, key: &str| {
        let error = ServerTls::read(&file(certificate), &file(key)).unwrap_err();
        (error.file, error.to_string())
    };
    for (certificate, key, at_fault, word) in [
        (
            "none.pem",
            "server-key.pem",
            TlsFile::Certificate,
            "No such file",
        ),
        ("server.pem", "none.pem", TlsFile::Key, "No such file"),
        (
            "server-key.pem",
            "server-key.pem",
            TlsFile::Certificate,
            "no certificate",
        ),
        ("server.pem", "server.pem", TlsFile::Key, "no private key"),
        (
            "make.sh",
            "server-key.pem",
            TlsFile::Certificate,
            "no certificate",
        ),
        (
            "server.pem",
            "second-key.pem",
            TlsFile::Key,
            "not the key of",
        ),
    ] {
        let (file, text) = read(certificate, key);
        assert_eq!(file, at_fault, "{text}");
        assert!(text.contains(word), "{text}");
    }
    let error = WorkerTls::with_authority(&file("server-key.pem"))
        .err()
        .unwrap();
    assert!(error.file == TlsFile::WorkerAuthority && error.to_string().contains("no certificate"));
}
