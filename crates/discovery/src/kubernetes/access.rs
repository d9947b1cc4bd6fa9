//! Where the API server is, and who we are there.
//!
//! Answers one question: what does a connection need? In a pod that is the service account: a token, an authority and a namespace in
//! a folder; elsewhere a kubeconfig file says it.
//!
//! What always holds: files are read anew for each connection, so that a token, a key or an authority that is renewed counts from the
//! next one on; nothing that is secret stands in an error.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::HeaderValue;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::kubeconfig::{KubeConfig, Material, Selected};

/// Where a pod finds its service account.
pub const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The API server's name within a cluster, where no variable says its address.
const IN_CLUSTER_HOST: &str = "kubernetes.default.svc";
/// The namespace of whoever names none.
const DEFAULT_NAMESPACE: &str = "default";
/// Longest file of credentials that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// How the API server is reached.
#[derive(Clone, Debug)]
pub struct KubernetesOptions {
    /// Kubeconfig files with colons between them (`--kubeconfig`); without any, the service account of our pod.
    pub kubeconfig: Option<String>,
    /// The context of the kubeconfig; its current one if none is named.
    pub context: Option<String>,
    /// The namespace to look in; that of the credentials if none is named.
    pub namespace: Option<String>,
    /// The folder of the service account.
    pub service_account: PathBuf,
    /// Address and port of the API server within the cluster (`KUBERNETES_SERVICE_HOST`, `KUBERNETES_SERVICE_PORT`).
    pub service: Option<(String, u16)>,
}

impl Default for KubernetesOptions {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            context: None,
            namespace: None,
            service_account: SERVICE_ACCOUNT.into(),
            service: None,
        }
    }
}

/// Why an API server cannot be asked. Whoever set the options or wrote the files is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KubernetesOptionsError {
    /// No credentials are there.
    #[error(
        "no API server is known: this is no pod with a service account ({0} is missing); name a file with --kubeconfig"
    )]
    NoServer(PathBuf),
    /// A file cannot be used.
    #[error("{path}: {cause}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// The kubeconfig names no context.
    #[error("the kubeconfig has no current context; name one with --kube-context")]
    NoContext,
    /// An entry is named and not there.
    #[error("the kubeconfig has no {what} `{name}`")]
    NoEntry {
        /// What kind of entry.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The kubeconfig wants something that is not offered.
    #[error(
        "the kubeconfig asks for {0}, which is not offered; give a token (kubectl create token NAME), or a client certificate, \
         and the server's certificate-authority"
    )]
    NotOffered(&'static str),
    /// Data that is no base64.
    #[error("the kubeconfig has data that is not base64")]
    BadData,
    /// Certificates or keys that cannot be used.
    #[error("the {what} cannot be used: {cause}")]
    BadCertificate {
        /// Whose.
        what: &'static str,
        /// Why not.
        cause: String,
    },
    /// A server that is no URL.
    #[error("{0} is not the address of an API server; write https://HOST:PORT")]
    BadServer(String),
}

/// Where the API server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServerAddress {
    pub(super) tls: bool,
    pub(super) host: String,
    pub(super) port: u16,
    /// What stands before every path, without a slash at its end.
    pub(super) prefix: String,
}

impl std::fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        let (host, port) = (&self.host, self.port);
        match host.contains(':') {
            true => write!(f, "{scheme}://[{host}]:{port}{}", self.prefix),
            false => write!(f, "{scheme}://{host}:{port}{}", self.prefix),
        }
    }
}

/// What one connection needs.
pub(super) struct Access {
    pub(super) server: ServerAddress,
    pub(super) tls: Option<(TlsConnector, ServerName<'static>)>,
    /// The `authorization` field of every request.
    pub(super) bearer: Option<HeaderValue>,
    pub(super) namespace: String,
}

impl Access {
    /// Reads the files that the options name.
    pub(super) fn load(options: &KubernetesOptions) -> Result<Self, KubernetesOptionsError> {
        let selected = match &options.kubeconfig {
            Some(paths) => kubeconfig(paths)?.select(options.context.as_deref())?,
            None => service_account(options)?,
        };
        let server = parse_server(&selected.server)?;
        let tls = match server.tls {
            true => Some((connector(&selected)?, server_name(&selected, &server)?)),
            false => None,
        };
        let bearer = selected.token.as_ref().map(bearer).transpose()?;
        let namespace = options.namespace.clone().or(selected.namespace);
        Ok(Self {
            server,
            tls,
            bearer,
            namespace: namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.into()),
        })
    }
}

/// All files of a list of paths, as one. Of several, those that are not there are left out, as `kubectl` does.
fn kubeconfig(paths: &str) -> Result<KubeConfig, KubernetesOptionsError> {
    let named = paths.split(':').filter(|path| !path.is_empty());
    let paths: Vec<&Path> = named.map(Path::new).collect();
    let mut config = KubeConfig::default();
    for path in &paths {
        if paths.len() > 1 && !path.exists() {
            continue;
        }
        let text = String::from_utf8(read(path)?).map_err(|error| bad_file(path, error))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        let parsed = KubeConfig::parse(&text, folder);
        config.absorb(parsed.map_err(|cause| bad_file(path, cause))?);
    }
    Ok(config)
}

/// What a pod's service account means.
fn service_account(options: &KubernetesOptions) -> Result<Selected, KubernetesOptionsError> {
    let folder = &options.service_account;
    let token = folder.join("token");
    if !token.exists() {
        return Err(KubernetesOptionsError::NoServer(token));
    }
    let server = match &options.service {
        Some((host, port)) if host.contains(':') => format!("https://[{host}]:{port}"),
        Some((host, port)) => format!("https://{host}:{port}"),
        None => format!("https://{IN_CLUSTER_HOST}"),
    };
    let namespace = read(&folder.join("namespace")).ok();
    let namespace = namespace.and_then(|text| String::from_utf8(text).ok());
    Ok(Selected {
        server,
        tls_server_name: None,
        authority: Some(Material::File(folder.join("ca.crt"))),
        identity: None,
        token: Some(Material::File(token)),
        namespace: namespace
            .map(|text| text.trim().to_owned())
            .filter(|name| !name.is_empty()),
    })
}

