//! Which certificates are trusted where some are given: those that they signed, and the very ones.
//!
//! A certificate that an engine made for itself is often an authority by its own words (`openssl req -x509` says so), and
//! the library takes no authority for a server. Given to us byte for byte, it is trusted as what it is.
//!
//! What always holds: such a certificate is of this time and of this name; the server has shown that it has the key.

use std::sync::Arc;

use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use super::provider;

/// What the library calls it when a server shows an authority's certificate. It says so after it has looked at the dates.
const AUTHORITY_AS_SERVER: &str = "CaUsedAsEndEntity";

/// Trusts what the given certificates signed, and themselves.
#[derive(Debug)]
pub(super) struct GivenCertificates {
    signed: Arc<WebPkiServerVerifier>,
    given: Vec<CertificateDer<'static>>,
}

impl GivenCertificates {
    pub(super) fn new(given: Vec<CertificateDer<'static>>) -> Result<Arc<Self>, String> {
        let mut roots = RootCertStore::empty();
        for certificate in &given {
            let added = roots.add(certificate.clone());
            added.map_err(|error| error.to_string())?;
        }
        let signed = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider());
        let signed = signed.build().map_err(|error| error.to_string())?;
        Ok(Arc::new(Self { signed, given }))
    }
}

impl ServerCertVerifier for GivenCertificates {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.signed.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        );
        match verified {
            Err(Error::InvalidCertificate(CertificateError::Other(other)))
                if other.to_string() == AUTHORITY_AS_SERVER && self.given.contains(end_entity) =>
            {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verifier = &self.signed;
        verifier.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verifier = &self.signed;
        verifier.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.signed.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio_rustls::rustls::pki_types::pem::PemObject;

    use super::*;

    const PEM: &[u8] = include_bytes!("../../../../testdata/tls/self-signed.pem");

    /// Goal: a certificate that is given is not trusted before or after its time, nor under another name.
    #[test]
    fn a_given_certificate_has_its_time_and_its_name() {
        let given = CertificateDer::from_pem_slice(PEM).unwrap();
        let verifier = GivenCertificates::new(vec![given.clone()]).unwrap();
        let check = |name: &'static str, years: u64| {
            let now = UnixTime::since_unix_epoch(Duration::from_secs(years * 31_557_600));
            let name = ServerName::try_from(name).unwrap();
            let verified = verifier.verify_server_cert(&given, &[], &name, &[], now);
            verified.map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(check("localhost", 80), Ok(()));
        for (name, years, cause) in [
            ("localhost", 10, "not valid yet"),
            ("localhost", 200, "expired"),
            ("other", 80, "not valid for name"),
        ] {
            let error = check(name, years).unwrap_err();
            assert!(error.contains(cause), "{error}");
        }
    }
}
