//! Functions: locals, statements, control flow.
//!
//! What naga marks as emitted is evaluated there: loads and whatever is used more than once go into a temporary at
//! that point, so that everything is evaluated once and in WGSL's order. The rest is pure and is written where used.

use naga::valid::FunctionInfo;
use naga::{AtomicFunction, Barrier, Block, CollectiveOperation, Direction, Expression, FastHashMap};
use naga::{FastHashSet, Function, GatherMode, Handle, LocalVariable, Span, Statement, SubgroupOperation};
use naga::{SwitchCase, SwitchValue};

use super::names::Names;
use super::types::Context;
use super::uniform::Uniformity;
use super::visit::{result, uses, uses_of};
use super::{TranslateError, unsupported};

/// Writes the body of one function.
pub(super) struct FunctionWriter<'a> {
    pub(super) context: &'a Context<'a>,
    pub(super) function: &'a Function,
    pub(super) info: &'a FunctionInfo,
    pub(super) arguments: Vec<String>,
    pub(super) locals: FastHashMap<Handle<LocalVariable>, String>,
    pub(super) temporaries: FastHashMap<Handle<Expression>, String>,
    uniformity: &'a Uniformity,
    names: Names,
    /// Temporaries declared before the loop in whose body they are made.
    hoisted: FastHashSet<Handle<Expression>>,
    /// For every loop around the current statement, the label before its `continuing` block, if `continue` needs one.
    loops: Vec<Option<String>>,
    labels: u32,
    depth: usize,
    line: u32,
    noted: u32,
    out: String,
}

type Written = Result<(), TranslateError>;

impl<'a> FunctionWriter<'a> {
    /// A writer for `function`.
    pub(super) fn new(
        context: &'a Context<'a>,
        function: &'a Function,
        info: &'a FunctionInfo,
        uniformity: &'a Uniformity,
    ) -> Self {
        let mut names = Names::default();
        let arguments = function.arguments.iter();
        let arguments = arguments.map(|a| names.unique("v_", a.name.as_deref().unwrap_or(""))).collect();
        Self {
            context,
            function,
            info,
            arguments,
            locals: FastHashMap::default(),
            temporaries: FastHashMap::default(),
            uniformity,
            names,
            hoisted: FastHashSet::default(),
            loops: Vec::new(),
            labels: 0,
            depth: 1,
            line: 0,
            noted: 0,
            out: String::new(),
        }
    }

    /// The locals and the statements.
    pub(super) fn body(mut self) -> Result<String, TranslateError> {
        for (handle, local) in self.function.local_variables.iter() {
            let name = self.names.unique("v_", local.name.as_deref().unwrap_or(""));
            let ty = self.context.type_name(local.ty)?;
            match local.init {
                Some(init) => {
                    let value = self.value(init)?;
                    self.put(format!("{ty} {name} = {value};"));
                }
                None => self.put(format!("{ty} {name}{{}};")),
            }
            self.locals.insert(handle, name);
        }
        let function = self.function;
        self.block(&function.body)?;
        Ok(self.out)
    }

    /// One line, with the number of the WGSL line that it comes from where that changes.
    pub(super) fn put(&mut self, text: impl AsRef<str>) {
        self.out.extend(std::iter::repeat_n("    ", self.depth));
        self.out.push_str(text.as_ref());
        if self.line != self.noted {
            self.out.push_str(&format!(" // {}", self.line));
            self.noted = self.line;
        }
        self.out.push('\n');
    }

    fn block(&mut self, block: &Block) -> Written {
        for (statement, &span) in block.span_iter() {
            self.at(span);
            self.statement(statement)?;
        }
        Ok(())
    }

    fn indented(&mut self, block: &Block) -> Written {
        self.depth += 1;
        let result = self.block(block);
        self.depth -= 1;
        result
    }

    fn at(&mut self, span: Span) {
        if span.is_defined() {
            self.line = span.location(self.context.wgsl).line_number;
        }
    }

    /// The name of a temporary, if the expression is to have one.
    fn temporary(&mut self, handle: Handle<Expression>) -> Option<String> {
        let info = &self.info[handle];
        let pointer = info.ty.inner_with(&self.context.module.types).pointer_space().is_some();
        if pointer || info.ref_count == 0 {
            return None;
        }
        match self.function.named_expressions.get(&handle) {
            Some(name) => Some(self.names.unique("v_", name)),
            None if info.ref_count >= self.function.expressions[handle].bake_ref_count() => {
                Some(format!("e{}", handle.index()))
            }
            None => None,
        }
    }

