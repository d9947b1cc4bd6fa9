//! The forms that texts may have.
//!
//! Answers: is this a URL, an endpoint, a log filter…? Each form is a [`TextRule`] whose words
//! complete the sentence "give …" in messages.

use crate::disagg;
use crate::value::TextRule;

/// Base address of an engine server.
pub(crate) const URL: TextRule = TextRule {
    expects: "an address such as http://10.0.0.7:8000, without user and password",
    metavar: "URL",
    accepts: is_http_url,
};

/// An engine server, with what is said about it.
pub(crate) const WORKER: TextRule = TextRule {
    expects: "one address such as http://10.0.0.7:8000, without user and password, with additions as \
              name=value after commas (a key as api-key-file=FILE); repeat --worker for each further server",
    metavar: "URL[,NAME=VALUE]",
    accepts: |text| {
        let mut parts = text.split(',');
        let addition = |part: &str| {
            part.split_once('=')
                .is_some_and(|(name, _)| !name.contains(':'))
        };
        parts.next().is_some_and(is_http_url) && parts.all(addition)
    },
};

/// Addresses of etcd.
pub(crate) const ETCD: TextRule = TextRule {
    expects: "an address such as http://localhost:2379, several separated by commas",
    ..NATS
};

/// Addresses of NATS.
pub(crate) const NATS: TextRule = TextRule {
    expects: "an address such as nats://localhost:4222",
    metavar: "URL",
    accepts: |text| text.split(',').all(|part| has_scheme_and_host(part.trim())),
};

/// Hosts with their ports.
pub(crate) const PEERS: TextRule = TextRule {
    expects: "host:port, several separated by commas",
    metavar: "PEERS",
    accepts: |text| text.split(',').all(|part| has_port(part.trim())),
};

