//! Speculative prefill of the next turn by a token worker.

use std::sync::Arc;

use kvasir_openai::{AgentHints, HeaderHints, JsonText, Nvext, Options};
use kvasir_router::Outcome;
use kvasir_text::Effort;
use kvasir_types::{RequestId, WorkerRank};

use crate::App;
use crate::models::prompt;
use crate::models::tokenize::TextWork;
use crate::request::speculative_prefill::{self, PrefillOutcome};
use crate::tokens::job::Job;
use crate::tokens::lane;
use crate::tokens::reading::AnswerReading;

/// A turn of `job` ended with the answer `said`, by `target`.
pub(super) fn prefill(app: &Arc<App>, job: &Arc<Job>, target: WorkerRank, said: String) {
    let work = run(Arc::clone(app), Arc::clone(job), target, said);
    speculative_prefill::start((app.prefill_slots(), app.tasks()), &job.model, target, work);
}

async fn run(app: Arc<App>, job: Arc<Job>, target: WorkerRank, said: String) -> PrefillOutcome {
    let work = TextWork::new(app.long_work(), &job.model);
    let chat = job.chat.as_ref();
    let bytes = said.len() + chat.map_or(0, |chat| prompt::chat_bytes(chat));
    let (own, turn) = (Arc::clone(&app), Arc::clone(&job));
    let next = work.elsewhere(bytes, move || next_job(&own, &turn, target, &said));
    let Some(next) = next.await.flatten().flatten() else {
        return PrefillOutcome::Failed;
    };
    let next = Arc::new(next);
    let Some(prompt) = next.prompt_of(0) else {
        return PrefillOutcome::Failed;
    };
    match lane::start_whole(&app, &next, next.id, prompt).await {
        Ok(lane) => {
            lane.booking.finish(Outcome::Completed { output_tokens: 1 });
            PrefillOutcome::Done
        }
        Err(_) => PrefillOutcome::Failed,
    }
}

/// One token after the conversation and its answer, at the same worker.
fn next_job(app: &App, job: &Job, target: WorkerRank, said: &str) -> Option<Job> {
    let mut chat = job.chat.clone()?;
    let said = serde_json::to_string(said).ok()?;
    let messages = chat.messages.as_str().trim_end().strip_suffix(']')?;
    let messages = format!("{messages},{{\"role\":\"assistant\",\"content\":{said}}}]");
    chat.messages = JsonText::new(&messages)?;
    chat.add_generation_prompt = false;
    let now = app.clock().unix_secs(app.clock().now());
    let terms = (job.model.context_length, Effort::Full);
    let prompts = prompt::of_chat(&job.text, &chat, now, terms, || ()).ok()?;
    let options = Options {
        max_tokens: Some(1),
        min_tokens: 0,
        n: 1,
        guided: None,
        ..job.options.clone()
    };
    let priority = job.nvext.hints.priority.or(job.options.priority);
    let next = Job {
        shown: RequestId::default(),
        formatted: None,
        queue_depth: 0,
        id: app.observer().new_request_id(),
        model: Arc::clone(&job.model),
        text: Arc::clone(&job.text),
        endpoint: job.endpoint,
        nvext: Nvext {
            backend_instance_id: Some(target.worker.0),
            dp_rank: Some(target.rank.0),
            cache_salt: job.nvext.cache_salt.clone(),
            hints: AgentHints {
                priority: priority.map(|_| i32::MIN),
                ..AgentHints::default()
            },
            ..Nvext::default()
        },
        headers: HeaderHints::default(),
        options,
        prompts,
        chat: None,
        reading: AnswerReading::default(),
    };
    next.check_length().ok()?;
    Some(next)
}
