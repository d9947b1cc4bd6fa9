//! What a kubeconfig file says.
//!
//! Answers one question: which API server does a context mean, and what is shown there? Pure: text in, values out. Members that are
//! not known are ignored, as `kubectl` does.
//!
//! What always holds: an entry that stands in several files counts as the first has it; what would make us run a program, or trust
//! a server that nobody vouches for, is refused by name.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::access::KubernetesOptionsError;

/// One or several files, as far as they matter here.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(super) struct KubeConfig {
    current_context: Option<String>,
    contexts: Option<Vec<NamedContext>>,
    clusters: Option<Vec<NamedCluster>>,
    users: Option<Vec<NamedUser>>,
}

#[derive(Debug, Deserialize)]
struct NamedContext {
    name: String,
    context: Context,
}

#[derive(Clone, Debug, Deserialize)]
struct Context {
    cluster: String,
    user: Option<String>,
    namespace: Option<String>,
}

#[derive(Debug, Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Cluster {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: bool,
    tls_server_name: Option<String>,
    proxy_url: Option<String>,
}

#[derive(Debug, Deserialize)]
struct NamedUser {
    name: String,
    user: Option<User>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct User {
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    username: Option<String>,
    exec: Option<serde::de::IgnoredAny>,
    auth_provider: Option<serde::de::IgnoredAny>,
}

/// Bytes, or the file that holds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Material {
    /// The bytes.
    Data(Vec<u8>),
    /// The file.
    File(PathBuf),
}

/// What a context means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selected {
    pub(super) server: String,
    pub(super) tls_server_name: Option<String>,
    pub(super) authority: Option<Material>,
    /// Certificate and key.
    pub(super) identity: Option<(Material, Material)>,
    /// A file counts more than a text, as for `kubectl`.
    pub(super) token: Option<Material>,
    pub(super) namespace: Option<String>,
}

impl KubeConfig {
    /// Reads one file. Paths in it are relative to its folder.
    pub(super) fn parse(text: &str, folder: &Path) -> Result<Self, String> {
        let parsed: Result<Option<Self>, _> = serde_saphyr::from_str(text);
        let mut config = parsed
            .map_err(|error| error.to_string())?
            .unwrap_or_default();
        let place = |path: &mut Option<PathBuf>| {
            if let Some(path) = path {
                *path = folder.join(&path);
            }
        };
        for named in config.clusters.iter_mut().flatten() {
            place(&mut named.cluster.certificate_authority);
        }
        for user in config.users.iter_mut().flatten() {
            if let Some(user) = &mut user.user {
                place(&mut user.token_file);
                place(&mut user.client_certificate);
                place(&mut user.client_key);
            }
        }
        Ok(config)
    }

    /// Takes in what a further file adds.
    pub(super) fn absorb(&mut self, other: Self) {
        self.current_context = self.current_context.take().or(other.current_context);
        let contexts = self.contexts.get_or_insert_default();
        contexts.extend(other.contexts.into_iter().flatten());
        let clusters = self.clusters.get_or_insert_default();
        clusters.extend(other.clusters.into_iter().flatten());
        let users = self.users.get_or_insert_default();
        users.extend(other.users.into_iter().flatten());
    }

    /// What this context means; without a name the current one.
    pub(super) fn select(&self, context: Option<&str>) -> Result<Selected, KubernetesOptionsError> {
        let missing = |what: &'static str, name: &str| KubernetesOptionsError::NoEntry {
            what,
            name: name.to_owned(),
        };
        let current = self.current_context.as_deref();
        let name = context
            .or(current)
            .filter(|name| !name.is_empty())
            .ok_or(KubernetesOptionsError::NoContext)?;
        let contexts = self.contexts.iter().flatten();
        let context = contexts
            .filter(|entry| entry.name == name)
            .map(|entry| entry.context.clone())
            .next()
            .ok_or_else(|| missing("context", name))?;
        let clusters = self.clusters.iter().flatten();
        let cluster = clusters
            .filter(|entry| entry.name == context.cluster)
            .map(|entry| entry.cluster.clone())
            .next()
            .ok_or_else(|| missing("cluster", &context.cluster))?;
        let user = match context.user.as_deref().filter(|name| !name.is_empty()) {
            None => User::default(),
            Some(name) => {
                let users = self.users.iter().flatten();
                let mut named = users.filter(|entry| entry.name == name);
                let found = named.next().ok_or_else(|| missing("user", name))?;
                found.user.clone().unwrap_or_default()
            }
        };
        selected(cluster, user, context.namespace)
    }
}

