//! TLS at the door.
//!
//! Answers one question: with which certificate do we show ourselves? Files are read
//! and checked at the start; a renewed certificate is taken over while connections run, and one that does not fit
//! changes nothing.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use kvasir_tasks::Tasks;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{Error, ServerConfig};

use kvasir_upstream::{PEM_BYTES_MAX, TlsError, TlsFile, certificates, provider, read_bounded};

use crate::http::debounce::Debounce;

/// Between two looks at the files of our certificate.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// What clients may speak, best first.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Our certificate at the door. Clones are one.
#[derive(Clone)]
pub struct ServerTls {
    acceptor: TlsAcceptor,
    shown: Arc<CurrentCertificate>,
    files: Files,
    /// What the files held when they were first read.
    first: Arc<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerTls({})", self.files.certificate.display())
    }
}

#[derive(Clone, Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
}

/// The certificate that is shown now.
#[derive(Debug)]
struct CurrentCertificate(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(
            &self.0.read().unwrap_or_else(PoisonError::into_inner),
        ))
    }
}

/// What the two files hold.
type Content = Result<(Vec<u8>, Vec<u8>), TlsError>;

impl ServerTls {
    /// Reads a certificate chain and its key, both PEM.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let files = Files {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
        };
        let (chain, key) = files.read()?;
        let shown = Arc::new(CurrentCertificate(RwLock::new(files.check(&chain, &key)?)));
        let unusable = |error: Error| TlsError::new(TlsFile::Certificate, certificate, error);
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::<CurrentCertificate>::clone(&shown));
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        Ok(Self {
            acceptor: TlsAcceptor::from(Arc::new(config)),
            shown,
            files,
            first: Arc::new((chain, key)),
        })
    }

    pub(crate) fn acceptor(&self) -> &TlsAcceptor {
        &self.acceptor
    }

    /// Takes renewed files over from now on.
    pub(crate) fn follow(&self, tasks: &Tasks) {
        let (tls, ending) = (self.clone(), tasks.clone());
        tasks.spawn(async move {
            let mut content: Debounce<Content> = Debounce::on(Ok((*tls.first).clone()));
            loop {
                let files = tls.files.clone();
                let Ok(now) = tokio::task::spawn_blocking(move || files.read()).await else {
                    return;
                };
                if let Some(now) = content.look(now) {
                    tls.renew(now);
                }
                tokio::select! {
                    () = ending.draining() => return,
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
            }
        });
    }

    fn renew(&self, content: &Content) {
        let checked = match content {
            Ok((chain, key)) => self.files.check(chain, key),
            Err(error) => Err(error.clone()),
        };
        match checked {
            Ok(certified) => {
                let mut shown = self.shown.0.write().unwrap_or_else(PoisonError::into_inner);
                *shown = certified;
                tracing::info!(path = %self.files.certificate.display(), "new certificate taken over");
            }
            Err(error) => {
                tracing::error!(%error, "new certificate not taken over; the old one is still shown");
            }
        }
    }
}

impl Files {
    fn read(&self) -> Content {
        let read = |file, path: &Path| {
            let content = read_bounded(path, PEM_BYTES_MAX);
            content.map_err(|error| TlsError::new(file, path, error))
        };
        let chain = read(TlsFile::Certificate, &self.certificate)?;
        Ok((chain, read(TlsFile::Key, &self.key)?))
    }

    /// The pair, if it is one.
    fn check(&self, chain: &[u8], key: &[u8]) -> Result<Arc<CertifiedKey>, TlsError> {
        let of_chain = |why: String| TlsError::new(TlsFile::Certificate, &self.certificate, why);
        let of_key = |why: String| TlsError::new(TlsFile::Key, &self.key, why);
        let chain = certificates(chain).map_err(of_chain)?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| of_key(format!("holds no private key in PEM ({error})")))?;
        let provider = provider();
        let key = provider.key_provider.load_private_key(key);
        let key = key.map_err(|error| of_key(error.to_string()))?;
        let certified = CertifiedKey::new(chain, key);
        match certified.keys_match() {
            Ok(()) => Ok(Arc::new(certified)),
            Err(Error::InconsistentKeys(_)) => {
                let certificate = self.certificate.display();
                Err(of_key(format!("is not the key of {certificate}")))
            }
            Err(error) => Err(of_chain(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_rustls::rustls::pki_types::CertificateDer;

    use super::*;

    fn shown(tls: &ServerTls) -> CertificateDer<'static> {
        let shown = tls.shown.0.read().unwrap();
        shown.cert.first().unwrap().clone()
    }

    /// Goal: a renewed pair is taken over, one that does not fit is not. Time is the runtime's own.
    #[tokio::test(start_paused = true)]
    async fn a_renewed_certificate_is_taken_over() {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tls");
        let to = std::env::temp_dir().join(format!("kvasir-tls-{}", std::process::id()));
        std::fs::create_dir_all(&to).unwrap();
        let copy = |name: &str, as_name: &str| {
            std::fs::copy(from.join(name), to.join(as_name)).unwrap();
        };
        copy("server.pem", "cert.pem");
        copy("server-key.pem", "key.pem");
        let tls = ServerTls::read(&to.join("cert.pem"), &to.join("key.pem")).unwrap();
        let (first, tasks) = (shown(&tls), Tasks::new());
        tls.follow(&tasks);
        let some_looks = || tokio::time::sleep(4 * LOOK_EVERY);
        some_looks().await;
        copy("second.pem", "cert.pem");
        some_looks().await;
        assert_eq!(shown(&tls), first, "its key has not come yet");
        copy("second-key.pem", "key.pem");
        some_looks().await;
        assert_ne!(shown(&tls), first);
        std::fs::remove_dir_all(&to).unwrap();
        some_looks().await;
        assert_ne!(shown(&tls), first, "what is gone changes nothing");
        tasks.stop();
    }
}