    /// Declares the temporary of an expression that a statement makes.
    fn define(&mut self, handle: Handle<Expression>, value: String) -> Written {
        let name = match self.temporaries.get(&handle) {
            Some(name) if self.hoisted.contains(&handle) => name.clone(),
            _ => match self.function.named_expressions.get(&handle) {
                Some(name) => self.names.unique("v_", name),
                None => format!("e{}", handle.index()),
            },
        };
        self.assign(handle, name, value)
    }

    fn assign(&mut self, handle: Handle<Expression>, name: String, value: String) -> Written {
        if self.hoisted.contains(&handle) {
            self.put(format!("{name} = {value};"));
        } else {
            let ty = self.type_of(handle)?;
            self.put(format!("const {ty} {name} = {value};"));
        }
        self.temporaries.insert(handle, name);
        Ok(())
    }

    fn statement(&mut self, statement: &Statement) -> Written {
        match *statement {
            Statement::Emit(ref range) => {
                for handle in range.clone() {
                    let name = match self.temporaries.get(&handle) {
                        Some(name) if self.hoisted.contains(&handle) => Some(name.clone()),
                        _ => self.temporary(handle),
                    };
                    if let Some(name) = name {
                        let value = self.expression(handle)?;
                        self.assign(handle, name, value)?;
                    }
                }
            }
            Statement::Block(ref block) => {
                self.put("{");
                self.indented(block)?;
                self.put("}");
            }
            Statement::If { condition, ref accept, ref reject } => {
                let condition = self.value(condition)?;
                self.put(format!("if ({condition}) {{"));
                self.indented(accept)?;
                if !reject.is_empty() {
                    self.put("} else {");
                    self.indented(reject)?;
                }
                self.put("}");
            }
            Statement::Switch { selector, ref cases } => self.switch(selector, cases)?,
            Statement::Loop { ref body, ref continuing, break_if } => {
                self.repeat(body, continuing, break_if)?
            }
            Statement::Break => self.put("break;"),
            Statement::Continue => match self.loops.last() {
                Some(Some(label)) => {
                    let jump = format!("goto {label};");
                    self.put(jump);
                }
                _ => self.put("continue;"),
            },
            Statement::Return { value: None } => self.put("return;"),
            Statement::Return { value: Some(value) } => {
                let value = self.value(value)?;
                self.put(format!("return {value};"));
            }
            Statement::Store { pointer, value } => {
                let (place, text) = (self.place(pointer)?, self.value(value)?);
                if self.inner(pointer).is_atomic_pointer(&self.context.module.types) {
                    self.context.need(|p| p.atomic = true);
                    self.put(format!("atomicStore({place}, {text});"));
                } else {
                    self.put(format!("{place} = {text};"));
                }
            }
            Statement::Atomic { pointer, ref fun, value, result } => {
                self.atomic(pointer, fun, value, result)?
            }
            Statement::Call { function, ref arguments, result } => {
                let call = self.call(function, arguments)?;
                match result {
                    Some(result) => self.define(result, call)?,
                    None => self.put(format!("{call};")),
                }
            }
            Statement::ControlBarrier(barrier) if barrier == Barrier::SUB_GROUP => {
                let mask = self.mask(statement);
                self.put(format!("__syncwarp({mask});"));
            }
            Statement::ControlBarrier(_) => self.put("__syncthreads();"),
            Statement::MemoryBarrier(_) => self.put("__threadfence_block();"),
            Statement::WorkGroupUniformLoad { pointer, result } => {
                self.put("__syncthreads();");
                let place = self.place(pointer)?;
                let atomic = self.inner(pointer).is_atomic_pointer(&self.context.module.types);
                if atomic {
                    self.context.need(|p| p.atomic = true);
                }
                self.define(result, if atomic { format!("atomicLoad({place})") } else { place })?;
                self.put("__syncthreads();");
            }
            Statement::SubgroupBallot { result, predicate } => {
                let predicate = predicate.map_or(Ok("true".to_owned()), |p| self.value(p))?;
                let mask = self.mask(statement);
                self.define(result, format!("subgroupBallot({mask}, {predicate})"))?;
            }
            Statement::SubgroupGather { mode, argument, result } => {
                let mask = self.mask(statement);
                let call = self.gather(mode, mask, argument)?;
                self.define(result, call)?;
            }
            Statement::SubgroupCollectiveOperation { op, collective_op, argument, result } => {
                let mask = self.mask(statement);
                let argument = self.value(argument)?;
                let call = collective(op, collective_op, mask, &argument)?;
                self.define(result, call)?;
            }
            Statement::Kill => return unsupported("discard"),
            Statement::ImageStore { .. } | Statement::ImageAtomic { .. } => return unsupported("a texture"),
            Statement::RayQuery { .. } | Statement::RayPipelineFunction(_) => {
                return unsupported("a ray query");
            }
            Statement::CooperativeStore { .. } => return unsupported("a cooperative matrix"),
        }
        Ok(())
    }

