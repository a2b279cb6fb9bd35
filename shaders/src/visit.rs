//! Traversal of naga's expressions and statements.

use naga::{Block, Expression, Handle, Statement};

/// Calls `visit` with every operand of an expression.
pub fn visit_operands(expression: &Expression, mut visit: impl FnMut(Handle<Expression>)) {
    match *expression {
        Expression::Compose { ref components, .. } => components.iter().copied().for_each(visit),
        Expression::Access { base, index } => [base, index].into_iter().for_each(visit),
        Expression::AccessIndex { base, .. } => visit(base),
        Expression::Splat { value, .. } => visit(value),
        Expression::Swizzle { vector, .. } => visit(vector),
        Expression::Load { pointer } => visit(pointer),
        Expression::Unary { expr, .. }
        | Expression::As { expr, .. }
        | Expression::Derivative { expr, .. } => visit(expr),
        Expression::Binary { left, right, .. } => [left, right].into_iter().for_each(visit),
        Expression::Select { condition, accept, reject } => {
            [condition, accept, reject].into_iter().for_each(visit);
        }
        Expression::Relational { argument, .. } => visit(argument),
        Expression::Math { arg, arg1, arg2, arg3, .. } => {
            [Some(arg), arg1, arg2, arg3].into_iter().flatten().for_each(visit);
        }
        Expression::ArrayLength(array) => visit(array),
        Expression::CooperativeLoad { ref data, .. } => {
            [data.pointer, data.stride].into_iter().for_each(visit)
        }
        Expression::CooperativeMultiplyAdd { a, b, c } => [a, b, c].into_iter().for_each(visit),
        // These have no operands, or are of kinds that no kernel contains.
        _ => {}
    }
}

/// Calls `visit` with every block inside a statement.
pub fn visit_blocks<'a>(statement: &'a Statement, mut visit: impl FnMut(&'a Block)) {
    match *statement {
        Statement::Block(ref block) => visit(block),
        Statement::If { ref accept, ref reject, .. } => [accept, reject].into_iter().for_each(visit),
        Statement::Switch { ref cases, .. } => cases.iter().for_each(|case| visit(&case.body)),
        Statement::Loop { ref body, ref continuing, .. } => [body, continuing].into_iter().for_each(visit),
        _ => {}
    }
}
