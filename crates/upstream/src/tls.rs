//! TLS on the way to workers, and what is wrong with a file of certificates.
//!
//! Answers one question: which certificates of workers do we trust? Those that are given, and what they signed
//! ([`given`]); without any, what the system trusts.

mod given;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::bounded_file::{PEM_BYTES_MAX, read_bounded};
use given::GivenCertificates;

/// What we speak to workers.
const WORKER_PROTOCOL: &[u8] = b"http/1.1";

/// Which file is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsFile {
    /// Our certificate.
    Certificate,
    /// Its key.
    Key,
    /// The authority of workers.
    WorkerAuthority,
}

/// Why a file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {why}", path.display())]
pub struct TlsError {
    /// Which of them.
    pub file: TlsFile,
    /// Where it is.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
}

impl TlsError {
    /// `why` a file cannot be used.
    pub fn new(file: TlsFile, path: &Path, why: impl fmt::Display) -> Self {
        Self {
            file,
            path: path.to_owned(),
            why: why.to_string(),
        }
    }
}

/// The cryptography of every connection.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The certificates in a PEM file.
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if all.is_empty() => Err("holds no certificate in PEM".into()),
        Ok(all) => Ok(all),
        Err(error) => Err(format!("holds no certificate in PEM ({error})")),
    }
}

/// Which certificates of workers are trusted. Clones are one.
#[derive(Clone, Default)]
pub struct WorkerTls {
    /// The system's roots are read when a worker first needs them.
    connector: Arc<OnceLock<TlsConnector>>,
}

impl fmt::Debug for WorkerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerTls").finish_non_exhaustive()
    }
}

impl WorkerTls {
    /// Trusts the certificates in this file and those that they signed, and no others.
    pub fn with_authority(path: &Path) -> Result<Self, TlsError> {
        let of = |why: String| TlsError::new(TlsFile::WorkerAuthority, path, why);
        let pem = read_bounded(path, PEM_BYTES_MAX).map_err(|error| of(error.to_string()))?;
        let given = GivenCertificates::new(certificates(&pem).map_err(of)?).map_err(of)?;
        let connector = connector(given).map_err(of)?;
        Ok(Self {
            connector: Arc::new(OnceLock::from(connector)),
        })
    }

    /// Makes connections to workers secure, or to another frontend.
    pub fn connector(&self) -> Result<TlsConnector, String> {
        if let Some(connector) = self.connector.get() {
            return Ok(connector.clone());
        }
        // What fails is tried again: this process may only have been short of descriptors.
        let connector = system_connector()?;
        Ok(self.connector.get_or_init(|| connector).clone())
    }
}

/// Trusts what the system trusts.
fn system_connector() -> Result<TlsConnector, String> {
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::warn!(%error, "part of the system's certificates cannot be read");
    }
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    match added {
        0 => Err(
            "the system has no certificates; name an authority with --worker-tls-ca-path".into(),
        ),
        _ => {
            let signed = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider());
            connector(signed.build().map_err(|error| error.to_string())?)
        }
    }
}

fn connector(verifier: Arc<dyn ServerCertVerifier>) -> Result<TlsConnector, String> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = vec![WORKER_PROTOCOL.to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}
