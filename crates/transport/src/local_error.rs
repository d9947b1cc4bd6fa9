//! Whether a connection failed because of this machine, and not because of whoever was to be reached.
//!
//! A process without descriptors, or a machine without ports or memory, fails to reach anybody. Whoever judges a worker by its
//! connections asks here first.

use std::io;

use rustix::io::Errno;

/// Whether this machine, and not the peer, is why a connection could not be made: it has no descriptor, no port, no buffer or no
/// memory left.
#[must_use]
pub fn is_local_error(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::ADDRNOTAVAIL)
    )
}

/// Whether it is for want of a descriptor, of which others may give theirs.
#[must_use]
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::MFILE | Errno::NFILE)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_peer_does_is_not_local() {
        let of = |errno: Errno| is_local_error(&io::Error::from(errno));
        for local in [
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOBUFS,
            Errno::NOMEM,
            Errno::ADDRNOTAVAIL,
        ] {
            assert!(of(local), "{local}");
        }
        for far in [
            Errno::CONNREFUSED,
            Errno::CONNRESET,
            Errno::TIMEDOUT,
            Errno::HOSTUNREACH,
            Errno::PIPE,
        ] {
            assert!(!of(far), "{far}");
        }
        assert!(!is_local_error(&io::Error::other("no number")));
        assert!(is_out_of_descriptors(&Errno::MFILE.into()));
        assert!(!is_out_of_descriptors(&Errno::ADDRNOTAVAIL.into()));
    }
}
