//! TLS on the way to workers' request ports.

use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Why certificates or a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlaneTlsError {
    /// The text holds no certificate.
    #[error("no certificate in PEM was found")]
    NoCertificate,
    /// The text holds no private key.
    #[error("no private key in PEM was found")]
    NoKey,
    /// They do not fit, or are of a kind that is not known.
    #[error("the certificate or its key cannot be used")]
    Unusable(#[from] rustls::Error),
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, PlaneTlsError> {
    let all = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let all = all.map_err(|_| PlaneTlsError::NoCertificate)?;
    match all.is_empty() {
        true => Err(PlaneTlsError::NoCertificate),
        false => Ok(all),
    }
}

/// Trusts workers whose certificates this authority signed.
pub fn client_tls(authority_pem: &[u8]) -> Result<TlsConnector, PlaneTlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(authority_pem)? {
        roots.add(certificate)?;
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Shows this certificate to frontends.
pub fn server_tls(certificate_pem: &[u8], key_pem: &[u8]) -> Result<TlsAcceptor, PlaneTlsError> {
    let chain = certificates(certificate_pem)?;
    let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(|_| PlaneTlsError::NoKey)?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// A client that believes whatever certificate it is shown.
#[cfg(feature = "nats")]
pub(crate) fn any_certificate() -> ClientConfig {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(insecure::AnyCertificate(Arc::clone(&provider)));
    // The provider has the suites of both versions, so that nothing here can be refused.
    #[expect(
        clippy::expect_used,
        reason = "the provider is our own and has every suite"
    )]
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has the suites of TLS 1.2 and 1.3")
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth()
}

#[cfg(feature = "nats")]
mod insecure {
    //! No look at who a server is. The connection is still encrypted, by whoever answers.

    use std::sync::Arc;

    use tokio_rustls::rustls::client::danger::{
        HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
    };
    use tokio_rustls::rustls::crypto::{
        CryptoProvider, verify_tls12_signature, verify_tls13_signature,
    };
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use tokio_rustls::rustls::{DigitallySignedStruct, Error, SignatureScheme};

    #[derive(Debug)]
    pub(super) struct AnyCertificate(pub(super) Arc<CryptoProvider>);

    impl ServerCertVerifier for AnyCertificate {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.0.signature_verification_algorithms;
            verify_tls12_signature(message, certificate, signed, algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.0.signature_verification_algorithms;
            verify_tls13_signature(message, certificate, signed, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.0.signature_verification_algorithms.supported_schemes()
        }
    }
}
