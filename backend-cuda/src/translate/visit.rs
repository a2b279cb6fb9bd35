//! Traversal of expressions and statements.

use naga::{AtomicFunction, Block, Expression, FastHashSet, Function, GatherMode, Handle, Statement};

/// Calls `visit` with every operand of an expression.
pub(super) fn visit_operands(expression: &Expression, mut visit: impl FnMut(Handle<Expression>)) {
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
pub(super) fn visit_blocks<'a>(statement: &'a Statement, mut visit: impl FnMut(&'a Block)) {
    match *statement {
        Statement::Block(ref block) => visit(block),
        Statement::If { ref accept, ref reject, .. } => [accept, reject].into_iter().for_each(visit),
        Statement::Switch { ref cases, .. } => cases.iter().for_each(|case| visit(&case.body)),
        Statement::Loop { ref body, ref continuing, .. } => [body, continuing].into_iter().for_each(visit),
        _ => {}
    }
}

/// Returns the expression whose value a statement defines.
pub(super) fn statement_result(statement: &Statement) -> Option<Handle<Expression>> {
    match *statement {
        Statement::Atomic { result, .. } | Statement::Call { result, .. } => result,
        Statement::WorkGroupUniformLoad { result, .. }
        | Statement::SubgroupBallot { result, .. }
        | Statement::SubgroupGather { result, .. }
        | Statement::SubgroupCollectiveOperation { result, .. } => Some(result),
        _ => None,
    }
}

/// Adds an expression and its operands, transitively.
pub(super) fn collect_uses(
    function: &Function,
    handle: Handle<Expression>,
    used: &mut FastHashSet<Handle<Expression>>,
) {
    if used.insert(handle) {
        visit_operands(&function.expressions[handle], |operand| collect_uses(function, operand, used));
    }
}

/// Adds the expressions that the statements of a block use, and their operands, transitively.
pub(super) fn collect_block_uses(
    function: &Function,
    block: &Block,
    used: &mut FastHashSet<Handle<Expression>>,
) {
    for statement in block.iter() {
        let mut add = |handle| collect_uses(function, handle, used);
        match *statement {
            Statement::Emit(ref range) => range.clone().for_each(add),
            Statement::If { condition, .. } => add(condition),
            Statement::Switch { selector, .. } => add(selector),
            Statement::Loop { break_if, .. } => break_if.into_iter().for_each(add),
            Statement::Return { value } => value.into_iter().for_each(add),
            Statement::Store { pointer, value } => [pointer, value].into_iter().for_each(add),
            Statement::Atomic { pointer, fun, value, .. } => {
                [pointer, value].into_iter().for_each(&mut add);
                if let AtomicFunction::Exchange { compare: Some(compare) } = fun {
                    add(compare);
                }
            }
            Statement::WorkGroupUniformLoad { pointer, .. } => add(pointer),
            Statement::Call { ref arguments, .. } => arguments.iter().copied().for_each(add),
            Statement::SubgroupBallot { predicate, .. } => predicate.into_iter().for_each(add),
            Statement::SubgroupGather { mode, argument, .. } => {
                add(argument);
                match mode {
                    GatherMode::BroadcastFirst | GatherMode::QuadSwap(_) => {}
                    GatherMode::Broadcast(index)
                    | GatherMode::Shuffle(index)
                    | GatherMode::ShuffleDown(index)
                    | GatherMode::ShuffleUp(index)
                    | GatherMode::ShuffleXor(index)
                    | GatherMode::QuadBroadcast(index) => add(index),
                }
            }
            Statement::SubgroupCollectiveOperation { argument, .. } => add(argument),
            Statement::CooperativeStore { target, ref data } => {
                [target, data.pointer, data.stride].into_iter().for_each(add);
            }
            _ => {}
        }
        visit_blocks(statement, |block| collect_block_uses(function, block, used));
    }
}
