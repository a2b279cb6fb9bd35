//! Which values may differ between the lanes of a subgroup, and so where control flow may.
//!
//! CUDA's subgroup operations take the mask of the lanes that meet there. Where all lanes of the subgroup come
//! together, that is all of them, which also waits for lanes that lag; elsewhere it is those found active. naga's own
//! analysis asks about the workgroup and gives up at variables, so loops would count as divergent.

use std::ptr;

use naga::{Block, BuiltIn, CollectiveOperation, EntryPoint, Expression, FastHashMap, FastHashSet, Function};
use naga::{GatherMode, Handle, LocalVariable, Module, Statement, TypeInner};

use super::visit::{blocks, operands};

/// The lanes of a subgroup on the devices that this text is for.
const WARP: u32 = 32;

/// What is known about one function.
#[derive(Debug, Default)]
pub(super) struct Uniformity {
    /// Addresses of the statements that not all lanes may reach together.
    divergent: FastHashSet<usize>,
}

impl Uniformity {
    /// Whether all lanes of a subgroup reach a statement of the function together, or none.
    pub(super) fn is_uniform(&self, statement: &Statement) -> bool {
        !self.divergent.contains(&ptr::from_ref(statement).addr())
    }
}

/// What is known about a module with one entry point.
#[derive(Debug, Default)]
pub(super) struct ModuleUniformity {
    pub(super) entry: Uniformity,
    pub(super) functions: FastHashMap<Handle<Function>, Uniformity>,
}

/// How a function is called: whether some call is in divergent control flow, and which arguments may differ.
#[derive(Clone, Debug, Default)]
struct Calls {
    divergent: bool,
    arguments: Vec<bool>,
}

pub(super) fn analyze(module: &Module, entry: &EntryPoint) -> ModuleUniformity {
    let mut varying_results = FastHashSet::default();
    for (handle, function) in module.functions.iter() {
        let uniform = Calls { divergent: false, arguments: vec![false; function.arguments.len()] };
        let mut walk = Walk::new(module, function, &varying_results, &uniform, None);
        walk.run();
        if walk.returns_varying {
            varying_results.insert(handle);
        }
    }
    let mut calls: FastHashMap<Handle<Function>, Calls> = FastHashMap::default();
    let mut result = ModuleUniformity::default();
    let mut walk = Walk::new(module, &entry.function, &varying_results, &Calls::default(), Some(entry));
    walk.run();
    walk.collect(&mut calls);
    result.entry = Uniformity { divergent: walk.divergent };
    // naga's functions come after those that they call, so in reverse order every caller is known.
    for (handle, function) in module.functions.iter().rev() {
        let how = calls.remove(&handle).unwrap_or_default();
        let mut walk = Walk::new(module, function, &varying_results, &how, None);
        walk.run();
        walk.collect(&mut calls);
        result.functions.insert(handle, Uniformity { divergent: walk.divergent });
    }
    result
}

/// Whether some lanes may have left a block while others go on.
#[derive(Clone, Copy, Default)]
struct Exits {
    returned: bool,
    broke: bool,
    continued: bool,
}

impl Exits {
    fn any(self) -> bool {
        self.returned || self.broke || self.continued
    }

    fn or(self, other: Self) -> Self {
        Self {
            returned: self.returned || other.returned,
            broke: self.broke || other.broke,
            continued: self.continued || other.continued,
        }
    }
}

struct Walk<'a> {
    module: &'a Module,
    function: &'a Function,
    entry: Option<&'a EntryPoint>,
    varying_results: &'a FastHashSet<Handle<Function>>,
    calls: Calls,
    varying: FastHashSet<Handle<Expression>>,
    varying_locals: FastHashSet<Handle<LocalVariable>>,
    divergent: FastHashSet<usize>,
    returns_varying: bool,
    changed: bool,
}

