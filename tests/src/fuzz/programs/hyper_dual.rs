//! Hyper-dual numbers in f64: a value with two first derivatives and the mixed second one, each with an error bound
//! (Fike and Alonso, "The development of hyper-dual numbers for exact second-derivative calculations", 2011).
//!
//! The first direction is one element of a leaf, the second one is a fixed direction over all leaves. The mixed
//! derivative is then an element of the Hessian's product with that direction.

use std::array;
use std::ops::{Add, Mul, Sub};

/// Value with a bound on the error of a computation with less precision.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bounded {
    pub(super) value: f64,
    /// Sum of the absolute values of all terms: a rounding in any order of summation is relative to it.
    pub(super) magnitude: f64,
    /// Bound on the absolute error.
    pub(super) error: f64,
}

impl Bounded {
    fn exact(value: f64) -> Self {
        Self { value, magnitude: value.abs(), error: 0.0 }
    }
}

impl Add for Bounded {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            value: self.value + other.value,
            magnitude: self.magnitude + other.magnitude,
            error: self.error + other.error,
        }
    }
}

impl Mul for Bounded {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        Self {
            value: self.value * other.value,
            magnitude: self.magnitude * other.magnitude,
            error: (self.value.abs() + self.error) * other.error + other.value.abs() * self.error,
        }
    }
}

/// Value, derivative along each direction, and mixed second derivative.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HyperDual(pub(super) [Bounded; 4]);

/// Derivatives of orders 0 to 3 of a function of one variable.
pub(super) type Derivatives = fn(f64) -> [f64; 4];

impl HyperDual {
    pub(super) fn constant(value: f64) -> Self {
        Self::variable(value, 0.0, 0.0)
    }

    /// Creates an element of a leaf with its parts of both directions.
    pub(super) fn variable(value: f64, first: f64, second: f64) -> Self {
        Self([value, first, second, 0.0].map(Bounded::exact))
    }

    pub(super) fn value(&self) -> f64 {
        self.0[0].value
    }

    pub(super) fn error(&self) -> f64 {
        self.0[0].error
    }

    pub(super) fn scale(self, factor: f64) -> Self {
        self * Self::constant(factor)
    }

    /// Applies a function. An implementation may have an absolute error of a rounded 1, as `1 - y * y` has.
    pub(super) fn apply(self, derivatives: Derivatives) -> Self {
        let [x, first, second, mixed] = self.0;
        let orders = derivatives(x.value);
        let [value, slope, curve] = array::from_fn(|k| Bounded {
            value: orders[k],
            magnitude: orders[k].abs().max(1.0),
            // Orders above the third are left out: their error has the square of a small number as its factor.
            error: (orders[k + 1].abs() + orders.get(k + 2).map_or(0.0, |next| next.abs()) * x.error)
                * x.error,
        });
        Self([value, slope * first, slope * second, slope * mixed + curve * (first * second)])
    }

    /// Adds the error of a statement's roundings. Forward values are computed in program order, so the next rounding is
    /// relative to the value itself.
    pub(super) fn round(&mut self, units: f64) {
        for part in &mut self.0 {
            part.error += units * part.magnitude;
        }
        self.0[0].magnitude = self.value().abs();
    }
}

impl Add for HyperDual {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(array::from_fn(|k| self.0[k] + other.0[k]))
    }
}

impl Sub for HyperDual {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self + other.scale(-1.0)
    }
}

impl Mul for HyperDual {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        let ([a, a1, a2, a12], [b, b1, b2, b12]) = (self.0, other.0);
        Self([a * b, a * b1 + a1 * b, a * b2 + a2 * b, a * b12 + a12 * b + a1 * b2 + a2 * b1])
    }
}

impl std::iter::Sum for HyperDual {
    fn sum<I: Iterator<Item = Self>>(terms: I) -> Self {
        terms.fold(Self::default(), Add::add)
    }
}

/// Derivatives of the functions that programs call.
pub(super) mod functions {
    use std::f64::consts::{FRAC_2_SQRT_PI, PI, SQRT_2};

    pub(in super::super) fn exp(x: f64) -> [f64; 4] {
        [x.exp(); 4]
    }

    pub(in super::super) fn expm1(x: f64) -> [f64; 4] {
        [x.exp_m1(), x.exp(), x.exp(), x.exp()]
    }

    pub(in super::super) fn log(x: f64) -> [f64; 4] {
        [x.ln(), 1.0 / x, -x.powi(-2), 2.0 * x.powi(-3)]
    }

    pub(in super::super) fn log1p(x: f64) -> [f64; 4] {
        let [_, first, second, third] = log(1.0 + x);
        [x.ln_1p(), first, second, third]
    }

    pub(in super::super) fn power(x: f64, p: f64) -> [f64; 4] {
        let factors = [1.0, p, p * (p - 1.0), p * (p - 1.0) * (p - 2.0)];
        let order = |k: usize| if factors[k] == 0.0 { 0.0 } else { factors[k] * x.powf(p - k as f64) };
        [order(0), order(1), order(2), order(3)]
    }

