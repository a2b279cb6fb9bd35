//! Uniformity analysis: finds values and control flow that may differ between the lanes of a subgroup.
//!
//! CUDA's subgroup operations take the mask of the lanes that take part. In convergent code the mask has all
//! lanes of the subgroup, so the operation also waits for lagging lanes. In divergent code the mask has the
//! active lanes. naga's own analysis covers the workgroup and gives up at variables, so loops would count as
//! divergent.

use std::ptr;

use forebay_shaders::visit::{visit_blocks, visit_operands};
use naga::{Block, BuiltIn, CollectiveOperation, EntryPoint, Expression, FastHashMap, FastHashSet, Function};
use naga::{GatherMode, Handle, LocalVariable, Module, Statement, TypeInner};

/// Lanes of a subgroup on CUDA devices.
pub(super) const WARP_SIZE: u32 = 32;

/// Results of the analysis of one function.
#[derive(Debug, Default)]
pub(super) struct FunctionUniformity {
    /// Addresses of the statements that not all lanes may reach together.
    divergent: FastHashSet<usize>,
}

impl FunctionUniformity {
    /// Reports whether all lanes of a subgroup reach a statement of the function together, or none does.
    pub(super) fn is_convergent(&self, statement: &Statement) -> bool {
        !self.divergent.contains(&ptr::from_ref(statement).addr())
    }
}

/// Results of the analysis of a module with one entry point.
#[derive(Debug, Default)]
pub(super) struct ModuleUniformity {
    pub(super) entry: FunctionUniformity,
    pub(super) functions: FastHashMap<Handle<Function>, FunctionUniformity>,
}

/// Summary of a function's calls: is some call divergent, and which arguments may vary.
#[derive(Debug, Default)]
struct CallSites {
    divergent: bool,
    arguments: Vec<bool>,
}

pub(super) fn analyze(module: &Module, entry: &EntryPoint) -> ModuleUniformity {
    let mut varying_results = FastHashSet::default();
    for (handle, function) in module.functions.iter() {
        let uniform = CallSites { divergent: false, arguments: vec![false; function.arguments.len()] };
        if UniformityAnalysis::run(module, function, &varying_results, uniform, None).returns_varying {
            varying_results.insert(handle);
        }
    }
    let mut calls: FastHashMap<Handle<Function>, CallSites> = FastHashMap::default();
    let mut result = ModuleUniformity::default();
    let run = |function, how, entry| UniformityAnalysis::run(module, function, &varying_results, how, entry);
    let analysis = run(&entry.function, CallSites::default(), Some(entry));
    analysis.collect_calls(&entry.function.body, &mut calls);
    result.entry = FunctionUniformity { divergent: analysis.divergent };
    // naga orders functions after those that they call, so in reverse order every caller comes first.
    for (handle, function) in module.functions.iter().rev() {
        let analysis = run(function, calls.remove(&handle).unwrap_or_default(), None);
        analysis.collect_calls(&function.body, &mut calls);
        result.functions.insert(handle, FunctionUniformity { divergent: analysis.divergent });
    }
    result
}

/// Kinds of exits by which some lanes may have left a block while others continue.
#[derive(Clone, Copy, Default)]
struct DivergentExits {
    returns: bool,
    breaks: bool,
    continues: bool,
}

impl DivergentExits {
    fn any(self) -> bool {
        self.returns || self.breaks || self.continues
    }

    fn union(self, other: Self) -> Self {
        Self {
            returns: self.returns || other.returns,
            breaks: self.breaks || other.breaks,
            continues: self.continues || other.continues,
        }
    }
}

struct UniformityAnalysis<'a> {
    module: &'a Module,
    function: &'a Function,
    entry: Option<&'a EntryPoint>,
    varying_results: &'a FastHashSet<Handle<Function>>,
    calls: CallSites,
    varying: FastHashSet<Handle<Expression>>,
    varying_locals: FastHashSet<Handle<LocalVariable>>,
    divergent: FastHashSet<usize>,
    returns_varying: bool,
    changed: bool,
}