fn has_port(text: &str) -> bool {
    let parts = text.rsplit_once(':');
    parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// An address of this machine.
pub(crate) const SOCKET: TextRule = TextRule {
    expects: "an address and a port, such as 0.0.0.0:7000",
    metavar: "ADDRESS",
    accepts: |text| text.parse::<std::net::SocketAddr>().is_ok(),
};

/// `namespace.component.endpoint`.
pub(crate) const ENDPOINT: TextRule = TextRule {
    expects: "three names joined by dots: namespace.component.endpoint",
    metavar: "ENDPOINT",
    accepts: is_endpoint,
};

/// Path of an HTTP route.
pub(crate) const ROUTE: TextRule = TextRule {
    expects: "a path that begins with /, such as /v1/chat/completions",
    metavar: "ROUTE",
    accepts: |text| {
        text.starts_with('/') && !text.contains(|c: char| c.is_whitespace() || c == '?')
    },
};

/// Log level, or a list of `target=level`.
pub(crate) const LOG_FILTER: TextRule = TextRule {
    expects: "error, warn, info, debug, trace or off, or a list such as info,kvasir_router=debug",
    metavar: "LEVEL",
    accepts: is_log_filter,
};

/// A label selector of Kubernetes.
pub(crate) const LABELS: TextRule = TextRule {
    expects: "labels as kubectl takes them, such as app=vllm or app=vllm,tier in (a, b)",
    metavar: "LABELS",
    accepts: is_selector,
};

/// A port by number or by name.
pub(crate) const PORT: TextRule = TextRule {
    expects: "a port from 1 to 65535, or the name of a port",
    metavar: "PORT",
    accepts: |text| match text.parse::<u64>() {
        Ok(number) => (1..=65535).contains(&number),
        Err(_) => text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') && text.len() <= 63,
    },
};

/// Host name or IP address to listen on.
pub(crate) const HOST: TextRule = TextRule {
    expects: "a host name or an IP address, without port",
    metavar: "HOST",
    accepts: is_host,
};

/// Prefix of metric names.
pub(crate) const METRIC_PREFIX: TextRule = TextRule {
    expects: "letters, digits and underscores that do not begin with a digit",
    metavar: "PREFIX",
    accepts: |text| {
        text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && !text.starts_with(|c: char| c.is_ascii_digit())
    },
};

/// Settings of conditional disaggregation.
pub(crate) const CONDITIONAL_DISAGG: TextRule = TextRule {
    expects: "a JSON object with any of policy (isl_bounding, prefill_load, isl_or_load), \
              eff_isl_threshold (whole number), eff_isl_ratio_threshold (0 to 1), \
              prefill_busy_threshold and decode_busy_threshold (numbers above 0)",
    metavar: "JSON",
    accepts: |text| disagg::ConditionalDisagg::from_json(text).is_some(),
};

/// Shares of accepted speculative tokens.
pub(crate) const ACCEPT_RATES: TextRule = TextRule {
    expects: "up to 5 numbers from 0 to 1, separated by commas",
    metavar: "X,X,…",
    accepts: |text| {
        let rates: Vec<_> = text
            .split(',')
            .map(|part| part.trim().parse::<f64>())
            .collect();
        rates.len() <= 5
            && rates
                .iter()
                .all(|r| r.as_ref().is_ok_and(|r| (0.0..=1.0).contains(r)))
    },
};

/// Several numbers above 0.
pub(crate) const NUMBERS: TextRule = TextRule {
    expects: "numbers above 0, separated by commas",
    metavar: "X,X,…",
    accepts: |text| {
        let positive = |part: &str| part.trim().parse::<f64>().is_ok_and(|n| n > 0.0 && n < 1e9);
        text.split(',').all(positive)
    },
};

/// A number of workers, or all numbers of them.
pub(crate) const COUNT_OR_ALL: TextRule = TextRule {
    expects: "a number from 1 to 1024, or all",
    metavar: "N|all",
    accepts: |text| text == "all" || text.parse().is_ok_and(|n: u32| (1..=1024).contains(&n)),
};

/// A worker and a moment.
pub(crate) const WORKER_AT: TextRule = TextRule {
    expects: "a worker from 0 and seconds joined by @, such as 1@60",
    metavar: "WORKER@SECONDS",
    accepts: |text| {
        let Some((worker, seconds)) = text.split_once('@') else {
            return false;
        };
        worker.parse::<u16>().is_ok()
            && seconds
                .parse::<f64>()
                .is_ok_and(|s| (0.0..1e9).contains(&s))
    },
};

/// A worker, its speed and a moment.
pub(crate) const WORKER_SPEED_AT: TextRule = TextRule {
    expects: "a worker from 0, percent from 1 to 1000 and seconds, such as 2=50@0",
    metavar: "WORKER=PERCENT@SECONDS",
    accepts: |text| {
        let Some((worker, rest)) = text.split_once('=') else {
            return false;
        };
        let Some((percent, seconds)) = rest.split_once('@') else {
            return false;
        };
        worker.parse::<u16>().is_ok()
            && percent
                .parse::<u32>()
                .is_ok_and(|p| (1..=1000).contains(&p))
            && seconds
                .parse::<f64>()
                .is_ok_and(|s| (0.0..1e9).contains(&s))
    },
};

/// A fault of the mock server.
pub(crate) const FAULT: TextRule = TextRule {
    expects: "refuse, stall, slow=MS, die=TOKENS, cut=TOKENS or status=CODE, then :share=X or :count=N",
    metavar: "FAULT",
    accepts: |text| {
        let mut parts = text.split(':');
        let (name, number) = setting(parts.next().unwrap_or_default());
        let kind = match name {
            "refuse" | "stall" => number.is_none(),
            "slow" | "die" | "cut" => number.is_some_and(|n| n >= 0.0),
            "status" => number.is_some_and(|n| (400.0..600.0).contains(&n)),
            _ => false,
        };
        kind && parts.all(|part| match setting(part) {
            ("share", Some(share)) => (0.0..=1.0).contains(&share),
            ("count", Some(count)) => count >= 1.0,
            _ => false,
        })
    },
};

/// A fault of the mock server's events.
pub(crate) const EVENT_FAULT: TextRule = TextRule {
    expects: "drop=COUNT, duplicate, reorder, delay=MS, mute, unmute, restart-sequence, \
              restart-empty, silent-clear, forget-replay=KEEP or block-size=TOKENS",
    metavar: "FAULT",
    accepts: |text| match text.split_once('=') {
        Some((name, number)) => {
            ["drop", "delay", "forget-replay", "block-size"].contains(&name)
                && number.parse::<u32>().is_ok()
        }
        None => [
            "duplicate",
            "reorder",
            "mute",
            "unmute",
            "restart-sequence",
            "restart-empty",
            "silent-clear",
        ]
        .contains(&text),
    },
};

/// Where a ZeroMQ socket is bound.
pub(crate) const TCP: TextRule = TextRule {
    expects: "an address such as tcp://127.0.0.1:5557",
    metavar: "ADDRESS",
    accepts: |text| {
        let parts = text.strip_prefix("tcp://").and_then(|r| r.rsplit_once(':'));
        parts.is_some_and(|(host, port)| {
            (host == "*" || is_host(host) || is_bracketed_ip(host)) && port.parse::<u16>().is_ok()
        })
    },
};

/// Any JSON object.
pub(crate) const JSON_OBJECT: TextRule = TextRule {
    expects: "a JSON object",
    metavar: "JSON",
    accepts: |text| {
        let parsed = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text);
        parsed.is_ok()
    },
};

/// `name=number` or `name`.
fn setting(text: &str) -> (&str, Option<f64>) {
    match text.split_once('=') {
        Some((name, number)) => (name, number.parse().ok()),
        None => (text, None),
    }
}

