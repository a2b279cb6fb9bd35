//! Elementwise operations on i64 for devices without 64-bit integers. Kernels compute with the two words of an integer,
//! by functions in shaders/wgsl/i64w.wgsl.

/// Expressions of operations for integers, and the same for i64 as two words.
const WORD_EXPRESSIONS: &[(&str, &str)] = &[
    ("a", "a"),
    ("b", "b"),
    ("round_even(a)", "a"),
    ("a + b", "i64w_add(a, b)"),
    ("a - b", "i64w_sub(a, b)"),
    ("b - a", "i64w_sub(b, a)"),
    ("a * b", "i64w_mul(a, b)"),
    ("a * a", "i64w_mul(a, a)"),
    ("a / b", "i64w_trunc_div(a, b)"),
    ("a % b", "i64w_fmod(a, b)"),
    ("int_remainder(a, b)", "i64w_remainder(a, b)"),
    ("int_floor_div(a, b)", "i64w_floor_div(a, b)"),
    ("T(0) - a", "i64w_neg(a)"),
    ("abs(a)", "i64w_abs(a)"),
    ("select(T(0), T(1), a > T(0)) - select(T(0), T(1), a < T(0))", "i64w_sign(a)"),
    ("a == b", "all(a == b)"),
    ("!(a == b)", "any(a != b)"),
    ("a < b", "i64w_less(a, b)"),
    ("a <= b", "!i64w_less(b, a)"),
    ("a > b", "i64w_less(b, a)"),
    ("a >= b", "!i64w_less(a, b)"),
    ("~a", "~a"),
    ("a & b", "a & b"),
    ("a | b", "a | b"),
    ("a ^ b", "a ^ b"),
    ("select(c, b, a != T(0))", "select(c, b, any(a != T()))"),
    ("select(a, c, b != T(0))", "select(a, c, any(b != T()))"),
    ("select(select(max(a, b), b, m_isnan(f32(b))), a, m_isnan(f32(a)))", "i64w_max(a, b)"),
    ("select(select(max(a, b), a, m_isnan(f32(b))), b, m_isnan(f32(a)))", "i64w_max(a, b)"),
    ("select(select(min(a, b), b, m_isnan(f32(b))), a, m_isnan(f32(a)))", "i64w_min(a, b)"),
    ("select(select(min(a, b), a, m_isnan(f32(b))), b, m_isnan(f32(a)))", "i64w_min(a, b)"),
    (
        "select(select(select(min(max(a, b), c), c, m_isnan(f32(c))), b, m_isnan(f32(b))), a, m_isnan(f32(a)))",
        "i64w_min(i64w_max(a, b), c)",
    ),
];

/// Returns the expression of an operation for i64 as two words, or `None` for operations without such a form.
pub(crate) fn word_expression(expr: &str) -> Option<&'static str> {
    WORD_EXPRESSIONS.iter().find(|(plain, _)| *plain == expr).map(|(_, words)| *words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::elementwise::{binary, unary};

    #[test]
    fn expressions_belong_to_operations() {
        let operations = [unary::OPERATIONS, binary::OPERATIONS];
        let known: Vec<&str> =
            operations.into_iter().flatten().flat_map(|op| [op.expr, op.int_f64_expr]).collect();
        // Those of casts, fills, masks, clamps and complements are not in the lists.
        let others = ["a", "b", "~a", "select(c, b, a != T(0))", "select(a, c, b != T(0))"];
        for (plain, words) in WORD_EXPRESSIONS {
            let is_known =
                known.contains(plain) || others.contains(plain) || words.contains("i64w_max(a, b), c");
            assert!(is_known, "`{plain}` is the expression of no operation");
        }
    }
}