impl<'a> UniformityAnalysis<'a> {
    /// Analyses a function. Terminates, because values only ever become varying.
    fn run(
        module: &'a Module,
        function: &'a Function,
        varying_results: &'a FastHashSet<Handle<Function>>,
        calls: CallSites,
        entry: Option<&'a EntryPoint>,
    ) -> Self {
        let mut analysis = Self {
            module,
            function,
            entry,
            varying_results,
            calls,
            varying: FastHashSet::default(),
            varying_locals: FastHashSet::default(),
            divergent: FastHashSet::default(),
            returns_varying: false,
            changed: true,
        };
        while std::mem::take(&mut analysis.changed) {
            for (handle, expression) in function.expressions.iter() {
                if analysis.is_varying(expression) {
                    analysis.mark_varying(handle);
                }
            }
            analysis.visit_block(&function.body, analysis.calls.divergent);
        }
        analysis
    }

    fn mark_varying(&mut self, handle: Handle<Expression>) {
        self.changed |= self.varying.insert(handle);
    }

    fn is_varying(&self, expression: &Expression) -> bool {
        match *expression {
            Expression::FunctionArgument(index) => match self.entry {
                Some(entry) => !is_uniform_binding(&entry.function.arguments[index as usize].binding),
                None => self.calls.arguments.get(index as usize).copied().unwrap_or(true),
            },
            Expression::AccessIndex { base, index } => {
                self.varying.contains(&base) && !self.is_uniform_part(base, index)
            }
            Expression::Load { pointer } => {
                let atomic = || match self.function.expressions[self.pointer_root(pointer)] {
                    Expression::GlobalVariable(global) => {
                        let variable = &self.module.global_variables[global];
                        variable.space == naga::AddressSpace::Private || self.holds_atomics(variable.ty)
                    }
                    Expression::LocalVariable(local) => self.varying_locals.contains(&local),
                    _ => true,
                };
                self.varying.contains(&pointer) || atomic()
            }
            ref other => {
                let mut varies = false;
                visit_operands(other, |operand| varies |= self.varying.contains(&operand));
                varies
            }
        }
    }

    fn holds_atomics(&self, ty: Handle<naga::Type>) -> bool {
        match self.module.types[ty].inner {
            TypeInner::Atomic(_) => true,
            TypeInner::Array { base, .. } => self.holds_atomics(base),
            TypeInner::Struct { ref members, .. } => members.iter().any(|m| self.holds_atomics(m.ty)),
            _ => false,
        }
    }

    /// Reports whether a part of the entry point's input is uniform. The part is a member of a struct, or a
    /// coordinate, which is uniform if a warp does not extend along it.
    fn is_uniform_part(&self, base: Handle<Expression>, index: u32) -> bool {
        let Some(entry) = self.entry else { return false };
        let members =
            |argument: u32| match self.module.types[entry.function.arguments[argument as usize].ty].inner {
                TypeInner::Struct { ref members, .. } => Some(members),
                _ => None,
            };
        let binding = match self.function.expressions[base] {
            Expression::FunctionArgument(argument) => match members(argument) {
                Some(members) => return is_uniform_binding(&members[index as usize].binding),
                None => entry.function.arguments[argument as usize].binding.as_ref(),
            },
            Expression::AccessIndex { base, index } => match self.function.expressions[base] {
                Expression::FunctionArgument(argument) => {
                    members(argument).and_then(|m| m[index as usize].binding.as_ref())
                }
                _ => None,
            },
            _ => None,
        };
        let Some(naga::Binding::BuiltIn(BuiltIn::GlobalInvocationId | BuiltIn::LocalInvocationId)) = binding
        else {
            return false;
        };
        let [x, y, z] = entry.workgroup_size;
        match index {
            0 => x == 1,
            1 => y == 1 || x % WARP_SIZE == 0,
            _ => z == 1 || (x * y) % WARP_SIZE == 0,
        }
    }

    /// Returns the variable or argument into which a pointer points.
    fn pointer_root(&self, mut pointer: Handle<Expression>) -> Handle<Expression> {
        while let Expression::Access { base, .. } | Expression::AccessIndex { base, .. } =
            self.function.expressions[pointer]
        {
            pointer = base;
        }
        pointer
    }

