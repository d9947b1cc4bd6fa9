//! Which engines compute prompts and which answer: the splits that are compared, and which is best.

use kvasir_config::{ConditionalDisagg, EnginePreset, Settings, keys};
use kvasir_profile::Preset;
use kvasir_sim::{BypassRule, Policy, PrefillPool, TransferLink};

use crate::{Column, Comparison, LoadLevel, Plan, ReplayError, Row};

/// Goodput in percentage points below which two rows are as good as each other.
const AS_GOOD: f64 = 0.5;
/// What `--prefill-workers` says for every split there is.
const ALL: &str = "all";

/// Who computes prompts and who answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    /// Workers that answer.
    pub workers: u32,
    /// Workers that compute prompts for them; `None`: each computes its own.
    pub prefill: Option<PrefillPool>,
}

impl Split {
    /// Its name in tables.
    #[must_use]
    pub fn name(&self) -> String {
        let Self { workers, prefill } = self;
        match prefill {
            None => format!("{workers} aggregated"),
            Some(pool) if pool.bypass.is_some() => {
                format!("{}+{workers} conditional", pool.workers)
            }
            Some(pool) => format!("{}+{workers}", pool.workers),
        }
    }
}

/// The splits of these settings, all engines doing both first; none if nothing is to be split.
pub(crate) fn splits(settings: &Settings) -> Result<Vec<Split>, ReplayError> {
    let workers = settings.get(keys::WORKERS);
    let Some(text) = settings.get(keys::PREFILL_WORKERS) else {
        return Ok(Vec::new());
    };
    let (all, sizes) = match text.parse::<u32>() {
        Ok(prefill) => (workers.saturating_add(prefill), vec![prefill]),
        Err(_) if text == ALL && workers > 1 => (workers, (1..workers).collect()),
        Err(_) => {
            let message = "--prefill-workers all splits --workers engines: give 2 or more";
            return Err(ReplayError::Options(message.to_owned()));
        }
    };
    let link = link(settings);
    let rule = ConditionalDisagg::default();
    let bypass = BypassRule {
        below_tokens: rule.eff_isl_threshold,
        below_share: rule.eff_isl_ratio_threshold,
    };
    let aggregated = Split {
        workers: all,
        prefill: None,
    };
    let split = |workers: u32, bypass| Split {
        workers: all - workers,
        prefill: Some(PrefillPool {
            workers,
            bypass,
            link,
        }),
    };
    let both = |size: u32| [split(size, None), split(size, Some(bypass))];
    let pools = sizes.into_iter().flat_map(both);
    Ok(std::iter::once(aggregated).chain(pools).collect())
}

/// Keys and values of the engine's model, unless their size is given, at the speed that is given.
fn link(settings: &Settings) -> TransferLink {
    let preset = match settings.get(keys::ENGINE) {
        EnginePreset::H200Llama8b => Some(Preset::H200Llama8b),
        EnginePreset::H200Qwen32b => Some(Preset::H200Qwen32b),
        EnginePreset::Polynomial | EnginePreset::Constant => None,
    };
    let said = settings.get(keys::KV_BYTES_PER_TOKEN);
    let bytes_per_token = match preset.filter(|_| !settings.is_set(keys::KV_BYTES_PER_TOKEN)) {
        Some(preset) => preset.kv_bytes_per_token(),
        None => said,
    };
    TransferLink {
        bytes_per_token,
        bytes_per_s: settings.get(keys::KV_TRANSFER_BANDWIDTH) * 1e9,
    }
}

/// Each policy with each split, as one row each; the splits of the rows beside them.
pub(crate) fn each_split(policies: Vec<Policy>, splits: &[Split]) -> (Vec<Policy>, Vec<Split>) {
    let mut rows = Vec::new();
    for policy in policies {
        for split in splits {
            let name = format!("{} · {}", policy.name, split.name());
            rows.push((
                Policy {
                    name,
                    ..policy.clone()
                },
                *split,
            ));
        }
    }
    rows.into_iter().unzip()
}

/// Which row is best at each load, in words; nothing where nothing was split.
pub(crate) fn verdict(plan: &Plan, comparison: &Comparison) -> Vec<String> {
    if plan.splits.is_empty() {
        return Vec::new();
    }
    let level =
        |level: &LoadLevel| Some(level_verdict(plan, level)).filter(|text| !text.is_empty());
    comparison.levels.iter().filter_map(level).collect()
}

fn level_verdict(plan: &Plan, level: &LoadLevel) -> String {
    let of = |wanted: fn(&Split) -> bool| {
        let rows = level.rows.iter().zip(&plan.splits);
        best(rows.filter(|(_, split)| wanted(split)).map(|(row, _)| row))
    };
    let together = of(|split| split.prefill.is_none());
    let apart = of(|split| split.prefill.is_some());
    let (Some(together), Some(apart)) = (together, apart) else {
        return String::new();
    };
    let (first, second) = match is_better(apart, together) {
        true => (apart, together),
        false => (together, apart),
    };
    format!(
        "{}: {} is best: {}; then {}: {}",
        level.title,
        first.policy,
        figures(first),
        second.policy,
        figures(second)
    )
}

/// The row with most requests within the service level; of those as good, the one that answers first.
fn best<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<&'a Row> {
    let served = rows.filter(|row| row.completed > 0);
    served.reduce(|best, row| match is_better(row, best) {
        true => row,
        false => best,
    })
}

fn is_better(row: &Row, other: &Row) -> bool {
    let more = row.value(Column::Goodput) - other.value(Column::Goodput);
    match more.abs() > AS_GOOD {
        true => more > 0.0,
        false => row.value(Column::TtftMean) < other.value(Column::TtftMean),
    }
}

fn figures(row: &Row) -> String {
    let show = |column: Column| column.show(row.value(column));
    format!(
        "{} % good, TTFT {} ms, ITL {} ms",
        show(Column::Goodput),
        show(Column::TtftMean),
        show(Column::ItlMean)
    )
}