    /// The lanes that take part in a subgroup operation.
    fn mask(&mut self, statement: &Statement) -> &'static str {
        self.context.need(|p| (p.subgroup, p.math) = (true, true));
        if self.uniformity.is_uniform(statement) { "all_lanes()" } else { "__activemask()" }
    }

    fn switch(&mut self, selector: Handle<Expression>, cases: &[SwitchCase]) -> Written {
        let selector = self.value(selector)?;
        self.put(format!("switch ({selector}) {{"));
        self.depth += 1;
        for case in cases {
            let label = match case.value {
                SwitchValue::I32(i32::MIN) => "case i32(0x80000000u):".to_owned(),
                SwitchValue::I32(value) => format!("case {value}:"),
                SwitchValue::U32(value) => format!("case {value}u:"),
                SwitchValue::Default => "default:".to_owned(),
            };
            if case.fall_through && case.body.is_empty() {
                self.put(label);
                continue;
            }
            self.put(format!("{label} {{"));
            self.indented(&case.body)?;
            self.put(if case.fall_through { "}" } else { "} break;" });
        }
        self.depth -= 1;
        self.put("}");
        Ok(())
    }

    /// A loop. `continue` must still run the `continuing` block: it jumps to a label there, out of a scope that
    /// holds the body; what `continuing` uses of the body is declared before.
    fn repeat(&mut self, body: &Block, continuing: &Block, break_if: Option<Handle<Expression>>) -> Written {
        let tail = !continuing.is_empty() || break_if.is_some();
        let label = (tail && continues(body)).then(|| {
            self.labels += 1;
            format!("next_{}", self.labels)
        });
        if label.is_some() {
            self.hoist(body, continuing, break_if)?;
        }
        self.put("for (;;) {");
        self.depth += 1;
        self.loops.push(label.clone());
        if label.is_some() {
            self.put("{");
            self.indented(body)?;
            self.put("}");
        } else {
            self.block(body)?;
        }
        self.loops.pop();
        if let Some(label) = label {
            self.put(format!("{label}:;"));
        }
        self.block(continuing)?;
        if let Some(condition) = break_if {
            let condition = self.value(condition)?;
            self.put(format!("if ({condition}) break;"));
        }
        self.depth -= 1;
        self.put("}");
        Ok(())
    }

    fn hoist(&mut self, body: &Block, continuing: &Block, break_if: Option<Handle<Expression>>) -> Written {
        let mut used = FastHashSet::default();
        uses(self.function, continuing, &mut used);
        if let Some(condition) = break_if {
            uses_of(self.function, condition, &mut used);
        }
        let mut made = Vec::new();
        for statement in body.iter() {
            match *statement {
                Statement::Emit(ref range) => {
                    for handle in range.clone().filter(|h| used.contains(h)) {
                        if let Some(name) = self.temporary(handle) {
                            made.push((handle, name));
                        }
                    }
                }
                ref other => {
                    if let Some(handle) = result(other).filter(|h| used.contains(h)) {
                        made.push((handle, format!("e{}", handle.index())));
                    }
                }
            }
        }
        for (handle, name) in made {
            let ty = self.type_of(handle)?;
            self.put(format!("{ty} {name};"));
            self.hoisted.insert(handle);
            self.temporaries.insert(handle, name);
        }
        Ok(())
    }

    fn call(
        &self,
        function: Handle<Function>,
        arguments: &[Handle<Expression>],
    ) -> Result<String, TranslateError> {
        let mut parts = arguments.iter().map(|&a| self.value(a)).collect::<Result<Vec<_>, _>>()?;
        parts.extend(self.context.implicit(function).map(|(_, name)| name));
        Ok(format!("{}({})", self.context.functions[&function], parts.join(", ")))
    }

    fn atomic(
        &mut self,
        pointer: Handle<Expression>,
        fun: &AtomicFunction,
        value: Handle<Expression>,
        result: Option<Handle<Expression>>,
    ) -> Written {
        self.context.need(|p| p.atomic = true);
        let (place, value) = (self.place(pointer)?, self.value(value)?);
        let name = match *fun {
            AtomicFunction::Add => "atomicAdd",
            AtomicFunction::Subtract => "atomicSub",
            AtomicFunction::And => "atomicAnd",
            AtomicFunction::ExclusiveOr => "atomicXor",
            AtomicFunction::InclusiveOr => "atomicOr",
            AtomicFunction::Min => "atomicMin",
            AtomicFunction::Max => "atomicMax",
            AtomicFunction::Exchange { compare: None } => "atomicExch",
            AtomicFunction::Exchange { compare: Some(compare) } => {
                let compare = self.value(compare)?;
                let Some(result) = result else {
                    self.put(format!("exchange_if({place}, {compare}, {value});"));
                    return Ok(());
                };
                let ty = self.type_of(result)?;
                return self
                    .define(result, format!("atomicCompareExchangeWeak<{ty}>({place}, {compare}, {value})"));
            }
        };
        let call = format!("{name}({place}, {value})");
        match result {
            Some(result) => self.define(result, call),
            None => {
                self.put(format!("{call};"));
                Ok(())
            }
        }
    }

    fn gather(
        &self,
        mode: GatherMode,
        mask: &str,
        argument: Handle<Expression>,
    ) -> Result<String, TranslateError> {
        let value = self.value(argument)?;
        let (name, index) = match mode {
            GatherMode::BroadcastFirst => return Ok(format!("subgroupBroadcastFirst({mask}, {value})")),
            GatherMode::Broadcast(index) => ("subgroupBroadcast", self.value(index)?),
            GatherMode::Shuffle(index) => ("subgroupShuffle", self.value(index)?),
            GatherMode::ShuffleDown(index) => ("subgroupShuffleDown", self.value(index)?),
            GatherMode::ShuffleUp(index) => ("subgroupShuffleUp", self.value(index)?),
            GatherMode::ShuffleXor(index) => ("subgroupShuffleXor", self.value(index)?),
            GatherMode::QuadBroadcast(index) => ("quadBroadcast", self.value(index)?),
            GatherMode::QuadSwap(direction) => {
                let bits = match direction {
                    Direction::X => "1u",
                    Direction::Y => "2u",
                    Direction::Diagonal => "3u",
                };
                ("subgroupShuffleXor", bits.to_owned())
            }
        };
        Ok(format!("{name}({mask}, {value}, {index})"))
    }
}

