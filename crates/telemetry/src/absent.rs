//! Names that Dynamo 1.6.1 exports and Kvasir does not, and why.
//!
//! The reference page lists them, so that whoever looks for one of them finds the reason. A name that ends with `*`
//! stands for all that begin so.

/// One name, or the beginning of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent {
    /// The name.
    pub name: &'static str,
    /// Why it is not there.
    pub why: &'static str,
}

impl Absent {
    /// Whether it speaks of this name.
    #[must_use]
    pub fn covers(&self, name: &str) -> bool {
        match self.name.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == self.name,
        }
    }
}

const NO_PLANE: &str = "of Dynamo's own request plane, which no worker behind HTTP has";
const NO_REPLICAS: &str = "replicas do not tell each other of their requests yet";
const NO_LRU: &str = "there is no approximate cache by LRU: decisions are remembered for a time";
const MEDIA: &str = "media parts are not counted: the engine reads them";

/// All of them.
pub const ABSENT: &[Absent] = &[
    absent("dynamo_request_plane_*", NO_PLANE),
    absent("dynamo_transport_*", NO_PLANE),
    absent("dynamo_work_handler_*", NO_PLANE),
    absent(
        "dynamo_tokio_*",
        "figures of Dynamo's runtime; `event_loop_delay_seconds` tells how late serving threads are",
    ),
    absent(
        "dynamo_component_uptime_seconds",
        "the scraper's `process_start_time_seconds` or `up` tell it of any process",
    ),
    absent(
        "dynamo_component_ckf_mutation_total",
        "of a filter that our index does not have",
    ),
    absent("dynamo_component_router_active_sequence_*", NO_REPLICAS),
    absent("dynamo_component_router_approximate_*", NO_LRU),
    absent(
        "dynamo_component_router_kv_transfer_estimated_latency_seconds",
        "nothing is transferred: prefill and decode are not split yet",
    ),
    absent(
        "dynamo_frontend_detokenize_total_us",
        "engines behind HTTP answer with text; nothing is detokenized",
    ),
    absent(
        "dynamo_frontend_detokenize_token_count",
        "engines behind HTTP answer with text; nothing is detokenized",
    ),
    absent("dynamo_frontend_images_per_request", MEDIA),
    absent("dynamo_frontend_image_tokens_per_request", MEDIA),
    absent("dynamo_frontend_audio_per_request", MEDIA),
    absent("dynamo_frontend_videos_per_request", MEDIA),
];

const fn absent(name: &'static str, why: &'static str) -> Absent {
    Absent { name, why }
}
