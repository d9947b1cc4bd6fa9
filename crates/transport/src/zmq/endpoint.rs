//! Addresses as engines' settings write them: `tcp://host:port`.

use std::fmt;
use std::str::FromStr;

/// A TCP address, by name or number. `*` stands for all interfaces when binding.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Why a text is no endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// Not TCP.
    #[error("`{0}`: only tcp:// endpoints can be used; write tcp://HOST:PORT")]
    Scheme(String),
    /// No port, or none that fits.
    #[error("`{0}`: a port between 0 and 65535 must follow the host, as in tcp://HOST:PORT")]
    Port(String),
    /// No host.
    #[error("`{0}`: the host is missing; write tcp://HOST:PORT")]
    Host(String),
}

impl Endpoint {
    /// Host `host`, port `port`.
    #[must_use]
    pub fn new(host: &str, port: u16) -> Self {
        let host = host.to_owned();
        Self { host, port }
    }

    /// What to connect to. The address of all interfaces is the own machine's.
    pub(super) fn connect_address(&self) -> (&str, u16) {
        match self.host.as_str() {
            "*" | "0.0.0.0" => ("127.0.0.1", self.port),
            "::" => ("::1", self.port),
            host => (host, self.port),
        }
    }

    /// What to bind.
    pub(super) fn bind_address(&self) -> (&str, u16) {
        match self.host.as_str() {
            "*" => ("0.0.0.0", self.port),
            host => (host, self.port),
        }
    }

    /// The port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The host, without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The same host with another port.
    #[must_use]
    pub fn with_port(&self, port: u16) -> Self {
        Self::new(&self.host, port)
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    /// ```
    /// # use kvasir_transport::zmq::Endpoint;
    /// let endpoint: Endpoint = "tcp://[::1]:5557".parse()?;
    /// assert_eq!((endpoint.host(), endpoint.port()), ("::1", 5557));
    /// assert_eq!(endpoint.to_string(), "tcp://[::1]:5557");
    /// assert!("ipc:///tmp/x".parse::<Endpoint>().is_err());
    /// # Ok::<(), kvasir_transport::zmq::EndpointError>(())
    /// ```
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rest = text.strip_prefix("tcp://");
        let rest = rest.ok_or_else(|| EndpointError::Scheme(text.to_owned()))?;
        let port_error = || EndpointError::Port(text.to_owned());
        let (host, port) = rest.rsplit_once(':').ok_or_else(port_error)?;
        let port = port.parse().map_err(|_| port_error())?;
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = bare.unwrap_or(host);
        if host.is_empty() {
            return Err(EndpointError::Host(text.to_owned()));
        }
        Ok(Self::new(host, port))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "tcp://[{}]:{}", self.host, self.port),
            false => write!(f, "tcp://{}:{}", self.host, self.port),
        }
    }
}
