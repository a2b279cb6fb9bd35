//! Uses of expressions, and results of statements.

use forebay_shaders::visit::{visit_blocks, visit_operands};
use naga::{AtomicFunction, Block, Expression, FastHashSet, Function, GatherMode, Handle, Statement};

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
