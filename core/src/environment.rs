//! Reading of environment variables. An invalid variable is an error that names the variable, instead of being
//! ignored.

use std::ffi::OsStr;

pub(crate) const EXPECTED_BYTES: &str = "a number of bytes, such as 262144, or 0 for never";
pub(crate) const EXPECTED_BYTES_OR_OFF: &str = "a number of bytes, such as 262144, or off";
pub(crate) const EXPECTED_SWITCH: &str = "0 (off) or 1 (on)";

/// Error of a variable with an invalid value: its name, the value, and what is expected.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidVariable(pub(crate) String);

/// Reads a variable that is `0` or `1`; returns `None` if it is unset or empty.
///
/// # Errors
/// The variable has another value.
pub fn read_switch(name: &str) -> Result<Option<bool>, InvalidVariable> {
    read_variable(name, EXPECTED_SWITCH, |text| match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    })
}

/// Reads a number of bytes; returns `None` if the variable is unset or empty.
///
/// # Errors
/// The variable has another value.
pub fn read_bytes(name: &str) -> Result<Option<u64>, InvalidVariable> {
    read_variable(name, EXPECTED_BYTES, |text| text.parse().ok())
}

/// Reads a number of bytes or `off`, which is `Some(None)`; returns `None` if the variable is unset or empty.
///
/// # Errors
/// The variable has another value.
pub fn read_bytes_or_off(name: &str) -> Result<Option<Option<u64>>, InvalidVariable> {
    read_variable(name, EXPECTED_BYTES_OR_OFF, parse_bytes_or_off)
}

pub(crate) fn parse_bytes_or_off(text: &str) -> Option<Option<u64>> {
    if text == "off" { Some(None) } else { text.parse().ok().map(Some) }
}

/// Reads a text; returns `None` if the variable is unset or empty.
///
/// # Errors
/// The value is not Unicode.
pub fn read_text(name: &str) -> Result<Option<String>, InvalidVariable> {
    read_variable(name, "text", |text| Some(text.to_owned()))
}

fn read_variable<T>(
    name: &str,
    expected: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, InvalidVariable> {
    std::env::var_os(name).map_or(Ok(None), |value| parse_value(name, &value, expected, parse))
}

pub(crate) fn parse_value<T>(
    name: &str,
    value: &OsStr,
    expected: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, InvalidVariable> {
    match value.to_str().map(str::trim) {
        Some("") => Ok(None),
        text => text.and_then(parse).map(Some).ok_or_else(|| {
            let value = value.display();
            InvalidVariable(format!("{name}={value}: expected {expected}; correct it, or unset it"))
        }),
    }
}
