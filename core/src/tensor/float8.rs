//! Conversions of 8-bit floats on the host, with PyTorch 2.15's rounding: to nearest, ties to even.
//!
//! Values too large for e4m3fn saturate at 448 (older releases return NaN), and for e5m2 become infinite.
//! `types.wgsl` implements the same conversions for devices.

use crate::dtype::DType;

/// Format of a type of [`DType::STORED`], without the sign bit.
struct Float8Format {
    /// Number of mantissa bits.
    mantissa: u32,
    /// Exponent bias.
    bias: u32,
    /// Smallest f32 (as bits) that overflows, and the byte that overflow gives.
    overflow: (u32, u8),
}

impl Float8Format {
    fn for_dtype(dtype: DType) -> Self {
        match dtype {
            // 464 is midway between 448 and 480, whose encoding is NaN.
            DType::F8E4M3 => Self { mantissa: 3, bias: 7, overflow: (0x43e8_0000, 0x7e) },
            _ => Self { mantissa: 2, bias: 15, overflow: (0x4780_0000, 0x7c) },
        }
    }
}

pub(crate) fn to_f32(dtype: DType, byte: u8) -> f32 {
    let Float8Format { mantissa, bias, .. } = Float8Format::for_dtype(dtype);
    let magnitude = u32::from(byte & 0x7f);
    let (exponent, fraction) = (magnitude >> mantissa, magnitude & ((1 << mantissa) - 1));
    let value = match (dtype, exponent) {
        (DType::F8E4M3, _) if magnitude == 0x7f => f32::NAN,
        (DType::F8E5M2, 31) if fraction > 0 => f32::NAN,
        (DType::F8E5M2, 31) => f32::INFINITY,
        (_, 0) => fraction as f32 * f32::from_bits((128 - bias - mantissa) << 23),
        _ => f32::from_bits((magnitude << (23 - mantissa)) + ((127 - bias) << 23)),
    };
    if byte & 0x80 == 0 { value } else { -value }
}

/// Returns the byte of the nearest value.
pub(crate) fn from_f32(dtype: DType, value: f32) -> u8 {
    let Float8Format { mantissa, bias, overflow: too_large } = Float8Format::for_dtype(dtype);
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = value.to_bits() & 0x7fff_ffff;
    if value.is_nan() {
        return sign | 0x7f;
    }
    if magnitude >= too_large.0 {
        return sign | too_large.1;
    }
    let exponent = magnitude >> 23;
    // Subnormals keep the step of the smallest normal value, so more bits are rounded off.
    let (bits, lost) = if exponent + bias < 128 {
        ((magnitude & 0x7f_ffff) | 0x80_0000, (151 - bias - mantissa).saturating_sub(exponent).min(31))
    } else {
        (magnitude - ((127 - bias) << 23), 23 - mantissa)
    };
    let (kept, rest, middle) = (bits >> lost, bits & ((1 << lost) - 1), 1 << (lost - 1));
    let up = rest > middle || (rest == middle && kept & 1 == 1);
    sign | (kept + u32::from(up)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the finite values from 0 up.
    fn finite(dtype: DType) -> impl Iterator<Item = (u8, f32)> {
        (0..0x7f).map(move |byte| (byte, to_f32(dtype, byte))).filter(|(_, value)| value.is_finite())
    }

    #[test]
    fn every_byte_round_trips() {
        for dtype in DType::STORAGE_ONLY {
            for byte in 0..=255u8 {
                let value = to_f32(dtype, byte);
                let back = from_f32(dtype, value);
                assert!(
                    back == byte || (value.is_nan() && back & 0x7f == 0x7f),
                    "{dtype} {byte:#x}: {value}"
                );
            }
        }
    }

    #[test]
    fn values_round_to_nearest_and_ties_to_even() {
        for dtype in DType::STORAGE_ONLY {
            let all: Vec<(u8, f32)> = finite(dtype).collect();
            assert!(all.windows(2).all(|pair| pair[0].1 < pair[1].1));
            for pair in all.windows(2) {
                let [(low, a), (high, b)] = [pair[0], pair[1]];
                let middle = (a + b) / 2.0;
                let even = if low % 2 == 0 { low } else { high };
                let near = [(middle.next_down(), low), (middle, even), (middle.next_up(), high)];
                for (value, expected) in near {
                    assert_eq!(from_f32(dtype, value), expected, "{dtype} {value:e}");
                    assert_eq!(from_f32(dtype, -value), expected | 0x80, "{dtype} {value:e}");
                }
            }
        }
    }

    /// Computed by PyTorch 2.15: `torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8)`.
    #[test]
    fn values_that_are_too_large_round_as_in_pytorch() {
        let values = [448.0, 464.0, 464.1, 480.0, 1e9, f32::INFINITY, f32::NAN, 1e-38, 2f32.powi(-10), 0.3];
        let bytes = |dtype| values.map(|value| from_f32(dtype, value));
        assert_eq!(bytes(DType::F8E4M3), [0x7e, 0x7e, 0x7e, 0x7e, 0x7e, 0x7e, 0x7f, 0, 0, 0x2a]);
        let values = [57_344.0, 61_439.0, 61_440.0, 65_535.0, 65_536.0, f32::INFINITY, f32::NAN, 1e-38, 0.3];
        let bytes = |dtype| values.map(|value| from_f32(dtype, value));
        assert_eq!(bytes(DType::F8E5M2), [0x7b, 0x7b, 0x7c, 0x7c, 0x7c, 0x7c, 0x7f, 0, 0x35]);
    }
}