impl<'a> Walk<'a> {
    fn new(
        module: &'a Module,
        function: &'a Function,
        varying_results: &'a FastHashSet<Handle<Function>>,
        calls: &Calls,
        entry: Option<&'a EntryPoint>,
    ) -> Self {
        Self {
            module,
            function,
            entry,
            varying_results,
            calls: calls.clone(),
            varying: FastHashSet::default(),
            varying_locals: FastHashSet::default(),
            divergent: FastHashSet::default(),
            returns_varying: false,
            changed: true,
        }
    }

    /// Everything only ever becomes varying, so this ends.
    fn run(&mut self) {
        while std::mem::take(&mut self.changed) {
            for (handle, expression) in self.function.expressions.iter() {
                if self.varies(expression) {
                    self.mark(handle);
                }
            }
            self.block(&self.function.body, self.calls.divergent);
        }
    }

    fn mark(&mut self, handle: Handle<Expression>) {
        self.changed |= self.varying.insert(handle);
    }

    fn varies(&self, expression: &Expression) -> bool {
        match *expression {
            Expression::FunctionArgument(index) => match self.entry {
                Some(entry) => !matches!(
                    entry.function.arguments[index as usize].binding,
                    Some(naga::Binding::BuiltIn(builtin)) if is_uniform(builtin)
                ),
                None => self.calls.arguments.get(index as usize).copied().unwrap_or(true),
            },
            Expression::AccessIndex { base, index } => {
                self.varying.contains(&base) && !self.is_uniform_part(base, index)
            }
            Expression::Load { pointer } => {
                let atomic = || match self.function.expressions[self.root(pointer)] {
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
                operands(other, |operand| varies |= self.varying.contains(&operand));
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

    /// Parts of the entry point's inputs: uniform members of a struct, and coordinates along which a warp does not reach.
    fn is_uniform_part(&self, base: Handle<Expression>, index: u32) -> bool {
        let Some(entry) = self.entry else { return false };
        let members =
            |argument: u32| match self.module.types[entry.function.arguments[argument as usize].ty].inner {
                TypeInner::Struct { ref members, .. } => Some(members),
                _ => None,
            };
        let binding = match self.function.expressions[base] {
            Expression::FunctionArgument(argument) => match members(argument) {
                Some(members) => {
                    return matches!(members[index as usize].binding, Some(naga::Binding::BuiltIn(b)) if is_uniform(b));
                }
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
            1 => y == 1 || x % WARP == 0,
            _ => z == 1 || (x * y) % WARP == 0,
        }
    }

    /// The variable or argument that a pointer points into.
    fn root(&self, mut pointer: Handle<Expression>) -> Handle<Expression> {
        while let Expression::Access { base, .. } | Expression::AccessIndex { base, .. } =
            self.function.expressions[pointer]
        {
            pointer = base;
        }
        pointer
    }

    fn store(&mut self, pointer: Handle<Expression>, varies: bool) {
        let varies = varies || self.varying.contains(&pointer);
        if let Expression::LocalVariable(local) = self.function.expressions[self.root(pointer)]
            && varies
        {
            self.changed |= self.varying_locals.insert(local);
        }
    }

    fn block(&mut self, block: &Block, mut divergent: bool) -> Exits {
        let mut exits = Exits::default();
        for statement in block.iter() {
            if divergent {
                self.divergent.insert(ptr::from_ref(statement).addr());
            }
            let found = self.statement(statement, divergent);
            divergent |= found.any();
            exits = exits.or(found);
        }
        exits
    }

    fn statement(&mut self, statement: &Statement, divergent: bool) -> Exits {
        match *statement {
            Statement::Block(ref block) => return self.block(block, divergent),
            Statement::If { condition, ref accept, ref reject } => {
                let inside = divergent || self.varying.contains(&condition);
                return self.block(accept, inside).or(self.block(reject, inside));
            }
            Statement::Switch { selector, ref cases } => {
                let inside = divergent || self.varying.contains(&selector);
                let exits =
                    cases.iter().fold(Exits::default(), |e, case| e.or(self.block(&case.body, inside)));
                return Exits { broke: false, ..exits };
            }
            Statement::Loop { ref body, ref continuing, break_if } => {
                let mut inside = divergent;
                loop {
                    let exits = self.block(body, inside);
                    let left = inside || exits.broke || exits.returned;
                    let late = self.block(continuing, left);
                    let leaves = break_if.is_some_and(|condition| self.varying.contains(&condition));
                    // Lanes that have left are missing in every later round.
                    let next = left || late.any() || leaves;
                    if next == inside {
                        return Exits { returned: exits.returned, ..Exits::default() };
                    }
                    inside = next;
                }
            }
            Statement::Break => return Exits { broke: divergent, ..Exits::default() },
            Statement::Continue => return Exits { continued: divergent, ..Exits::default() },
            Statement::Return { value } => {
                self.returns_varying |= divergent || value.is_some_and(|v| self.varying.contains(&v));
                return Exits { returned: divergent, ..Exits::default() };
            }
            Statement::Store { pointer, value } => {
                self.store(pointer, divergent || self.varying.contains(&value));
            }
            Statement::Atomic { result: Some(result), .. } => self.mark(result),
            Statement::Call { function, ref arguments, result } => {
                let mut varies = divergent || self.varying_results.contains(&function);
                for &argument in arguments {
                    varies |= self.varying.contains(&argument);
                    self.store(argument, true); // a no-op for what is no pointer to a variable
                }
                if let Some(result) = result.filter(|_| varies) {
                    self.mark(result);
                }
            }
            Statement::SubgroupGather { mode, result, .. }
                if !matches!(mode, GatherMode::BroadcastFirst | GatherMode::Broadcast(_)) =>
            {
                self.mark(result);
            }
            Statement::SubgroupCollectiveOperation { collective_op, result, .. }
                if collective_op != CollectiveOperation::Reduce =>
            {
                self.mark(result);
            }
            _ => {}
        }
        Exits::default()
    }

    /// Adds this function's calls to those known.
    fn collect(&self, calls: &mut FastHashMap<Handle<Function>, Calls>) {
        self.collect_block(&self.function.body, calls);
    }

    fn collect_block(&self, block: &Block, calls: &mut FastHashMap<Handle<Function>, Calls>) {
        for statement in block.iter() {
            if let Statement::Call { function, ref arguments, .. } = *statement {
                let known = calls.entry(function).or_default();
                known.divergent |= self.divergent.contains(&ptr::from_ref(statement).addr());
                known.arguments.resize(arguments.len(), false);
                for (known, argument) in known.arguments.iter_mut().zip(arguments) {
                    *known |= self.varying.contains(argument);
                }
            }
            blocks(statement, |block| self.collect_block(block, calls));
        }
    }
}

fn is_uniform(builtin: BuiltIn) -> bool {
    !matches!(
        builtin,
        BuiltIn::GlobalInvocationId
            | BuiltIn::LocalInvocationId
            | BuiltIn::LocalInvocationIndex
            | BuiltIn::SubgroupInvocationId
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether each subgroup operation of the module, in the order of the text, is reached by all lanes together.
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

    fn list(block: &Block, known: &Uniformity, found: &mut Vec<bool>) {
        for statement in block.iter() {
            if matches!(statement, Statement::SubgroupCollectiveOperation { .. }) {
                found.push(known.is_uniform(statement));
            }
            blocks(statement, |block| list(block, known, found));
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
    fn branches_on_what_all_lanes_share_are_uniform() {
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
    fn branches_on_what_differs_are_divergent_until_they_meet() {
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
    fn functions_are_as_uniform_as_their_calls() {
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
        // The sum of what differs is the same for all lanes, which is only known where it is not behind a call.
        assert_eq!(found[3..], [true, false]);
    }
}
