//! What goes over the socket between two processes: open files once, then messages.
//!
//! A message is its length in bytes (u32, little-endian) and JSON. What always holds: nothing longer than [`MESSAGE_BYTES_MAX`] is
//! read, and of files at most [`FILES_MAX`] are taken.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::message::Message;

/// Files that go over at once.
const FILES_MAX: usize = 8;
/// Longest message.
const MESSAGE_BYTES_MAX: usize = 256 << 20;
/// What the files travel with.
const MARK: &[u8; 4] = b"KVH1";

/// Files that another process opens are not for its own children.
#[cfg(target_os = "linux")]
const TAKE_FILES: RecvFlags = RecvFlags::CMSG_CLOEXEC;
#[cfg(not(target_os = "linux"))]
const TAKE_FILES: RecvFlags = RecvFlags::empty();

/// Hands over open files.
pub(super) fn send_files(to: &StdUnixStream, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if files.len() > FILES_MAX || !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::other("too many files to hand over"));
    }
    match sendmsg(to, &[IoSlice::new(MARK)], &mut control, SendFlags::empty())? {
        sent if sent == MARK.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Takes over what [`send_files`] handed over.
pub(super) fn take_files(from: &StdUnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut mark = [0; MARK.len()];
    let came = recvmsg(
        from,
        &mut [IoSliceMut::new(&mut mark)],
        &mut control,
        TAKE_FILES,
    )?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            files.extend(sent);
        }
    }
    match came.bytes == MARK.len() && mark == *MARK {
        true => Ok(files),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the other end does not speak our protocol",
        )),
    }
}

/// One end, for messages.
#[derive(Debug)]
pub(super) struct Channel {
    stream: UnixStream,
}

impl Channel {
    /// Must be called in a runtime.
    pub(super) fn new(stream: StdUnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream: UnixStream::from_std(stream)?,
        })
    }

    /// Says something.
    pub(super) async fn say(&mut self, message: &Message) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        let length = u32::try_from(text.len()).ok();
        let length = length.filter(|_| text.len() <= MESSAGE_BYTES_MAX);
        let length = length.ok_or_else(|| io::Error::other("a message is too long"))?;
        self.stream.write_all(&length.to_le_bytes()).await?;
        self.stream.write_all(&text).await
    }

    /// What the other end says next; `None` once it is gone. Not to be dropped while it waits, unless the channel is.
    pub(super) async fn hear(&mut self) -> io::Result<Option<Message>> {
        let mut length = [0; 4];
        match self.stream.read_exact(&mut length).await {
            Ok(_) => {}
            Err(error) if is_end(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > MESSAGE_BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a message is too long",
            ));
        }
        let mut text = Vec::new();
        let read = (&mut self.stream).take(length as u64);
        tokio::pin!(read);
        if read.read_to_end(&mut text).await? < length {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&text)?))
    }

    /// Waits until the other end is gone; whatever it says meanwhile is not heard. May be dropped.
    pub(super) async fn gone(&self) {
        let mut unheard = [0; 256];
        loop {
            if self.stream.readable().await.is_err() {
                return;
            }
            match self.stream.try_read(&mut unheard) {
                Ok(0) => return,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
                _ => {}
            }
        }
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
    )
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    /// Who connects to a listener whose owner is gone is accepted by the one that took it over.
    #[test]
    fn a_listener_goes_over_with_who_waits_at_it() {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        send_files(&ours, &[listener.as_fd()]).unwrap();
        drop(listener);
        let taken = take_files(&theirs).unwrap().remove(0);
        let (mut accepted, _) = TcpListener::from(taken).accept().unwrap();
        accepted.write_all(b"here").unwrap();
        let mut heard = [0; 4];
        client.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"here");
    }

    #[test]
    fn what_is_no_hand_over_is_refused() {
        let (mut ours, theirs) = StdUnixStream::pair().unwrap();
        ours.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(take_files(&theirs).is_err());
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        drop(ours);
        assert!(take_files(&theirs).is_err(), "nobody is there");
        let (ours, _theirs) = StdUnixStream::pair().unwrap();
        let many = [ours.as_fd(); FILES_MAX + 1];
        assert!(send_files(&ours, &many).is_err());
    }

    #[tokio::test]
    async fn messages_arrive_whole_or_not_at_all() {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        let (mut ours, mut theirs) = (Channel::new(ours).unwrap(), Channel::new(theirs).unwrap());
        ours.say(&Message::Ready).await.unwrap();
        assert!(matches!(theirs.hear().await, Ok(Some(Message::Ready))));
        // A later release may say what we do not know.
        let strange = br#"{"say":"strange","more":[1]}"#;
        ours.stream
            .write_all(&(strange.len() as u32).to_le_bytes())
            .await
            .unwrap();
        ours.stream.write_all(strange).await.unwrap();
        assert!(matches!(theirs.hear().await, Ok(Some(Message::Unknown))));
        ours.stream
            .write_all(&u32::MAX.to_le_bytes())
            .await
            .unwrap();
        assert!(theirs.hear().await.is_err());
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        let (mut ours, mut theirs) = (Channel::new(ours).unwrap(), Channel::new(theirs).unwrap());
        ours.stream.write_all(&100_u32.to_le_bytes()).await.unwrap();
        ours.stream.write_all(b"{").await.unwrap();
        drop(ours);
        assert!(matches!(theirs.hear().await, Ok(None)));
        theirs.gone().await;
    }
}
