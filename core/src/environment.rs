//! Environment variables as a device reads them when it is opened: what is set and cannot be understood is an error that names the
//! variable, not a setting that is silently another one.

use std::ffi::OsStr;

use crate::error::{Error, Result};

const BYTES: &str = "a number of bytes, as 262144, or 0 for never";

/// A variable that is `0` or `1`; `None` where it is not set, or empty.
///
/// # Errors
/// It holds anything else.
pub fn switch(name: &str) -> Result<Option<bool>> {
    read(name, "0 (off) or 1 (on)", |text| match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    })
}

/// A variable that is a number of bytes; `None` where it is not set, or empty.
///
/// # Errors
/// It holds anything else.
pub fn bytes(name: &str) -> Result<Option<u64>> {
    read(name, BYTES, |text| text.parse().ok())
}

/// A variable as text; `None` where it is not set, or empty.
///
/// # Errors
/// It is no Unicode.
pub fn text(name: &str) -> Result<Option<String>> {
    read(name, "text", |text| Some(text.to_owned()))
}

fn read<T>(name: &str, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
    std::env::var_os(name).map_or(Ok(None), |value| understand(name, &value, expected, parse))
}

fn understand<T>(
    name: &str,
    value: &OsStr,
    expected: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>> {
    match value.to_str().map(str::trim) {
        Some("") => Ok(None),
        text => text.and_then(parse).map(Some).ok_or_else(|| {
            let value = value.display();
            Error::Config(format!("{name}={value}: expected {expected}; correct it, or unset it"))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_understood_is_named() {
        let number = |text: &str| {
            let read = understand("FOREBAY_FUSE", OsStr::new(text), BYTES, |text| text.parse::<u64>().ok());
            read.map_err(|e| e.to_string())
        };
        assert_eq!(number(" 0 "), Ok(Some(0)));
        assert_eq!(number(""), Ok(None));
        let wrong = "FOREBAY_FUSE=off: expected a number of bytes, as 262144, or 0 for never; correct it, or unset it";
        assert_eq!(number("off"), Err(wrong.to_owned()));
        assert!(number("-1").is_err() && number("99999999999999999999").is_err());
    }
}
