//! Line search for the strong Wolfe conditions, by cubic interpolation (Nocedal and Wright, 2006, chapter 3).
//!
//! The rules of interpolation and their constants are PyTorch's, so that steps equal PyTorch's.

use crate::Result;

/// Fraction of the predicted decrease that a step must reach (Armijo's condition).
const SUFFICIENT_DECREASE: f64 = 1e-4;
/// Fraction of the initial slope that the slope at the end may keep (the curvature condition).
const CURVATURE: f64 = 0.9;
/// Smallest change of an element for which a bracket is divided further.
const MIN_BRACKET_CHANGE: f64 = 1e-9;

/// Point of a line search.
#[derive(Clone, Debug)]
pub(super) struct LinePoint<G> {
    /// Distance from the start, in units of the direction.
    pub(super) t: f64,
    pub(super) loss: f64,
    pub(super) grad: G,
    /// Derivative of the loss by `t`.
    pub(super) slope: f64,
}

/// Limits of a line search.
#[derive(Clone, Copy, Debug)]
pub(super) struct LineLimits {
    /// Largest magnitude of the direction's elements.
    pub(super) direction_max: f64,
    /// Number of evaluations after the first one.
    pub(super) max_evaluations: usize,
}

/// Returns the minimum of the cubic through two points and their slopes within bounds, or the middle of these.
fn interpolate<G>(a: &LinePoint<G>, b: &LinePoint<G>, (low, high): (f64, f64)) -> f64 {
    let (left, right) = if a.t <= b.t { (a, b) } else { (b, a) };
    let d1 = left.slope + right.slope - 3.0 * (left.loss - right.loss) / (left.t - right.t);
    let square = d1 * d1 - left.slope * right.slope;
    if square >= 0.0 {
        let d2 = square.sqrt();
        let part = (right.slope + d2 - d1) / (right.slope - left.slope + 2.0 * d2);
        return (right.t - (right.t - left.t) * part).max(low).min(high);
    }
    low.midpoint(high)
}

/// Returns a point that satisfies the conditions, or the best one within the limits, and the number of
/// evaluations. The first evaluation is at `t`.
pub(super) fn strong_wolfe<G: Clone>(
    start: &LinePoint<G>,
    t: f64,
    limits: LineLimits,
    mut evaluate: impl FnMut(f64) -> Result<LinePoint<G>>,
) -> Result<(LinePoint<G>, usize)> {
    let rises = |point: &LinePoint<G>| point.loss > start.loss + SUFFICIENT_DECREASE * point.t * start.slope;
    let is_flat = |point: &LinePoint<G>| point.slope.abs() <= -CURVATURE * start.slope;
    let (mut before, mut point) = (start.clone(), evaluate(t)?);
    let mut evaluations = 1;
    // Extends the interval until it brackets a minimum.
    let mut bracket = loop {
        if evaluations > limits.max_evaluations {
            break [start.clone(), point];
        }
        if rises(&point) || (evaluations > 2 && point.loss >= before.loss) {
            break [before, point];
        }
        if is_flat(&point) {
            return Ok((point, evaluations));
        }
        if point.slope >= 0.0 {
            break [before, point];
        }
        let bounds = (point.t + 0.01 * (point.t - before.t), point.t * 10.0);
        let next = evaluate(interpolate(&before, &point, bounds))?;
        evaluations += 1;
        (before, point) = (point, next);
    };
    let lower = |bracket: &[LinePoint<G>; 2]| usize::from(bracket[0].loss > bracket[1].loss);
    let mut low = lower(&bracket);
    // True if the last interpolation was close to an end of the bracket.
    let mut is_slow = false;
    while evaluations <= limits.max_evaluations {
        let (least, most) = (bracket[0].t.min(bracket[1].t), bracket[0].t.max(bracket[1].t));
        if (most - least) * limits.direction_max < MIN_BRACKET_CHANGE {
            break;
        }
        let mut t = interpolate(&bracket[0], &bracket[1], (least, most));
        let margin = 0.1 * (most - least);
        let is_close = (most - t).min(t - least) < margin;
        let moves = is_close && (is_slow || t >= most || t <= least);
        if moves {
            t = if (t - most).abs() < (t - least).abs() { most - margin } else { least + margin };
        }
        is_slow = is_close && !moves;
        let point = evaluate(t)?;
        evaluations += 1;
        let high = 1 - low;
        if rises(&point) || point.loss >= bracket[low].loss {
            bracket[high] = point;
            low = lower(&bracket);
            continue;
        }
        let is_done = is_flat(&point);
        if !is_done && point.slope * (bracket[high].t - bracket[low].t) >= 0.0 {
            bracket[high] = bracket[low].clone();
        }
        bracket[low] = point;
        if is_done {
            break;
        }
    }
    let [first, second] = bracket;
    Ok((if low == 0 { first } else { second }, evaluations))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(t: f64, loss: fn(f64) -> f64, slope: fn(f64) -> f64) -> LinePoint<()> {
        LinePoint { t, loss: loss(t), grad: (), slope: slope(t) }
    }

    #[test]
    fn a_cubic_is_minimised_by_one_interpolation() {
        let (loss, slope) = (|t: f64| t * t * t - 3.0 * t, |t: f64| 3.0 * t * t - 3.0);
        let (a, b) = (point(0.0, loss, slope), point(2.5, loss, slope));
        for (a, b) in [(&a, &b), (&b, &a)] {
            assert!((interpolate(a, b, (0.0, 2.5)) - 1.0).abs() < 1e-12);
            assert_eq!(interpolate(a, b, (0.0, 0.5)), 0.5);
        }
    }

    #[test]
    fn the_result_satisfies_both_conditions_or_is_the_best_of_the_allowed_points() -> Result<()> {
        let loss = |t: f64| (t - 3.0) * (t - 3.0) + (4.0 * t).sin();
        let slope = |t: f64| 2.0 * (t - 3.0) + 4.0 * (4.0 * t).cos();
        let start = point(0.0, loss, slope);
        for first in [1e-3, 0.1, 1.0, 3.0, 40.0] {
            for max_evaluations in [0, 1, 25] {
                let limits = LineLimits { direction_max: 1.0, max_evaluations };
                let mut seen = vec![start.loss];
                let (end, count) = strong_wolfe(&start, first, limits, |t| {
                    seen.push(loss(t));
                    Ok(point(t, loss, slope))
                })?;
                assert_eq!(count, seen.len() - 1);
                assert!(count <= max_evaluations + 1, "{count} evaluations");
                let satisfied = end.loss <= start.loss + SUFFICIENT_DECREASE * end.t * start.slope
                    && end.slope.abs() <= -CURVATURE * start.slope;
                assert!(satisfied || (max_evaluations < 25 && seen.contains(&end.loss)), "{first}: {end:?}");
                assert!(end.loss <= start.loss, "{first}: {end:?}");
            }
        }
        Ok(())
    }
}
