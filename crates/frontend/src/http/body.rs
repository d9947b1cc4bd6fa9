//! Reading a request's body: JSON, no longer than allowed, and within the budget of all bodies together.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, EXPECT};
use http::request::Parts;
use http::{HeaderMap, Version};
use http_body::Body;
use http_body_util::BodyExt;
use kvasir_openai::ApiError;
use tokio::time::Instant;

use crate::http::body_budget::{BodyBudget, BodyCharge, JoinedBody, NoRoom};
use crate::http::context::HttpContext;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Bytes that a client sends in a second, on average, once its timeout has passed (`--http-client-timeout-secs`), which
/// it has for each piece, too.
const RATE_MIN: u64 = 1024;
/// What is said of chunks that are none.
const BAD_CHUNKS: &str = "The request's body is malformed: its chunks are not framed as `transfer-encoding: chunked` says";
/// What is said when it takes longer.
const STALLED: &str = "The request's body stopped coming; send it again";
/// Bytes that are read of a body that is too large, so that its client sees the answer.
const DISCARD_MAX: u64 = 64 << 20;
/// Time that is spent on them.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for a request that is refused for other reasons, by anybody.
const LEAVE_MAX: u64 = 256 << 10;
/// Time that is spent on that.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// A mebibyte, the unit of the body limit.
pub(crate) const MIB: u64 = 1 << 20;

/// Fails unless the request says that it brings JSON.
pub(crate) fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = headers
        .get(CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default();
    let essence = value
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    let json = essence == "application/json"
        || essence.starts_with("application/") && essence.ends_with("+json");
    if json {
        Ok(())
    } else {
        Err(ApiError::media_type())
    }
}

/// Reads the body of a request that is to bring JSON.
pub(crate) async fn read_json<B>(
    http: &HttpContext,
    head: &Parts,
    body: B,
) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError> + Send,
{
    if let Err(refusal) = check_content_type(&head.headers) {
        leave(head, body).await;
        return Err(refusal);
    }
    read_for(http, head, body).await
}

/// Why a body was not read to its end.
#[derive(Clone, Debug, PartialEq)]
enum ReadError {
    /// The bodies of other requests leave no room for it.
    NoRoom,
    /// It is too long, too slow or broken.
    Refused(ApiError),
}

impl From<NoRoom> for ReadError {
    fn from(_: NoRoom) -> Self {
        Self::NoRoom
    }
}

impl From<ApiError> for ReadError {
    fn from(error: ApiError) -> Self {
        Self::Refused(error)
    }
}

/// Reads a request's body; limits that it reaches are counted.
pub(crate) async fn read_for<B>(
    http: &HttpContext,
    head: &Parts,
    mut body: B,
) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError> + Send,
{
    let unread = is_refused_unread(&body, http.body_limit_mb, &http.bodies);
    let outcome = read(
        &mut body,
        http.body_limit_mb,
        http.limits.client_stall,
        &http.bodies,
    );
    let outcome = outcome.await.map_err(|error| match error {
        ReadError::NoRoom => ApiError::bodies_full(http.overload_status),
        ReadError::Refused(error) => error,
    });
    if let Err(error) = &outcome {
        match error.status {
            413 => http.limit_reached("body_bytes"),
            408 => http.limit_reached("body_time"),
            _ if error.leaves_body() => http.limit_reached("body_budget"),
            _ => {}
        }
        // Who still waits for a word to send it gets the refusal instead, and sends nothing.
        if error.leaves_body() && !(unread && is_awaited(head)) {
            linger(http, body);
        }
    }
    outcome
}

/// Whether reading the body would tell its client to send it: one that asked first (RFC 9110, section 10.1.1) has its
/// answer in the refusal. Not on HTTP/2, where the library never does that and breaks off a request of which it has not
/// seen the end.
fn is_awaited(head: &Parts) -> bool {
    head.version != Version::HTTP_2 && head.headers.contains_key(EXPECT)
}

/// Lets the answer go out while the rest of a body that is not taken still comes.
fn linger<B>(http: &HttpContext, body: B)
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError> + Send,
{
    http.tasks
        .spawn(discard(body, DISCARD_MAX, DISCARD_TIMEOUT));
}

/// Whether a body says beforehand that it is longer than `body_limit_mb`.
fn is_announced_too_large(body: &impl Body, limit_mb: u64) -> bool {
    body.size_hint().lower() > limit_mb.saturating_mul(MIB)
}