fn parse_server(text: &str) -> Result<ServerAddress, KubernetesOptionsError> {
    let bad = || KubernetesOptionsError::BadServer(text.to_owned());
    let (tls, rest) = match text.split_once("://") {
        Some(("https", rest)) => (true, rest),
        Some(("http", rest)) => (false, rest),
        _ => return Err(bad()),
    };
    let (authority, prefix) = match rest.split_once('/') {
        Some((authority, path)) => (authority, path.trim_end_matches('/')),
        None => (rest, ""),
    };
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| bad())?),
        _ if tls => (authority, 443),
        _ => (authority, 80),
    };
    let host = host.trim_matches(['[', ']']).to_owned();
    if host.is_empty() || host.contains('@') {
        return Err(bad());
    }
    let prefix = match prefix {
        "" => String::new(),
        path => format!("/{path}"),
    };
    Ok(ServerAddress {
        tls,
        host,
        port,
        prefix,
    })
}

fn server_name(
    selected: &Selected,
    server: &ServerAddress,
) -> Result<ServerName<'static>, KubernetesOptionsError> {
    let name = selected.tls_server_name.as_ref().unwrap_or(&server.host);
    let parsed = ServerName::try_from(name.clone());
    parsed.map_err(|_| KubernetesOptionsError::BadServer(name.clone()))
}

fn connector(selected: &Selected) -> Result<TlsConnector, KubernetesOptionsError> {
    let mut roots = RootCertStore::empty();
    match &selected.authority {
        Some(authority) => {
            let what = "server's certificate authority";
            for certificate in certificates(authority, what)? {
                let added = roots.add(certificate);
                added.map_err(|error| bad_certificate(what, error))?;
            }
        }
        None => {
            for certificate in rustls_native_certs::load_native_certs().certs {
                let _ = roots.add(certificate);
            }
        }
    }
    let what = "client certificate";
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| bad_certificate("TLS setup", error))?
        .with_root_certificates(roots);
    let mut config = match &selected.identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates(certificate, what)?;
            let key = PrivateKeyDer::from_pem_slice(&bytes(key)?);
            let key = key.map_err(|error| bad_certificate("client key", error))?;
            let config = builder.with_client_auth_cert(chain, key);
            config.map_err(|error| bad_certificate(what, error))?
        }
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

fn certificates(
    material: &Material,
    what: &'static str,
) -> Result<Vec<CertificateDer<'static>>, KubernetesOptionsError> {
    let bytes = bytes(material)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match read {
        Ok(certificates) if certificates.is_empty() => {
            Err(bad_certificate(what, "it holds no certificate"))
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(bad_certificate(what, error)),
    }
}

fn bearer(token: &Material) -> Result<HeaderValue, KubernetesOptionsError> {
    let bytes = bytes(token)?;
    let text = String::from_utf8_lossy(&bytes);
    let value = HeaderValue::from_str(&format!("Bearer {}", text.trim()));
    let mut value =
        value.map_err(|_| bad_certificate("token", "it has signs that no field can carry"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn bytes(material: &Material) -> Result<Vec<u8>, KubernetesOptionsError> {
    match material {
        Material::Data(bytes) => Ok(bytes.clone()),
        Material::File(path) => read(path),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, KubernetesOptionsError> {
    let file = std::fs::File::open(path).map_err(|error| bad_file(path, error))?;
    let mut bytes = Vec::new();
    let read = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|error| bad_file(path, error))?;
    match bytes.len() as u64 > FILE_BYTES_MAX {
        true => Err(bad_file(path, "it is too long")),
        false => Ok(bytes),
    }
}

fn bad_file(path: &Path, cause: impl std::fmt::Display) -> KubernetesOptionsError {
    KubernetesOptionsError::BadFile {
        path: path.to_owned(),
        cause: cause.to_string(),
    }
}

fn bad_certificate(what: &'static str, cause: impl std::fmt::Display) -> KubernetesOptionsError {
    KubernetesOptionsError::BadCertificate {
        what,
        cause: cause.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_as_operators_write_them() {
        for (text, expected) in [
            ("https://10.0.0.1:6443", "https://10.0.0.1:6443"),
            ("https://api.example/", "https://api.example:443"),
            ("http://localhost:8080", "http://localhost:8080"),
            ("https://[fd00::1]:6443", "https://[fd00::1]:6443"),
            ("https://[fd00::1]", "https://[fd00::1]:443"),
            (
                "https://rancher/k8s/clusters/c-1/",
                "https://rancher:443/k8s/clusters/c-1",
            ),
        ] {
            assert_eq!(parse_server(text).unwrap().to_string(), expected, "{text}");
        }
        for bad in ["", "10.0.0.1:6443", "ftp://x", "https://", "https://h:port"] {
            assert!(parse_server(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn outside_a_pod_a_kubeconfig_is_asked_for() {
        let options = KubernetesOptions {
            service_account: "/nonexistent".into(),
            ..KubernetesOptions::default()
        };
        let error = Access::load(&options).err().unwrap().to_string();
        assert!(error.contains("--kubeconfig"), "{error}");
        let options = KubernetesOptions {
            kubeconfig: Some("/nonexistent/config".into()),
            ..options
        };
        let error = Access::load(&options).err().unwrap().to_string();
        assert!(error.starts_with("/nonexistent/config: "), "{error}");
    }
}
