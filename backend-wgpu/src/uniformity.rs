//! Finds parameters that are indexed by an invocation.
//!
//! Vulkan requires indices into push constants to be dynamically uniform. Drivers that keep them in vector registers,
//! such as lavapipe, read another element otherwise. Blocks with such accesses stay in uniform buffers.

use forebay_shaders::visit::{visit_blocks, visit_operands};
use naga::{
    AddressSpace, Arena, Binding, BuiltIn, Expression, Function, GlobalVariable, Handle, Module, Statement,
};
use rustc_hash::FxHashSet;

/// Reports whether a kernel indexes its uniform block with a value that may differ between invocations. Values from
/// memory and from calls, and arguments of functions, count as different.
pub(crate) fn indexes_params_by_invocation(module: &Module) -> bool {
    let functions = module.functions.iter().map(|(_, function)| function);
    functions.chain(module.entry_points.iter().map(|entry| &entry.function)).any(|function| {
        let search = Search::new(function, &module.global_variables);
        function.expressions.iter().any(|(_, expression)| match *expression {
            Expression::Access { base, index } => search.is_in_params(base) && search.varies(index),
            _ => false,
        })
    })
}

struct Search<'a> {
    expressions: &'a Arena<Expression>,
    function: &'a Function,
    globals: &'a Arena<GlobalVariable>,
    /// Stores of the function: pointers and values.
    stores: Vec<(Handle<Expression>, Handle<Expression>)>,
}

impl<'a> Search<'a> {
    fn new(function: &'a Function, globals: &'a Arena<GlobalVariable>) -> Self {
        let mut stores = Vec::new();
        collect_stores(&function.body, &mut stores);
        Self { expressions: &function.expressions, function, globals, stores }
    }

    /// Returns the variable that a pointer leads into, through its components.
    fn root(&self, mut pointer: Handle<Expression>) -> &Expression {
        loop {
            match &self.expressions[pointer] {
                Expression::Access { base, .. } | Expression::AccessIndex { base, .. } => pointer = *base,
                Expression::Load { pointer: of } => pointer = *of,
                root => return root,
            }
        }
    }

    fn is_in_params(&self, pointer: Handle<Expression>) -> bool {
        matches!(*self.root(pointer), Expression::GlobalVariable(global)
            if self.globals[global].space == AddressSpace::Uniform)
    }

    fn varies(&self, expression: Handle<Expression>) -> bool {
        let (mut seen, mut pending) = (FxHashSet::default(), vec![expression]);
        while let Some(next) = pending.pop() {
            if !seen.insert(next) {
                continue;
            }
            match &self.expressions[next] {
                Expression::Literal(_)
                | Expression::Constant(_)
                | Expression::Override(_)
                | Expression::ZeroValue(_) => {}
                Expression::GlobalVariable(global)
                    if self.globals[*global].space == AddressSpace::Uniform => {}
                Expression::LocalVariable(variable) => {
                    pending.extend(self.function.local_variables[*variable].init);
                    let values = self.stores.iter().filter(|(pointer, _)| {
                        matches!(self.root(*pointer), Expression::LocalVariable(to) if to == variable)
                    });
                    pending.extend(values.map(|(_, value)| *value));
                }
                Expression::FunctionArgument(index) => {
                    let binding = &self.function.arguments[*index as usize].binding;
                    if !matches!(
                        binding,
                        Some(Binding::BuiltIn(BuiltIn::WorkGroupId | BuiltIn::NumWorkGroups))
                    ) {
                        return true;
                    }
                }
                known @ (Expression::Access { .. }
                | Expression::AccessIndex { .. }
                | Expression::Load { .. }
                | Expression::Splat { .. }
                | Expression::Swizzle { .. }
                | Expression::Unary { .. }
                | Expression::As { .. }
                | Expression::Binary { .. }
                | Expression::Select { .. }
                | Expression::Compose { .. }
                | Expression::Math { .. }) => visit_operands(known, |operand| pending.push(operand)),
                _ => return true,
            }
        }
        false
    }
}

fn collect_stores(block: &naga::Block, stores: &mut Vec<(Handle<Expression>, Handle<Expression>)>) {
    for statement in block {
        if let Statement::Store { pointer, value } = *statement {
            stores.push((pointer, value));
        }
        visit_blocks(statement, |inner| collect_stores(inner, stores));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_by_invocation_are_found() {
        let kernel = |body: &str| {
            let source = format!(
                "struct Params {{ items: array<vec4<u32>, 4>, n: u32 }}
                @group(1) @binding(0) var<uniform> p: Params;
                @group(0) @binding(0) var<storage, read_write> out: array<u32>;
                fn item(k: u32) -> u32 {{ return p.items[0][k & 3u]; }}
                @compute @workgroup_size(4)
                fn main(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3<u32>) {{
                    {body}
                }}"
            );
            let source = if body.contains("item(") { source } else { source.replace("[k & 3u]", ".x") };
            indexes_params_by_invocation(&naga::front::wgsl::parse_str(&source).unwrap())
        };
        assert!(kernel("out[lane] = p.items[lane].x;"));
        assert!(kernel("out[lane] = p.n + p.items[1][lane];"));
        assert!(kernel("var k = 1u; if group.x > 3u { k = min(lane, 2u); } out[lane] = p.items[k].y;"));
        assert!(kernel("out[lane] = p.items[out[0]].y;"));
        assert!(kernel("out[lane] = item(group.x);"));
        assert!(!kernel("out[lane] = p.items[group.x % 4u].x + p.n;"));
        assert!(!kernel(
            "for (var d = p.n; d > 0u; d--) { out[lane] += p.items[(d - 1u) >> 2u][(d - 1u) & 3u]; }"
        ));
    }
}
