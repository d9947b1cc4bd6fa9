//! Policy strings: a few options in one word.
//!
//! Answers: what are the settings if this string is laid over those? `kvasir replay` compares
//! policies such as `kv,router-prefill-load-scale=16`; names, ranges, rules and messages are those
//! of the command line.

use crate::choice::RouterMode;
use crate::error::{ConfigError, NameScope, Problem};
use crate::keys;
use crate::rules;
use crate::settings::{Assignment, Origin, Settings};
use crate::table;
use crate::value::{self, SettingType};

/// Lays a policy string over settings and applies the rules between options again.
///
/// Parts are separated by commas. A part is `name=value`, a switch or its `no-` form, or the name of
/// a router mode. Later parts win.
///
/// ```
/// use kvasir_config::{Command, RouterMode, Settings, keys, parse_overrides};
/// let base = Settings::defaults(Command::Replay);
/// let policy = parse_overrides(&base, "kv,router-prefill-load-scale=16,no-router-kv-events")?;
/// assert_eq!(policy.get(keys::ROUTER_MODE), RouterMode::Kv);
/// assert_eq!(policy.get(keys::ROUTER_PREFILL_LOAD_SCALE), 16.0);
/// assert!(!policy.get(keys::ROUTER_KV_EVENTS));
/// # Ok::<(), kvasir_config::ConfigError>(())
/// ```
pub fn parse_overrides(base: &Settings, policy: &str) -> Result<Settings, ConfigError> {
    let mut settings = base.clone();
    let mut problems = Vec::new();
    for part in policy
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let done = assignment(part, policy, base).and_then(|found| settings.assign(&found));
        problems.extend(done.err());
    }
    if problems.is_empty() {
        rules::apply(&mut settings);
        problems = rules::check(&settings);
    }
    if problems.is_empty() {
        return Ok(settings);
    }
    Err(ConfigError::new(
        &format!("kvasir {}", base.command().name()),
        problems,
    ))
}

fn assignment(part: &str, policy: &str, base: &Settings) -> Result<Assignment, Problem> {
    let origin = Origin::Policy(policy.into());
    let made = |spec, text: &str, negated| Assignment {
        spec,
        texts: vec![text.into()],
        negated,
        origin: origin.clone(),
    };
    let scope = base.command().scope();
    let named = |name: &str| table::named_for(name, scope).filter(|spec| spec.scope.meets(scope));
    if let Some((name, text)) = part.split_once('=') {
        let bare = name.trim().trim_start_matches('-');
        if let Some(spec) = named(bare) {
            return Ok(made(spec, text, false));
        }
    } else if let Some(spec) = named(part).filter(|spec| spec.is_switch()) {
        return Ok(made(spec, "true", false));
    } else if let Some(spec) = part
        .strip_prefix("no-")
        .and_then(named)
        .filter(|s| s.is_switch())
    {
        return Ok(made(spec, "true", true));
    } else if let (true, Some(spec)) = (part == "time", named(keys::ROUTER_POLICY.name())) {
        return Ok(made(spec, part, false));
    } else if let (Some(_), Some(spec)) = (
        value::parse(&RouterMode::KIND, part),
        named(keys::ROUTER_MODE.name()),
    ) {
        return Ok(made(spec, part, false));
    }
    let name = part.split('=').next().unwrap_or(part);
    Err(Problem::unknown_name(
        name,
        "",
        &origin.to_string(),
        NameScope(Some(scope)),
    ))
}
