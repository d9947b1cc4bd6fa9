//! Rows: listening, routes and limits of HTTP.

use std::path::PathBuf;
use std::time::Duration;

use crate::command::Scope;
use crate::rule_text::{HOST, ROUTE};
use crate::spec::{Group, negated_var, options, var};

options! { HTTP_ROWS, Group::Http, Scope::SERVE;

    /// Port to listen on; 0 takes any free one.
    HTTP_PORT: u16 = "http-port" =>
        scope(Scope::SERVE.and(Scope::MOCKER).and(Scope::SERVICES)).env(&[var("DYN_HTTP_PORT")])
        .aliases(&["port"]).default("8000")
        .default_note("8000; 8090 in indexer, 8091 in slot-tracker, 8092 in select").metavar("PORT").common().effective();

    /// Address to listen on.
    HTTP_HOST: String = "http-host" =>
        scope(Scope::SERVE.and(Scope::MOCKER).and(Scope::SERVICES)).env(&[var("DYN_HTTP_HOST")]).default("0.0.0.0")
        .default_note("0.0.0.0; 127.0.0.1 in the demo").rule(&HOST).common().effective();

    /// TLS certificate, in PEM; needs the key too. Reloaded when the file changes.
    TLS_CERT_PATH: Option<PathBuf> = "tls-cert-path" =>
        env(&[var("DYN_TLS_CERT_PATH")]).metavar("FILE").effective();

    /// TLS private key, in PEM; needs the certificate too.
    TLS_KEY_PATH: Option<PathBuf> = "tls-key-path" =>
        env(&[var("DYN_TLS_KEY_PATH")]).metavar("FILE").effective();

    /// Separate port for the admin API; unset serves it on the HTTP port.
    ///
    /// Workers, thresholds and decisions are then served there only; health, liveness and metrics
    /// on both. 0 takes any free port.
    ADMIN_PORT: Option<u16> = "admin-port" =>
        env(&[var("KVASIR_ADMIN_PORT")]).ints(0, 65_535).metavar("PORT").effective();

    /// Address that the admin port listens on.
    ADMIN_HOST: String = "admin-host" =>
        env(&[var("KVASIR_ADMIN_HOST")]).default("127.0.0.1").rule(&HOST).effective();

    /// Require a token for the admin API: a file with one token per line.
    ///
    /// Callers send `authorization: Bearer TOKEN`; `kvasir` commands send the first token. With a
    /// token set, API keys of clients do not give access to the admin API.
    ADMIN_TOKEN_FILE: Option<PathBuf> = "admin-token-file" =>
        scope(Scope::SERVE.and(Scope::OPERATE).and(Scope::DOCTOR))
        .env(&[var("KVASIR_ADMIN_TOKEN_FILE")]).metavar("FILE").effective();

    /// The admin token itself; takes precedence over the file.
    ADMIN_TOKEN: Option<String> = "admin-token" =>
        scope(Scope::SERVE.and(Scope::OPERATE).and(Scope::DOCTOR))
        .env(&[var("KVASIR_ADMIN_TOKEN")]).secret().effective();

    /// Largest request body, in MiB.
    HTTP_BODY_LIMIT_MB: u64 = "http-body-limit-mb" =>
        env(&[var("DYN_HTTP_BODY_LIMIT_MB")]).default("45").ints(1, 1 << 20).effective();

    /// Memory for the bodies of all requests in flight, in MiB; more are refused as overload.
    ///
    /// A body is counted while it is received and until its request has ended. Bodies up to 64 KiB are always taken. Never
    /// less than `--http-body-limit-mb`.
    HTTP_BODY_BUDGET_MB: u64 = "http-body-budget-mb" =>
        env(&[var("KVASIR_HTTP_BODY_BUDGET_MB")]).default("1024").ints(1, 1 << 20).effective();

    /// Status code of responses that refuse a request because of overload.
    HTTP_OVERLOAD_STATUS_CODE: u16 = "http-overload-status-code" =>
        env(&[var("DYN_HTTP_OVERLOAD_STATUS_CODE")]).default("503").ints(200, 999).effective();

    /// Interval of keep-alive comments on idle SSE streams, in milliseconds.
    HTTP_SSE_KEEP_ALIVE_INTERVAL_MS: Option<u64> = "http-sse-keep-alive-interval-ms" =>
        env(&[var("DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS")]).ints(1, 86_400_000).metavar("MS").effective();

    /// End a stream after this many seconds without data from the worker.
    HTTP_BACKEND_STREAM_TIMEOUT_SECS: Option<u64> = "http-backend-stream-timeout-secs" =>
        env(&[var("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS")]).ints(1, 31_536_000).metavar("SECONDS").effective();

    /// Time to wait for the first byte of a response before another worker is tried.
    ///
    /// A response that is not streamed begins when it is complete.
    HTTP_FIRST_BYTE_TIMEOUT_SECS: Duration = "http-first-byte-timeout-secs" =>
        env(&[var("KVASIR_HTTP_FIRST_BYTE_TIMEOUT_SECS")]).default("3600").metavar("SECONDS").effective();

    /// Close the connection of a client that neither sends nor reads anything for this time.
    ///
    /// Of several HTTP/2 streams only the one that is not read is reset. A client that reads slowly is not affected.
    HTTP_CLIENT_TIMEOUT_SECS: Duration = "http-client-timeout-secs" =>
        env(&[var("KVASIR_HTTP_CLIENT_TIMEOUT_SECS")]).default("30").metavar("SECONDS").effective();

    /// Threads that serve clients; 0 is one per core.
    ///
    /// A connection stays on its thread. KV events and worker health checks run on other threads.
    HTTP_THREADS: u32 = "http-threads" =>
        env(&[var("KVASIR_HTTP_THREADS")]).default("0").ints(0, 1024).effective();

    /// Maximum number of open client connections; idle ones make room for more, which wait if none is idle.
    ///
    /// Unset: half of the files that the process may open (`ulimit -n`, raised to its hard limit at the start) less 64, at most
    /// 32768. The other half is for engines, so a larger number is cut to that.
    HTTP_CONNECTIONS_MAX: Option<u32> = "http-connections-max" =>
        env(&[var("KVASIR_HTTP_CONNECTIONS_MAX")]).ints(1, 1 << 24).effective();

    /// Maximum number of concurrent requests; more are refused as overload.
    HTTP_REQUESTS_MAX: u32 = "http-requests-max" =>
        env(&[var("KVASIR_HTTP_REQUESTS_MAX")]).default("65536").ints(1, 1 << 24).effective();

    /// Require an API key from clients: a file with one key per line.
    ///
    /// Clients send `authorization: Bearer KEY`. Health, liveness and metrics need none.
    HTTP_API_KEY_FILE: Option<PathBuf> = "http-api-key-file" =>
        env(&[var("KVASIR_HTTP_API_KEY_FILE")]).metavar("FILE").effective();

    /// Maximum size of request headers, in KiB; at most 100 fields.
    HTTP_HEADER_LIMIT_KB: u32 = "http-header-limit-kb" =>
        env(&[var("KVASIR_HTTP_HEADER_LIMIT_KB")]).default("64").ints(8, 1 << 14).effective();

    /// Delay response headers by this time, so that an early engine error can set the status.
    HTTP_PRE_COMMIT_ERROR_PEEK_MS: Option<u64> = "http-pre-commit-error-peek-ms" =>
        env(&[var("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS")]).ints(1, 3_600_000).metavar("MS").effective();

    /// Do not serve the routes that change settings, such as `/busy_threshold`.
    DISABLE_FRONTEND_ADMIN_API: bool = "disable-frontend-admin-api" =>
        env(&[var("DYN_DISABLE_FRONTEND_ADMIN_API")]).default("false").effective();

    /// Ignore `nvext`, routing headers and `extra_fields` of requests.
    DISABLE_FRONTEND_NVEXT: bool = "disable-frontend-nvext" =>
        env(&[var("DYN_DISABLE_FRONTEND_NVEXT"), negated_var("DYN_ENABLE_FRONTEND_NVEXT")])
        .default("false").effective();

    /// Ignore unknown top-level fields of a body instead of answering 400.
    ///
    /// Applies to token workers, as in the demo. Engine servers get every field and validate it themselves.
    IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS: bool = "ignore-openai-fe-unsupported-fields" =>
        env(&[var("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS")]).default("false").effective();

    /// Route of chat completions.
    HTTP_SVC_CHAT_PATH: String = "http-svc-chat-path" =>
        env(&[var("DYN_HTTP_SVC_CHAT_PATH"), var("DYN_HTTP_SVC_CHAT_PATH_ENV")])
        .default("/v1/chat/completions").rule(&ROUTE).effective();

    /// Route of text completions.
    HTTP_SVC_CMP_PATH: String = "http-svc-cmp-path" =>
        env(&[var("DYN_HTTP_SVC_CMP_PATH"), var("DYN_HTTP_SVC_CMP_PATH_ENV")])
        .default("/v1/completions").rule(&ROUTE).effective();

    /// Route of embeddings.
    HTTP_SVC_EMB_PATH: String = "http-svc-emb-path" =>
        env(&[var("DYN_HTTP_SVC_EMB_PATH"), var("DYN_HTTP_SVC_EMB_PATH_ENV")])
        .default("/v1/embeddings").rule(&ROUTE).effective();

    /// Route of responses.
    HTTP_SVC_RESPONSES_PATH: String = "http-svc-responses-path" =>
        env(&[var("DYN_HTTP_SVC_RESPONSES_PATH"), var("DYN_HTTP_SVC_RESPONSES_PATH_ENV")])
        .default("/v1/responses").rule(&ROUTE).effective();

    /// Route of the list of models.
    HTTP_SVC_MODELS_PATH: String = "http-svc-models-path" =>
        env(&[var("DYN_HTTP_SVC_MODELS_PATH"), var("DYN_HTTP_SVC_MODELS_PATH_ENV")])
        .default("/v1/models").rule(&ROUTE).effective();

    /// Route of Anthropic messages.
    HTTP_SVC_ANTHROPIC_PATH: String = "http-svc-anthropic-path" =>
        env(&[var("DYN_HTTP_SVC_ANTHROPIC_PATH"), var("DYN_HTTP_SVC_ANTHROPIC_PATH_ENV")])
        .default("/v1/messages").rule(&ROUTE).effective();

    /// Route of the health report.
    HTTP_SVC_HEALTH_PATH: String = "http-svc-health-path" =>
        env(&[var("DYN_HTTP_SVC_HEALTH_PATH"), var("DYN_HTTP_SVC_HEALTH_PATH_ENV")])
        .default("/health").rule(&ROUTE).effective();

    /// Route of the liveness check.
    HTTP_SVC_LIVE_PATH: String = "http-svc-live-path" =>
        env(&[var("DYN_HTTP_SVC_LIVE_PATH"), var("DYN_HTTP_SVC_LIVE_PATH_ENV")]).default("/live")
        .rule(&ROUTE).effective();

    /// Route of the metrics page.
    HTTP_SVC_METRICS_PATH: String = "http-svc-metrics-path" =>
        env(&[var("DYN_HTTP_SVC_METRICS_PATH"), var("DYN_HTTP_SVC_METRICS_PATH_ENV")])
        .default("/metrics").rule(&ROUTE).effective();

    /// Serve KServe's gRPC protocol instead of HTTP.
    KSERVE_GRPC_SERVER: bool = "kserve-grpc-server" =>
        env(&[var("DYN_KSERVE_GRPC_SERVER")]).default("false");

    /// Port of the metrics page of the gRPC server.
    GRPC_METRICS_PORT: u16 = "grpc-metrics-port" =>
        env(&[var("DYN_GRPC_METRICS_PORT")]).default("8788").metavar("PORT");

    /// A module that adds routes; may be given several times.
    FRONTEND_ROUTE_EXTENSION: Vec<String> = "frontend-route-extension" =>
        env(&[var("DYN_FRONTEND_ROUTE_EXTENSIONS")]).metavar("NAME");
}