/// Whether a body is refused by what it says beforehand.
fn is_refused_unread(body: &impl Body, limit_mb: u64, bodies: &BodyBudget) -> bool {
    is_announced_too_large(body, limit_mb) || !bodies.has_room_for(body.size_hint().lower())
}

/// Reads a body of at most `body_limit_mb`. Of one that says that it is longer, or than there is room for, nothing is read.
async fn read<B>(
    body: &mut B,
    limit_mb: u64,
    stall: Duration,
    bodies: &BodyBudget,
) -> Result<Bytes, ReadError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    let limit = limit_mb.saturating_mul(MIB);
    let declared = body.size_hint().lower();
    if is_announced_too_large(body, limit_mb) {
        return Err(ApiError::body_too_large(limit_mb).into());
    }
    if !bodies.has_room_for(declared) {
        return Err(ReadError::NoRoom);
    }
    // One that comes at once stays where it came; others are joined.
    let mut whole: Option<(Bytes, BodyCharge)> = None;
    let mut joined: Option<JoinedBody> = None;
    let mut pace = Pace::begin(stall);
    while let Some(frame) = next(body, &pace).await? {
        let Ok(data) = frame.into_data() else {
            continue;
        };
        pace.came(data.len());
        let had = match &joined {
            Some(joined) => joined.len(),
            None => whole.as_ref().map_or(0, |(first, _)| first.len()),
        };
        if (had + data.len()) as u64 > limit {
            return Err(ApiError::body_too_large(limit_mb).into());
        }
        if let Some(joined) = &mut joined {
            joined.push(&data)?;
        } else if let Some((first, charge)) = whole.take() {
            let both = joined.insert(JoinedBody::new(charge, declared, limit));
            both.push(&first)?;
            both.push(&data)?;
        } else {
            let mut charge = bodies.charge();
            charge.grow_to(data.len() as u64)?;
            whole = Some((data, charge));
        }
    }
    Ok(match (joined, whole) {
        (Some(joined), _) => joined.freeze(),
        (None, Some((whole, charge))) => charge.keep_with(whole),
        (None, None) => Bytes::new(),
    })
}

/// How fast a body comes: a client that sends a byte now and then must not hold its place for ever.
struct Pace {
    timeout: Duration,
    begun: Instant,
    last: Instant,
    bytes: u64,
}

impl Pace {
    fn begin(timeout: Duration) -> Self {
        let now = Instant::now();
        Self {
            timeout,
            begun: now,
            last: now,
            bytes: 0,
        }
    }

    fn came(&mut self, bytes: usize) {
        self.last = Instant::now();
        self.bytes += bytes as u64;
    }

    /// When the next piece is too late.
    fn deadline(&self) -> Instant {
        let earned = Duration::from_secs(self.bytes / RATE_MIN);
        (self.last + self.timeout).min(self.begun + self.timeout + earned)
    }
}

/// The next frame; an error if the upload broke or stalled.
async fn next<B>(body: &mut B, pace: &Pace) -> Result<Option<http_body::Frame<Bytes>>, ApiError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    match tokio::time::timeout_at(pace.deadline(), body.frame()).await {
        Ok(None) => Ok(None),
        Ok(Some(Ok(frame))) => Ok(Some(frame)),
        Ok(Some(Err(error))) => Err(broken(&error.into())),
        Err(_) => Err(ApiError::new(408, STALLED)),
    }
}

/// What is said of a body that cannot be read on.
fn broken(error: &BoxError) -> ApiError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&**error);
    while let Some(error) = cause {
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        if let Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) = kind {
            return ApiError::bad_request(BAD_CHUNKS);
        }
        cause = error.source();
    }
    // The client is gone: nobody reads this answer.
    ApiError::cancelled()
}

/// Lets go of a refused request's body: one that is short is read, so that its connection can go on.
pub(crate) async fn leave<B>(head: &Parts, body: B)
where
    B: Body<Data = Bytes> + Unpin,
{
    let is_short = !body.is_end_stream() && body.size_hint().lower() <= LEAVE_MAX;
    if is_short && !is_awaited(head) {
        discard(body, LEAVE_MAX, LEAVE_TIMEOUT).await;
    }
}