fn selected(
    cluster: Cluster,
    user: User,
    namespace: Option<String>,
) -> Result<Selected, KubernetesOptionsError> {
    let refused = [
        (user.exec.is_some(), "an exec plugin"),
        (user.auth_provider.is_some(), "an auth-provider"),
        (user.username.is_some(), "a user name and a password"),
        (cluster.proxy_url.is_some(), "a proxy"),
        (cluster.insecure_skip_tls_verify, "insecure-skip-tls-verify"),
    ];
    if let Some((_, what)) = refused.into_iter().find(|(is_there, _)| *is_there) {
        return Err(KubernetesOptionsError::NotOffered(what));
    }
    let certificate = material(user.client_certificate_data, user.client_certificate)?;
    let key = material(user.client_key_data, user.client_key)?;
    let token = match (user.token_file, user.token) {
        (Some(path), _) => Some(Material::File(path)),
        (None, token) => token.map(|token| Material::Data(token.into_bytes())),
    };
    Ok(Selected {
        server: cluster.server,
        tls_server_name: cluster.tls_server_name,
        authority: material(
            cluster.certificate_authority_data,
            cluster.certificate_authority,
        )?,
        identity: certificate.zip(key),
        token,
        namespace: namespace.filter(|name| !name.is_empty()),
    })
}

/// Data counts more than a file, as for `kubectl`.
fn material(
    data: Option<String>,
    file: Option<PathBuf>,
) -> Result<Option<Material>, KubernetesOptionsError> {
    let Some(data) = data.filter(|data| !data.is_empty()) else {
        return Ok(file.map(Material::File));
    };
    let packed: String = data.split_whitespace().collect();
    let bytes = STANDARD.decode(packed);
    let bytes = bytes.map_err(|_| KubernetesOptionsError::BadData)?;
    Ok(Some(Material::Data(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
apiVersion: v1
kind: Config
current-context: dev
preferences: {}
contexts:
- name: dev
  context: {cluster: near, user: robot, namespace: engines}
- name: bare
  context: {cluster: near, user: ""}
- name: plugin
  context: {cluster: near, user: plugin}
- name: lost
  context: {cluster: nowhere, user: robot}
clusters:
- name: near
  cluster:
    server: https://10.0.0.1:6443
    certificate-authority-data: Y2E=
users:
- name: robot
  user:
    token: secret
    tokenFile: tokens/robot
    client-certificate: pki/robot.pem
    client-key-data: a2V5
- name: plugin
  user:
    exec: {command: aws, apiVersion: client.authentication.k8s.io/v1}
"#;

    fn parse(text: &str) -> KubeConfig {
        KubeConfig::parse(text, Path::new("/etc/kube")).unwrap()
    }

    #[test]
    fn a_context_names_server_credentials_and_namespace() {
        let selected = parse(FILE).select(None).unwrap();
        let expected = Selected {
            server: "https://10.0.0.1:6443".into(),
            tls_server_name: None,
            authority: Some(Material::Data(b"ca".to_vec())),
            identity: Some((
                Material::File("/etc/kube/pki/robot.pem".into()),
                Material::Data(b"key".to_vec()),
            )),
            token: Some(Material::File("/etc/kube/tokens/robot".into())),
            namespace: Some("engines".into()),
        };
        assert_eq!(selected, expected);
        let bare = parse(FILE).select(Some("bare")).unwrap();
        assert_eq!(
            (bare.token, bare.identity, bare.namespace),
            (None, None, None)
        );
    }

    #[test]
    fn what_cannot_be_followed_is_named() {
        let error = |context: &str| {
            let selected = parse(FILE).select(Some(context));
            selected.unwrap_err().to_string()
        };
        assert!(error("plugin").starts_with("the kubeconfig asks for an exec plugin"));
        assert!(error("lost").contains("cluster `nowhere`"));
        assert!(error("other").contains("context `other`"));
        assert!(parse("").select(None).is_err());
        assert!(KubeConfig::parse("contexts: 7", Path::new("/")).is_err());
        for (member, word) in [
            ("insecure-skip-tls-verify: true", "insecure-skip-tls-verify"),
            ("proxy-url: http://p", "a proxy"),
        ] {
            let text = FILE.replace("certificate-authority-data: Y2E=", member);
            let error = parse(&text).select(None).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
        let bad = FILE.replace("Y2E=", "\"no base64!\"");
        assert!(parse(&bad).select(None).is_err());
    }

    #[test]
    fn of_several_files_the_first_that_has_an_entry_counts() {
        let mut config = parse("contexts: null\nclusters: null\nusers: null\n");
        config.absorb(parse(FILE));
        config.absorb(parse(&FILE.replace("10.0.0.1", "10.9.9.9")));
        assert_eq!(config.select(None).unwrap().server, "https://10.0.0.1:6443");
    }
}