    pub(in super::super) fn sqrt(x: f64) -> [f64; 4] {
        power(x, 0.5)
    }

    pub(in super::super) fn rsqrt(x: f64) -> [f64; 4] {
        power(x, -0.5)
    }

    pub(in super::super) fn reciprocal(x: f64) -> [f64; 4] {
        power(x, -1.0)
    }

    pub(in super::super) fn square(x: f64) -> [f64; 4] {
        power(x, 2.0)
    }

    pub(in super::super) fn neg(x: f64) -> [f64; 4] {
        [-x, -1.0, 0.0, 0.0]
    }

    pub(in super::super) fn sin(x: f64) -> [f64; 4] {
        [x.sin(), x.cos(), -x.sin(), -x.cos()]
    }

    pub(in super::super) fn cos(x: f64) -> [f64; 4] {
        [x.cos(), -x.sin(), -x.cos(), x.sin()]
    }

    pub(in super::super) fn tanh(x: f64) -> [f64; 4] {
        let y = x.tanh();
        let first = 1.0 - y * y;
        [y, first, -2.0 * y * first, first * (6.0 * y * y - 2.0)]
    }

    pub(in super::super) fn sigmoid(x: f64) -> [f64; 4] {
        let y = 1.0 / (1.0 + (-x).exp());
        let first = y * (1.0 - y);
        [y, first, first * (1.0 - 2.0 * y), first * (1.0 - 6.0 * y + 6.0 * y * y)]
    }

    /// Returns the derivatives of `x * f(x)`.
    fn times_x(x: f64, [f, first, second, third]: [f64; 4]) -> [f64; 4] {
        [x * f, f + x * first, 2.0 * first + x * second, 3.0 * second + x * third]
    }

    pub(in super::super) fn silu(x: f64) -> [f64; 4] {
        times_x(x, sigmoid(x))
    }

    /// Error function by a series of positive terms.
    pub(in super::super) fn erf(x: f64) -> [f64; 4] {
        let first = FRAC_2_SQRT_PI * (-x * x).exp();
        let mut term = x;
        let mut sum = 0.0;
        for n in 0..200 {
            sum += term;
            term *= 2.0 * x * x / f64::from(2 * n + 3);
        }
        let value = if x.abs() < 6.0 { first * sum } else { x.signum() };
        [value, first, -2.0 * x * first, (4.0 * x * x - 2.0) * first]
    }

    pub(in super::super) fn gelu(x: f64) -> [f64; 4] {
        let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
        let below = 0.5 + 0.5 * erf(x / SQRT_2)[0];
        times_x(x, [below, density, -x * density, (x * x - 1.0) * density])
    }

    pub(in super::super) fn relu(x: f64) -> [f64; 4] {
        if x > 0.0 { [x, 1.0, 0.0, 0.0] } else { [0.0; 4] }
    }

    pub(in super::super) fn abs(x: f64) -> [f64; 4] {
        [x.abs(), x.signum(), 0.0, 0.0]
    }

    pub(in super::super) fn leaky_relu(x: f64) -> [f64; 4] {
        if x > 0.0 { [x, 1.0, 0.0, 0.0] } else { [0.125 * x, 0.125, 0.0, 0.0] }
    }

    pub(in super::super) fn elu(x: f64) -> [f64; 4] {
        if x > 0.0 { [x, 1.0, 0.0, 0.0] } else { expm1(x) }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Result, ensure};

    use super::super::program::UNARY;
    use super::*;

    #[test]
    fn derivatives_are_limits_of_differences() -> Result<()> {
        for function in UNARY {
            for x in [0.3, 0.8, 1.7, 2.6] {
                let h = 1e-5;
                let [below, at, above] = [x - h, x, x + h].map(function.derivatives);
                for order in 0..3 {
                    let slope = (above[order] - below[order]) / (2.0 * h);
                    let good = (slope - at[order + 1]).abs() <= 1e-7 * (1.0 + slope.abs());
                    ensure!(good, "{} at {x}: order {order} rises by {slope}, {at:?}", function.name);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn mixed_parts_are_second_derivatives() -> Result<()> {
        // f = x² y + sin(x y) at (0.5, 2) along e_x and (3, 1).
        let x = HyperDual::variable(0.5, 1.0, 3.0);
        let y = HyperDual::variable(2.0, 0.0, 1.0);
        let f = x * x * y + (x * y).apply(functions::sin);
        let (sin, cos) = 1f64.sin_cos();
        let xx = 4.0 - 4.0 * sin;
        let xy = 1.0 + cos - sin;
        let expected =
            [0.5 + sin, 2.0 + 2.0 * cos, 3.0 * (2.0 + 2.0 * cos) + 0.25 + 0.5 * cos, 3.0 * xx + xy];
        for (found, expected) in f.0.iter().zip(expected) {
            ensure!((found.value - expected).abs() < 1e-12, "{:?}, expected {expected}", found);
        }
        Ok(())
    }
}