fn collective(
    op: SubgroupOperation,
    kind: CollectiveOperation,
    mask: &str,
    argument: &str,
) -> Result<String, TranslateError> {
    let (op, identity) = match op {
        SubgroupOperation::All => return Ok(format!("subgroupAll({mask}, {argument})")),
        SubgroupOperation::Any => return Ok(format!("subgroupAny({mask}, {argument})")),
        SubgroupOperation::Add => ("op_add", Some(0)),
        SubgroupOperation::Mul => ("op_mul", Some(1)),
        SubgroupOperation::Min => ("op_min", None),
        SubgroupOperation::Max => ("op_max", None),
        SubgroupOperation::And => ("op_and", None),
        SubgroupOperation::Or => ("op_or", None),
        SubgroupOperation::Xor => ("op_xor", None),
    };
    match (kind, identity) {
        (CollectiveOperation::Reduce, _) => Ok(format!("subgroupReduce<{op}>({mask}, {argument})")),
        (CollectiveOperation::InclusiveScan, _) => Ok(format!("subgroupInclusive<{op}>({mask}, {argument})")),
        (CollectiveOperation::ExclusiveScan, Some(identity)) => {
            Ok(format!("subgroupExclusive<{op}>({mask}, {argument}, {identity})"))
        }
        (CollectiveOperation::ExclusiveScan, None) => {
            unsupported("an exclusive scan of minima, maxima or bits")
        }
    }
}

/// Whether a `continue` in the block belongs to the loop around it.
fn continues(block: &Block) -> bool {
    block.iter().any(|statement| match statement {
        Statement::Continue => true,
        Statement::Block(block) => continues(block),
        Statement::If { accept, reject, .. } => continues(accept) || continues(reject),
        Statement::Switch { cases, .. } => cases.iter().any(|case| continues(&case.body)),
        _ => false,
    })
}