/// Reads what is left and forgets it: a client that is still sending would never see its answer, as closing
/// on unread bytes resets the connection.
async fn discard<B>(mut body: B, bytes_max: u64, timeout: Duration)
where
    B: Body<Data = Bytes> + Unpin,
{
    let reading = async {
        let mut left = bytes_max;
        while let Some(Ok(frame)) = body.frame().await {
            let read = frame.data_ref().map_or(0, |data| data.len() as u64);
            left = match left.checked_sub(read) {
                Some(left) => left,
                None => return,
            };
        }
    };
    let _ = tokio::time::timeout(timeout, reading).await;
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use http_body::Frame;

    use super::*;

    /// A body in pieces of the given sizes, of which nothing is declared.
    struct Pieces(VecDeque<usize>);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let piece = self
                .0
                .pop_front()
                .map(|n| Ok(Frame::data(Bytes::from(vec![b'x'; n]))));
            Poll::Ready(piece)
        }
    }

    async fn read_pieces(sizes: &[usize]) -> Result<usize, u16> {
        let mut body = Pieces(sizes.iter().copied().collect());
        status_of(read(&mut body, 1, Duration::from_secs(30), &BodyBudget::new(MIB)).await)
    }

    fn status_of(outcome: Result<Bytes, ReadError>) -> Result<usize, u16> {
        outcome.map(|body| body.len()).map_err(|error| match error {
            ReadError::NoRoom => 503,
            ReadError::Refused(error) => error.status,
        })
    }

    #[tokio::test]
    async fn the_limit_is_exact_however_the_body_is_cut() {
        let limit = MIB as usize;
        assert_eq!(read_pieces(&[]).await, Ok(0));
        assert_eq!(read_pieces(&[limit]).await, Ok(limit));
        assert_eq!(read_pieces(&[1, limit - 2, 1]).await, Ok(limit));
        assert_eq!(read_pieces(&[limit + 1]).await, Err(413));
        assert_eq!(read_pieces(&[limit, 1]).await, Err(413));
        assert_eq!(read_pieces(&[1, limit - 1, 1]).await, Err(413));
    }

    /// A body of `count` pieces of `size` bytes, one every `every`.
    struct Slow {
        left: usize,
        size: usize,
        every: Duration,
        timer: Pin<Box<tokio::time::Sleep>>,
    }

    impl Body for Slow {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            if self.left == 0 {
                return Poll::Ready(None);
            }
            std::task::ready!(self.timer.as_mut().poll(cx));
            self.left -= 1;
            let (size, every) = (self.size, self.every);
            self.timer.set(tokio::time::sleep(every));
            Poll::Ready(Some(Ok(Frame::data(Bytes::from(vec![b'x'; size])))))
        }
    }

    /// Goal: the boundary between slow and too slow. Time is the runtime's own.
    #[tokio::test(start_paused = true)]
    async fn a_body_must_come_at_some_pace() {
        let within = async |timeout, left, size, secs| {
            let every = Duration::from_secs(secs);
            let mut slow = Slow {
                left,
                size,
                every,
                timer: Box::pin(tokio::time::sleep(every)),
            };
            let budget = BodyBudget::new(MIB);
            status_of(read(&mut slow, 1, Duration::from_secs(timeout), &budget).await)
        };
        let status = async |left, size, secs| within(30, left, size, secs).await;
        assert_eq!(within(2, 1, 1, 1).await, Ok(1));
        assert_eq!(
            within(2, 1, 1, 3).await,
            Err(408),
            "the timeout is an option"
        );
        assert_eq!(within(90, 1, 1, 80).await, Ok(1));
        assert_eq!(status(1, 1, 29).await, Ok(1));
        assert_eq!(status(1, 1, 31).await, Err(408), "nothing came");
        assert_eq!(status(29, 1, 1).await, Ok(29));
        assert_eq!(status(32, 1, 1).await, Err(408), "a byte a second");
        assert_eq!(
            status(200, 1024, 1).await,
            Ok(200 * 1024),
            "a kibibyte a second"
        );
        assert_eq!(
            status(10, 64 << 10, 29).await,
            Ok(640 << 10),
            "large and seldom"
        );
    }

    #[test]
    fn only_json_is_taken() {
        let check = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, value.parse().unwrap());
            check_content_type(&headers).is_ok()
        };
        assert!(check("application/json"));
        assert!(check("Application/JSON; charset=utf-8"));
        assert!(check("application/vnd.api+json"));
        assert!(!check("text/plain"));
        assert!(!check("text/json+json"));
        assert!(check_content_type(&HeaderMap::new()).is_err());
    }
}
