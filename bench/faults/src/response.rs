//! A client's reader of HTTP/1.1 responses, strict about where one ends. It shares no code with the router's own.

/// One response, or what came of it.
#[derive(Debug, Default)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// The end of its framing came.
    pub(crate) whole: bool,
    /// The server said that it closes the connection.
    pub(crate) closes: bool,
}

impl Response {
    /// A field by its lower-case name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut fields = self.headers.iter();
        fields.find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

#[derive(Debug)]
enum Framing {
    Length(usize),
    ChunkSize,
    ChunkData(usize),
    ChunkEnd,
    Trailers,
    UntilClose,
}

/// Reads one response after another.
#[derive(Debug, Default)]
pub(crate) struct ResponseReader {
    inbox: Vec<u8>,
    current: Option<(Response, Framing)>,
}

impl ResponseReader {
    /// Takes bytes as they come.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.inbox.extend_from_slice(bytes);
    }

    /// Whether bytes came that belong to no response yet.
    pub(crate) fn has_surplus(&self) -> bool {
        self.current.is_none() && !self.inbox.is_empty()
    }

    /// The next whole response.
    pub(crate) fn next(&mut self) -> Result<Option<Response>, String> {
        while self.current.is_none() {
            if !self.head()? {
                return Ok(None);
            }
        }
        while let Some((response, framing)) = &mut self.current {
            let Some(next) = step(&mut self.inbox, response, framing)? else {
                return Ok(None);
            };
            match next {
                Some(next) => *framing = next,
                None => {
                    response.whole = true;
                    return Ok(self.current.take().map(|(response, _)| response));
                }
            }
        }
        Ok(None)
    }

    /// The connection ended: what there is of a response.
    pub(crate) fn end(&mut self) -> Option<Response> {
        let (mut response, framing) = self.current.take()?;
        response.whole = matches!(framing, Framing::UntilClose);
        Some(response)
    }

    /// Reads a head; whether one was there.
    fn head(&mut self) -> Result<bool, String> {
        let mut fields = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Response::new(&mut fields);
        let parsed = head.parse(&self.inbox);
        let parsed = parsed.map_err(|error| format!("not an HTTP response ({error})"))?;
        let httparse::Status::Complete(len) = parsed else {
            return Ok(false);
        };
        let mut response = Response {
            status: head.code.unwrap_or_default(),
            ..Response::default()
        };
        for field in head.headers.iter() {
            let value = String::from_utf8_lossy(field.value).into_owned();
            let name = field.name.to_ascii_lowercase();
            response.headers.push((name, value));
        }
        self.inbox.drain(..len);
        if response.status < 200 {
            return Ok(true);
        }
        let named = |name| response.headers.iter().filter(move |(n, _)| n == name);
        if named("content-length").count() + named("transfer-encoding").count() > 1 {
            return Err("two fields say where the body ends".into());
        }
        let framing = match (
            response.header("content-length"),
            response.header("transfer-encoding"),
        ) {
            (Some(length), _) => Framing::Length(length.parse().map_err(|_| "a bad length")?),
            (None, Some("chunked")) => Framing::ChunkSize,
            (None, Some(_)) => return Err("an unknown transfer coding".into()),
            (None, None) => Framing::UntilClose,
        };
        response.closes = response.header("connection") == Some("close");
        self.current = Some((response, framing));
        Ok(true)
    }
}

/// One step through a body. `None`: more bytes are needed; `Some(None)`: it has ended.
#[expect(
    clippy::option_option,
    reason = "two questions: was there a step, and what is next?"
)]
fn step(
    inbox: &mut Vec<u8>,
    response: &mut Response,
    framing: &Framing,
) -> Result<Option<Option<Framing>>, String> {
    let line = |inbox: &mut Vec<u8>| {
        let end = inbox.windows(2).position(|pair| pair == b"\r\n")?;
        let line: Vec<u8> = inbox.drain(..end + 2).collect();
        Some(String::from_utf8_lossy(&line[..end]).into_owned())
    };
    Ok(match framing {
        Framing::Length(0) => Some(None),
        _ if inbox.is_empty() => None,
        Framing::UntilClose => {
            response.body.append(inbox);
            None
        }
        Framing::Length(left) | Framing::ChunkData(left) => {
            let count = inbox.len().min(*left);
            response.body.extend(inbox.drain(..count));
            let left = left - count;
            Some(Some(match framing {
                Framing::Length(_) => Framing::Length(left),
                _ if left == 0 => Framing::ChunkEnd,
                _ => Framing::ChunkData(left),
            }))
        }
        Framing::ChunkEnd => {
            let Some(rest) = line(inbox) else {
                return Ok(None);
            };
            if !rest.is_empty() {
                return Err("a chunk is longer than its size".into());
            }
            Some(Some(Framing::ChunkSize))
        }
        Framing::ChunkSize => {
            let Some(size) = line(inbox) else {
                return Ok(None);
            };
            let size = usize::from_str_radix(&size, 16).map_err(|_| "a bad chunk size")?;
            Some(Some(match size {
                0 => Framing::Trailers,
                size => Framing::ChunkData(size),
            }))
        }
        Framing::Trailers => {
            line(inbox).map(|line| (!line.is_empty()).then_some(Framing::Trailers))
        }
    })
}
