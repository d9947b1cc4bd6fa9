//! Policy strings: a few options in one word.
//!
//! Answers: what are the settings if this string is laid over those? `kvasir replay` compares
//! policies such as `kv,router-prefill-load-scale=16`; names, ranges, rules and messages are those
//! of the command line.

use crate::choice::{RouterMode, RouterPolicy};
use crate::error::{ConfigError, NameScope, Problem};
use crate::keys;
use crate::rules;
use crate::settings::{Assignment, Origin, Settings};
use crate::spec::Spec;
use crate::table;
use crate::value::{self, SettingType};

/// Lays a policy string over settings and applies the rules between options again.
///
/// Parts are separated by commas. A part is `name=value`, a switch or its `no-` form, or the name of
/// a router mode or policy: `kv` and `time` set both. Later parts win.
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
        match assignments(part, policy, base) {
            Ok(found) => problems.extend(found.iter().filter_map(|f| settings.assign(f).err())),
            Err(problem) => problems.push(problem),
        }
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

fn assignments(part: &str, policy: &str, base: &Settings) -> Result<Vec<Assignment>, Problem> {
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
            return Ok(vec![made(spec, text, false)]);
        }
    } else if let Some(spec) = named(part).filter(|spec| spec.is_switch()) {
        return Ok(vec![made(spec, "true", false)]);
    } else if let Some(spec) = part
        .strip_prefix("no-")
        .and_then(named)
        .filter(|s| s.is_switch())
    {
        return Ok(vec![made(spec, "true", true)]);
    } else if let Some(found) = policy_names(part, &named) {
        return Ok(found
            .into_iter()
            .map(|(spec, text)| made(spec, text, false))
            .collect());
    }
    let name = part.split('=').next().unwrap_or(part);
    Err(Problem::unknown_name(
        name,
        "",
        &origin.to_string(),
        NameScope(Some(scope)),
    ))
}

/// What a bare name sets: a mode, and where the mode has several policies, which one.
fn policy_names<'t>(
    part: &'t str,
    named: &impl Fn(&str) -> Option<&'static Spec>,
) -> Option<Vec<(&'static Spec, &'t str)>> {
    let mode = named(keys::ROUTER_MODE.name());
    let policy = named(keys::ROUTER_POLICY.name());
    let kv = RouterMode::Kv.name();
    if RouterPolicy::find(part).is_some() {
        let sets = [mode.map(|mode| (mode, kv)), policy.map(|p| (p, part))];
        return Some(sets.into_iter().flatten().collect());
    }
    value::parse(&RouterMode::KIND, part)?;
    mode.map(|mode| vec![(mode, part)])
}