    fn propagate_store(&mut self, pointer: Handle<Expression>, varies: bool) {
        let varies = varies || self.varying.contains(&pointer);
        if let Expression::LocalVariable(local) = self.function.expressions[self.pointer_root(pointer)]
            && varies
        {
            self.changed |= self.varying_locals.insert(local);
        }
    }

    fn visit_block(&mut self, block: &Block, mut divergent: bool) -> DivergentExits {
        let mut exits = DivergentExits::default();
        for statement in block.iter() {
            if divergent {
                self.divergent.insert(ptr::from_ref(statement).addr());
            }
            let statement_exits = self.visit_statement(statement, divergent);
            divergent |= statement_exits.any();
            exits = exits.union(statement_exits);
        }
        exits
    }

    fn visit_statement(&mut self, statement: &Statement, divergent: bool) -> DivergentExits {
        match *statement {
            Statement::Block(ref block) => return self.visit_block(block, divergent),
            Statement::If { condition, ref accept, ref reject } => {
                let is_divergent = divergent || self.varying.contains(&condition);
                return self.visit_block(accept, is_divergent).union(self.visit_block(reject, is_divergent));
            }
            Statement::Switch { selector, ref cases } => {
                let is_divergent = divergent || self.varying.contains(&selector);
                let exits = cases.iter().map(|case| self.visit_block(&case.body, is_divergent));
                let exits = exits.fold(DivergentExits::default(), DivergentExits::union);
                return DivergentExits { breaks: false, ..exits };
            }
            Statement::Loop { ref body, ref continuing, break_if } => {
                let mut is_divergent = divergent;
                loop {
                    let exits = self.visit_block(body, is_divergent);
                    let after_body = is_divergent || exits.breaks || exits.returns;
                    let continuing_exits = self.visit_block(continuing, after_body);
                    let breaks = break_if.is_some_and(|condition| self.varying.contains(&condition));
                    // Lanes that have left are missing in every later iteration.
                    let next_iteration = after_body || continuing_exits.any() || breaks;
                    if next_iteration == is_divergent {
                        return DivergentExits { returns: exits.returns, ..Default::default() };
                    }
                    is_divergent = next_iteration;
                }
            }
            Statement::Break => return DivergentExits { breaks: divergent, ..Default::default() },
            Statement::Continue => return DivergentExits { continues: divergent, ..Default::default() },
            Statement::Return { value } => {
                self.returns_varying |= divergent || value.is_some_and(|v| self.varying.contains(&v));
                return DivergentExits { returns: divergent, ..Default::default() };
            }
            Statement::Store { pointer, value } => {
                self.propagate_store(pointer, divergent || self.varying.contains(&value));
            }
            Statement::Atomic { result: Some(result), .. } => self.mark_varying(result),
            Statement::Call { function, ref arguments, result } => {
                let mut varies = divergent || self.varying_results.contains(&function);
                for &argument in arguments {
                    varies |= self.varying.contains(&argument);
                    // This does nothing for an argument that is no pointer.
                    self.propagate_store(argument, true);
                }
                if let Some(result) = result.filter(|_| varies) {
                    self.mark_varying(result);
                }
            }
            Statement::SubgroupGather { mode, result, .. }
                if !matches!(mode, GatherMode::BroadcastFirst | GatherMode::Broadcast(_)) =>
            {
                self.mark_varying(result);
            }
            Statement::SubgroupCollectiveOperation { collective_op, result, .. }
                if collective_op != CollectiveOperation::Reduce =>
            {
                self.mark_varying(result);
            }
            _ => {}
        }
        DivergentExits::default()
    }

    /// Adds the calls in a block of the function to `calls`.
    fn collect_calls(&self, block: &Block, calls: &mut FastHashMap<Handle<Function>, CallSites>) {
        for statement in block.iter() {
            if let Statement::Call { function, ref arguments, .. } = *statement {
                let sites = calls.entry(function).or_default();
                sites.divergent |= self.divergent.contains(&ptr::from_ref(statement).addr());
                sites.arguments.resize(arguments.len(), false);
                for (may_vary, argument) in sites.arguments.iter_mut().zip(arguments) {
                    *may_vary |= self.varying.contains(argument);
                }
            }
            visit_blocks(statement, |block| self.collect_calls(block, calls));
        }
    }
}

