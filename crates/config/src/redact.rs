//! What must not be repeated of an address: who a user is, and the password.

/// Stands for a user and a password.
const HIDDEN: &str = "(hidden)";

/// `text` without the user and the password of an address in it, for messages and logs.
///
/// Rather too much is hidden than too little: a password may hold any character, so all up to the last `@` goes.
///
/// ```
/// # use kvasir_config::redacted;
/// assert_eq!(redacted("http://me:secret@gpu-1:8000"), "http://(hidden)@gpu-1:8000");
/// assert_eq!(redacted("http://gpu-1:8000"), "http://gpu-1:8000");
/// ```
#[must_use]
pub fn redacted(text: &str) -> String {
    let Some((before, host)) = text.rsplit_once('@') else {
        return text.to_owned();
    };
    match before.split_once("://") {
        Some((scheme, _)) => format!("{scheme}://{HIDDEN}@{host}"),
        None if before.contains(':') => format!("{HIDDEN}@{host}"),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::redacted;

    #[test]
    fn whatever_the_password_is_made_of_it_is_not_shown() {
        for (written, shown) in [
            ("http://u:p@h:1", "http://(hidden)@h:1"),
            ("u:p@h:1", "(hidden)@h:1"),
            ("http://u:p/a@b@h", "http://(hidden)@h"),
            ("http://a:1,events=tcp://u:p@h:1", "http://(hidden)@h:1"),
            ("nats://token@h", "nats://(hidden)@h"),
            ("1@60", "1@60"),
            ("", ""),
        ] {
            assert_eq!(redacted(written), shown);
        }
    }
}
