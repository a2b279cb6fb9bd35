//! Range checks of options, with one error text that names the option, its value and the range.

use crate::error::{Result, fail_if};

/// Reports whether a number is finite as kernels compute with it.
fn is_finite_f32(value: f64) -> bool {
    (value as f32).is_finite()
}

/// Defines checks of numbers: the condition, and the range that the error names.
macro_rules! range_checks {
    ($($(#[$doc:meta])* $check:ident: $fits:expr, $range:literal;)*) => {$(
        $(#[$doc])*
        #[track_caller]
        pub fn $check(op: &'static str, name: &str, value: f64) -> Result<()> {
            let fits: fn(f64) -> bool = $fits;
            fail_if!(!fits(value); argument(op), "`{name}` is {value}, expected {}", $range);
            Ok(())
        }
    )*};
}
range_checks! {
    /// Fails unless a number is finite.
    finite: is_finite_f32, "a finite number, in f32";
    /// Fails unless a number is finite and 0 or more.
    non_negative: |v| is_finite_f32(v) && v >= 0.0, "a finite number of 0 or more, in f32";
    /// Fails unless a number is finite and 0 or less.
    non_positive: |v| is_finite_f32(v) && v <= 0.0, "a finite number of 0 or less, in f32";
    /// Fails unless a number is finite and above 0.
    positive: |v| is_finite_f32(v) && v > 0.0, "a finite number above 0, in f32";
    /// Fails unless a number is finite and 1 or more.
    at_least_one: |v| is_finite_f32(v) && v >= 1.0, "a finite number of 1 or more, in f32";
    /// Fails unless a number is 0 or more; infinity means no bound.
    non_negative_or_infinite: |v| v >= 0.0, "0 or more; infinity bounds nothing";
    /// Fails unless a number is between 0 and 1, both included.
    unit_interval: |v| (0.0..=1.0).contains(&v), "a number from 0 to 1";
    /// Fails unless a number is a decay factor: 0 or more and below 1.
    decay_factor: |v| (0.0..1.0).contains(&v), "a number of 0 or more and below 1";
}

/// Defines structs and their `Default`, with a value for each field.
#[doc(hidden)]
#[macro_export]
macro_rules! with_defaults {
    ($(
        $(#[$meta:meta])*
        $struct_vis:vis struct $name:ident $(<$life:lifetime>)? $(<const $n:ident: usize>)? {
            $($(#[$field_meta:meta])* $vis:vis $field:ident: $ty:ty = $default:expr,)*
        }
    )+) => {$(
        $(#[$meta])*
        $struct_vis struct $name $(<$life>)? $(<const $n: usize>)? {
            $($(#[$field_meta])* $vis $field: $ty,)*
        }

        impl $(<$life>)? $(<const $n: usize>)? Default for $name $(<$life>)? $(<$n>)? {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    )+};
}
pub(crate) use with_defaults;

/// Fails unless both decay factors are 0 or more and below 1.
#[track_caller]
pub fn betas(op: &'static str, betas: (f64, f64)) -> Result<()> {
    decay_factor(op, "betas.0", betas.0)?;
    decay_factor(op, "betas.1", betas.1)
}

/// Fails unless a count is 1 or more.
#[track_caller]
pub fn positive_count(op: &'static str, name: &str, value: u64) -> Result<()> {
    fail_if!(value == 0; argument(op), "`{name}` is 0, expected 1 or more");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ODD: [f64; 4] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0];

    #[test]
    fn every_range_check_refuses_values_out_of_range() {
        type Check = fn(&'static str, &str, f64) -> Result<()>;
        let all: [(Check, &[f64], &[f64]); 8] = [
            (finite, &[-1.0, 0.0, 1.0], &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300]),
            (non_negative, &[0.0, 1.0], &ODD),
            (non_positive, &[-1.0, 0.0], &[f64::NAN, f64::NEG_INFINITY, 1.0]),
            (positive, &[1e-300], &[f64::NAN, f64::INFINITY, -1.0, 0.0]),
            (at_least_one, &[1.0, 7.0], &[f64::NAN, f64::INFINITY, 0.99]),
            (non_negative_or_infinite, &[0.0, f64::INFINITY], &[f64::NAN, f64::NEG_INFINITY, -1e-300]),
            (unit_interval, &[0.0, 1.0], &[f64::NAN, f64::INFINITY, -0.1, 1.1]),
            (decay_factor, &[0.0, 0.999], &[f64::NAN, f64::INFINITY, -0.1, 1.0]),
        ];
        for (check, inside, outside) in all {
            assert!(inside.iter().all(|&x| check("op", "x", x).is_ok()));
            for &x in outside {
                let error = check("op", "x", x).map_or_else(|error| error.to_string(), |()| String::new());
                assert!(error.contains(&format!("`x` is {x}, expected ")), "{x}: {error}");
            }
        }
        assert!(positive_count("op", "n", 1).is_ok() && positive_count("op", "n", 0).is_err());
    }
}