/// Reports whether an input is a builtin that is the same for all lanes of a subgroup.
fn is_uniform_binding(binding: &Option<naga::Binding>) -> bool {
    use BuiltIn::{GlobalInvocationId, LocalInvocationId, LocalInvocationIndex, SubgroupInvocationId};
    let Some(naga::Binding::BuiltIn(builtin)) = binding else { return false };
    !matches!(builtin, GlobalInvocationId | LocalInvocationId | LocalInvocationIndex | SubgroupInvocationId)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports for each subgroup operation of the module, in source order, whether all lanes reach it together.
    fn reached_together(wgsl: &str) -> Vec<bool> {
        let module = naga::front::wgsl::parse_str(wgsl).unwrap();
        let result = analyze(&module, &module.entry_points[0]);
        let mut found = Vec::new();
        for (handle, function) in module.functions.iter() {
            list(&function.body, &result.functions[&handle], &mut found);
        }
        list(&module.entry_points[0].function.body, &result.entry, &mut found);
        found
    }

    fn list(block: &Block, known: &FunctionUniformity, found: &mut Vec<bool>) {
        for statement in block.iter() {
            if matches!(statement, Statement::SubgroupCollectiveOperation { .. }) {
                found.push(known.is_convergent(statement));
            }
            visit_blocks(statement, |block| list(block, known, found));
        }
    }

    fn body(text: &str) -> String {
        format!(
            "@group(0) @binding(0) var<storage, read_write> out: array<u32>;
             @compute @workgroup_size(64, 2) fn main(
                 @builtin(local_invocation_id) id: vec3<u32>,
                 @builtin(subgroup_id) subgroup: u32,
                 @builtin(workgroup_id) group: vec3<u32>,
             ) {{ {text} }}"
        )
    }

    #[test]
    fn branches_on_uniform_values_are_uniform() {
        assert_eq!(
            reached_together(&body(
                "var x = subgroupAdd(id.x);
                 if subgroup == 0u && group.x > 1u { x = subgroupAdd(x); }
                 if x > 3u { out[0] = subgroupAdd(id.x); }
                 if id.y == 0u { out[1] = subgroupAdd(id.x); }
                 if out[group.y] == 7u { return; }
                 for (var i = 0u; i < group.x; i++) { x += subgroupAdd(i); }
                 out[2] = subgroupAdd(x);"
            )),
            [true; 6]
        );
    }

    #[test]
    fn branches_on_varying_values_are_divergent_until_they_reconverge() {
        let wgsl = body(
            "var x = 0u;
             if id.x == 0u { x = subgroupAdd(id.x); }
             if x == 0u { out[0] = subgroupAdd(x); }
             out[1] = subgroupAdd(x);
             for (var i = 0u; i < id.x; i++) { x += subgroupAdd(i); }
             out[2] = subgroupAdd(x);
             for (var i = 0u; i < 8u; i++) { if i == id.x { continue; } x += subgroupAdd(i); }
             out[3] = subgroupAdd(x);
             for (var i = 0u; i < 8u; i++) { x += subgroupAdd(i); if i == id.x { break; } }
             if id.x == 3u { return; }
             out[4] = subgroupAdd(x);",
        );
        assert_eq!(reached_together(&wgsl), [false, false, true, false, true, false, true, false, false]);
    }

    #[test]
    fn functions_are_uniform_if_all_calls_are() {
        let functions = "fn uniform_calls(x: u32) -> u32 { return subgroupAdd(x); }
             fn divergent_calls(x: u32) -> u32 { return subgroupAdd(x); }
             fn branches(x: u32) -> u32 { if x > 1u { return subgroupAdd(x); } return x; }";
        let main = body(
            "out[0] = uniform_calls(id.x) + branches(group.x);
             if id.x > 3u { out[1] = divergent_calls(2u); }
             if branches(group.x) == 0u { out[2] = subgroupAdd(1u); }
             if uniform_calls(id.x) == 0u { out[3] = subgroupAdd(1u); }",
        );
        let found = reached_together(&format!("{functions} {main}"));
        assert_eq!(found[..3], [true, false, true]);
        // The sum over lanes is the same for all lanes, but the analysis knows this only outside of a call.
        assert_eq!(found[3..], [true, false]);
    }
}