fn has_scheme_and_host(text: &str) -> bool {
    let Some((scheme, rest)) = text.split_once("://") else {
        return false;
    };
    let authority = rest.split('/').next().unwrap_or_default();
    !scheme.is_empty()
        && scheme
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '+')
        && is_authority(authority)
}

fn is_http_url(text: &str) -> bool {
    let scheme = text.split_once("://").map(|(scheme, _)| scheme);
    matches!(scheme, Some("http" | "https"))
        && has_scheme_and_host(text)
        && !text.contains(['?', '#', '@'])
}

fn is_authority(text: &str) -> bool {
    let host_port = text
        .rsplit_once('@')
        .map_or(text, |(_, host_port)| host_port);
    // A bracket closes an IPv6 address; a colon inside it does not begin a port.
    let port_at = match host_port.rfind(']') {
        Some(close) => host_port
            .get(close..)
            .and_then(|tail| tail.find(':'))
            .map(|i| close + i),
        None => host_port.find(':'),
    };
    let (host, port) = match port_at {
        Some(at) => (host_port.get(..at), host_port.get(at + 1..)),
        None => (Some(host_port), None),
    };
    let port_ok = port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
    port_ok && host.is_some_and(|host| is_host(host) || is_bracketed_ip(host))
}

fn is_bracketed_ip(host: &str) -> bool {
    let inner = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    inner.is_some_and(|inner| inner.parse::<std::net::Ipv6Addr>().is_ok())
}

/// Names of labels with what they must be; the API server knows the rest.
fn is_selector(text: &str) -> bool {
    let begins = |part: &str| {
        let first = part.trim_start_matches('!').trim_start().chars().next();
        first.is_some_and(|c| c.is_ascii_alphanumeric())
    };
    let known = |c: char| c.is_ascii_alphanumeric() || "-_./=!,() ".contains(c);
    begins(text.trim()) && text.chars().all(known) && !text.trim_end().ends_with(',')
}

fn is_host(text: &str) -> bool {
    if text.parse::<std::net::IpAddr>().is_ok() {
        return true;
    }
    let word = |part: &str| {
        !part.is_empty()
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
    };
    text.len() <= 253 && text.split('.').all(word)
}

fn is_endpoint(text: &str) -> bool {
    let path = text.strip_prefix("dyn://").unwrap_or(text);
    let parts: Vec<_> = path.split('.').collect();
    parts.len() == 3
        && parts
            .iter()
            .all(|part| !part.is_empty() && !part.contains(|c: char| c.is_whitespace() || c == '/'))
}

fn is_log_filter(text: &str) -> bool {
    let level = |word: &str| {
        let word = word.trim().to_ascii_lowercase();
        matches!(
            word.as_str(),
            "off" | "error" | "warn" | "info" | "debug" | "trace"
        )
    };
    text.split(',').all(|part| match part.split_once('=') {
        Some((target, word)) => !target.trim().is_empty() && level(word),
        None => level(part),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_addresses() {
        for good in [
            "http://a:8000",
            "https://engine-1.example",
            "http://10.0.0.7:1",
            "http://[::1]:8000/base",
            "http://a/",
        ] {
            assert!(is_http_url(good), "{good}");
        }
        for bad in [
            "a:8000",
            "ftp://a",
            "http://",
            "http://:80",
            "http://a:",
            "http://a:0",
            "http://a:70000",
            "http://a b",
            "http://a?x",
            "http://user@a",
            "http://[::1",
            "http://a:80:90",
        ] {
            assert!(!is_http_url(bad), "{bad}");
        }
        let worker = WORKER.accepts;
        assert!(worker(
            "http://a:1,block-size=16,events=tcp://a:5557,api-key-file=/a/b"
        ));
        for bad in [
            "http://a:1,http://b:1",
            "http://a:1,block-size",
            "a:1,block-size=16",
        ] {
            assert!(!worker(bad), "{bad}");
        }
    }

    #[test]
    fn log_filters() {
        for good in ["info", "WARN", "off", "info,kvasir_router=debug", "h2=off"] {
            assert!(is_log_filter(good), "{good}");
        }
        for bad in [
            "",
            "loud",
            "info,",
            "=debug",
            "kvasir_router=loud",
            "kvasir_router",
        ] {
            assert!(!is_log_filter(bad), "{bad}");
        }
    }

    #[test]
    fn endpoints_have_three_parts() {
        assert!(is_endpoint("ns.router.generate"));
        assert!(is_endpoint("dyn://ns.router.generate"));
        for bad in ["ns.router", "a.b.c.d", "a..c", ".b.c", "a.b/x.c", "a. .c"] {
            assert!(!is_endpoint(bad), "{bad}");
        }
    }
}
