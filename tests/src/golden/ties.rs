//! Indices of equal elements: without a stable order, an operation may return any of them.

use serde_json::Value;

use super::{GoldenCall, HostTensor};

/// Operations that return indices: the result's position, and the dimension's position among the arguments.
const INDEX_RESULTS: &[(&str, usize, usize)] =
    &[("sort", 1, 1), ("argsort", 0, 1), ("topk", 1, 2), ("kthvalue", 1, 2), ("median", 1, 1)];

/// Returns the dimension along which a result holds indices; `None` for other results, or if the order is stable.
fn index_dim(call: &GoldenCall, result: usize, rank: usize) -> Option<usize> {
    let &(_, _, at) = INDEX_RESULTS.iter().find(|(op, which, _)| *op == call.op && *which == result)?;
    if call.kwargs.get("stable").and_then(Value::as_bool) == Some(true) {
        return None;
    }
    let dim = call.args.get(at).or_else(|| call.kwargs.get("dim")).map_or(Some(-1), Value::as_i64)?;
    usize::try_from(if dim < 0 { dim + rank.max(1) as i64 } else { dim }).ok()
}

/// Reports whether both lists of indices name equal elements in every row, without duplicates in `got`.
pub(super) fn are_equivalent_indices(
    call: &GoldenCall,
    result: usize,
    input: &HostTensor<'_>,
    got: &[f64],
    wanted: &[f64],
) -> bool {
    let Some(d) = index_dim(call, result, input.shape.len()) else { return false };
    let n = input.shape.get(d).copied().unwrap_or(1);
    let inner: usize = input.shape.iter().skip(d + 1).product();
    let lines = input.shape.iter().product::<usize>() / n.max(1);
    if lines == 0 || got.len() != wanted.len() {
        return false;
    }
    let (k, values) = (got.len() / lines, input.values());
    (0..lines).all(|line| {
        let (outer, i) = (line / inner, line % inner);
        let mut named = vec![false; n];
        (0..k).all(|j| {
            let at = (outer * k + j) * inner + i;
            let value = |index: f64| values.get((outer * n + index as usize) * inner + i).copied();
            let fresh = named.get_mut(got[at] as usize).is_some_and(|named| !std::mem::replace(named, true));
            let equal = match (value(got[at]), value(wanted[at])) {
                (Some(a), Some(b)) => a == b || (a.is_nan() && b.is_nan()),
                _ => false,
            };
            got[at] >= 0.0 && fresh && equal
        })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use forebay::dtype::DType;

    use super::*;

    fn call(op: &str, stable: bool) -> GoldenCall {
        GoldenCall {
            op: op.into(),
            variant: String::new(),
            sample: 0,
            args: Vec::new(),
            kwargs: BTreeMap::from([("stable".into(), Value::Bool(stable)), ("dim".into(), 0.into())]),
            outs: Vec::new(),
            diff_outs: Vec::new(),
            cotangents: Vec::new(),
            grads: BTreeMap::new(),
            error: None,
        }
    }

    #[test]
    fn indices_of_equal_elements_are_accepted_and_others_are_not() {
        // Columns: 3 1 1 and 2 2 5.
        let input = HostTensor { dtype: DType::U8, shape: vec![3, 2], data: &[3, 2, 1, 2, 1, 5] };
        let sorted = [1.0, 0.0, 2.0, 1.0, 0.0, 2.0];
        let good =
            |got: &[f64], stable| are_equivalent_indices(&call("sort", stable), 1, &input, got, &sorted);
        assert!(good(&sorted, false));
        assert!(good(&[2.0, 1.0, 1.0, 0.0, 0.0, 2.0], false));
        assert!(!good(&[2.0, 1.0, 1.0, 0.0, 0.0, 2.0], true), "a stable order is settled");
        assert!(!good(&[1.0, 0.0, 1.0, 1.0, 0.0, 2.0], false), "an index is named twice");
        assert!(!good(&[0.0, 0.0, 2.0, 1.0, 1.0, 2.0], false), "the elements differ");
        assert!(!good(&[1.0, 0.0, 2.0, 1.0, 9.0, 2.0], false), "there is no such index");
        assert!(!are_equivalent_indices(&call("cumsum", false), 0, &input, &sorted, &sorted));
    }
}
