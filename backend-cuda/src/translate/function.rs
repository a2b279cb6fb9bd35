//! Functions: locals, statements, control flow.
//!
//! An expression is evaluated where naga emits it. Loads and expressions with several uses are stored in a
//! temporary there, so everything is evaluated once and in WGSL's order. All other expressions are pure and
//! are written where they are used.

use naga::valid::FunctionInfo;
use naga::{
    AtomicFunction, Barrier, Block, CollectiveOperation, CooperativeData, CooperativeRole, Direction,
};
use naga::{Expression, FastHashMap, Range, TypeInner};
use naga::{FastHashSet, Function, GatherMode, Handle, LocalVariable, Span, Statement, SubgroupOperation};
use naga::{SwitchCase, SwitchValue};

use super::names::NameScope;
use super::types::ModuleContext;
use super::uniformity::FunctionUniformity;
use super::visit::{collect_block_uses, collect_uses, statement_result};
use super::{TranslateError, unsupported};

pub(super) struct FunctionWriter<'a> {
    pub(super) context: &'a ModuleContext<'a>,
    pub(super) function: &'a Function,
    pub(super) info: &'a FunctionInfo,
    pub(super) arguments: Vec<String>,
    pub(super) locals: FastHashMap<Handle<LocalVariable>, String>,
    pub(super) temporaries: FastHashMap<Handle<Expression>, String>,
    uniformity: &'a FunctionUniformity,
    names: NameScope,
    /// Temporaries that are declared before the loop in whose body they are assigned.
    hoisted: FastHashSet<Handle<Expression>>,
    /// For each enclosing loop, the label before its `continuing` block, if `continue` needs one.
    loops: Vec<Option<String>>,
    labels: u32,
    depth: usize,
    line: u32,
    last_noted_line: u32,
    out: String,
}

type WriteResult = Result<(), TranslateError>;

impl<'a> FunctionWriter<'a> {
    pub(super) fn new(
        context: &'a ModuleContext<'a>,
        function: &'a Function,
        info: &'a FunctionInfo,
        uniformity: &'a FunctionUniformity,
    ) -> Self {
        let mut names = NameScope::default();
        let arguments = function.arguments.iter();
        let arguments = arguments.map(|a| names.unique_name("v_", a.name.as_deref().unwrap_or(""))).collect();
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
            last_noted_line: 0,
            out: String::new(),
        }
    }

    /// Writes the locals and the statements.
    pub(super) fn write_body(mut self) -> Result<String, TranslateError> {
        for (handle, local) in self.function.local_variables.iter() {
            let name = self.names.unique_name("v_", local.name.as_deref().unwrap_or(""));
            let ty = self.context.type_name(local.ty)?;
            let value = match local.init {
                Some(init) => format!(" = {}", self.value(init)?),
                None => "{}".to_owned(),
            };
            self.write_line(format!("{ty} {name}{value};"));
            self.locals.insert(handle, name);
        }
        let function = self.function;
        self.write_block(&function.body)?;
        Ok(self.out)
    }

    /// Writes one line, with a comment that names the WGSL line when that changes.
    pub(super) fn write_line(&mut self, text: impl AsRef<str>) {
        self.out.extend(std::iter::repeat_n("    ", self.depth));
        self.out.push_str(text.as_ref());
        if self.line != self.last_noted_line {
            self.out.push_str(&format!(" // {}", self.line));
            self.last_noted_line = self.line;
        }
        self.out.push('\n');
    }

    fn write_block(&mut self, block: &Block) -> WriteResult {
        for (statement, &span) in block.span_iter() {
            self.set_line(span);
            self.write_statement(statement)?;
        }
        Ok(())
    }

    fn write_indented(&mut self, block: &Block) -> WriteResult {
        self.depth += 1;
        let result = self.write_block(block);
        self.depth -= 1;
        result
    }

    fn set_line(&mut self, span: Span) {
        if span.is_defined() {
            self.line = span.location(self.context.wgsl).line_number;
        }
    }

    /// Returns the name of a temporary, if the expression needs one.
    fn temporary_name(&mut self, handle: Handle<Expression>) -> Option<String> {
        let info = &self.info[handle];
        let pointer = info.ty.inner_with(&self.context.module.types).pointer_space().is_some();
        if pointer || info.ref_count == 0 {
            return None;
        }
        match self.function.named_expressions.get(&handle) {
            Some(name) => Some(self.names.unique_name("v_", name)),
            None if info.ref_count >= self.function.expressions[handle].bake_ref_count()
                || matches!(self.function.expressions[handle], Expression::CooperativeLoad { .. }) =>
            {
                Some(format!("e{}", handle.index()))
            }
            None => None,
        }
    }

    /// Declares the temporary for the result of a statement.
    fn assign_result(&mut self, handle: Handle<Expression>, value: String) -> WriteResult {
        let name = match self.temporaries.get(&handle) {
            Some(name) if self.hoisted.contains(&handle) => name.clone(),
            _ => match self.function.named_expressions.get(&handle) {
                Some(name) => self.names.unique_name("v_", name),
                None => format!("e{}", handle.index()),
            },
        };
        self.assign_temporary(handle, name, value)
    }

    /// Writes a call, whose value is assigned to `result` if there is one.
    fn write_call(&mut self, result: Option<Handle<Expression>>, call: String) -> WriteResult {
        match result {
            Some(result) => self.assign_result(result, call)?,
            None => self.write_line(format!("{call};")),
        }
        Ok(())
    }

    fn assign_temporary(&mut self, handle: Handle<Expression>, name: String, value: String) -> WriteResult {
        if self.hoisted.contains(&handle) {
            self.write_line(format!("{name} = {value};"));
        } else {
            let ty = self.type_name_of(handle)?;
            self.write_line(format!("const {ty} {name} = {value};"));
        }
        self.temporaries.insert(handle, name);
        Ok(())
    }

    fn write_statement(&mut self, statement: &Statement) -> WriteResult {
        match *statement {
            Statement::Emit(ref range) => self.write_emitted(range)?,
            Statement::Block(ref block) => {
                self.write_line("{");
                self.write_indented(block)?;
                self.write_line("}");
            }
            Statement::If { condition, ref accept, ref reject } => {
                let condition = self.value(condition)?;
                self.write_line(format!("if ({condition}) {{"));
                self.write_indented(accept)?;
                if !reject.is_empty() {
                    self.write_line("} else {");
                    self.write_indented(reject)?;
                }
                self.write_line("}");
            }
            Statement::Switch { selector, ref cases } => self.write_switch(selector, cases)?,
            Statement::Loop { ref body, ref continuing, break_if } => {
                self.write_loop(body, continuing, break_if)?
            }
            Statement::Break => self.write_line("break;"),
            Statement::Continue => self.write_line(match self.loops.last() {
                Some(Some(label)) => format!("goto {label};"),
                _ => "continue;".to_owned(),
            }),
            Statement::Return { value: None } => self.write_line("return;"),
            Statement::Return { value: Some(value) } => {
                let value = self.value(value)?;
                self.write_line(format!("return {value};"));
            }
            Statement::Store { pointer, value } => {
                let (lvalue, text) = (self.lvalue(pointer)?, self.value(value)?);
                self.write_line(match self.is_atomic(pointer) {
                    true => format!("atomicStore({lvalue}, {text});"),
                    false => format!("{lvalue} = {text};"),
                });
            }
            Statement::Atomic { pointer, ref fun, value, result } => {
                self.write_atomic(pointer, fun, value, result)?
            }
            Statement::Call { function, ref arguments, result } => {
                let call = self.call_expression(function, arguments)?;
                self.write_call(result, call)?;
            }
            Statement::ControlBarrier(barrier) if barrier == Barrier::SUB_GROUP => {
                let mask = self.lane_mask(statement);
                self.write_line(format!("__syncwarp({mask});"));
            }
            Statement::ControlBarrier(_) => self.write_line("__syncthreads();"),
            Statement::MemoryBarrier(_) => self.write_line("__threadfence_block();"),
            Statement::WorkGroupUniformLoad { pointer, result } => {
                self.write_line("__syncthreads();");
                let lvalue = self.lvalue(pointer)?;
                let value = if self.is_atomic(pointer) { format!("atomicLoad({lvalue})") } else { lvalue };
                self.assign_result(result, value)?;
                self.write_line("__syncthreads();");
            }
            Statement::SubgroupBallot { .. }
            | Statement::SubgroupGather { .. }
            | Statement::SubgroupCollectiveOperation { .. } => self.write_subgroup_operation(statement)?,
            Statement::Kill => return unsupported("discard"),
            Statement::ImageStore { .. } | Statement::ImageAtomic { .. } => return unsupported("a texture"),
            Statement::RayQuery { .. } | Statement::RayPipelineFunction(_) => {
                return unsupported("a ray query");
            }
            Statement::CooperativeStore { target, ref data } => self.write_cooperative_store(target, data)?,
        }
        Ok(())
    }

    /// Writes the values of a range that need a name.
    fn write_emitted(&mut self, range: &Range<Expression>) -> WriteResult {
        for handle in range.clone() {
            let name = match self.temporaries.get(&handle) {
                Some(name) if self.hoisted.contains(&handle) => Some(name.clone()),
                _ => self.temporary_name(handle),
            };
            if let Some(name) = name {
                let value = self.expression(handle)?;
                self.assign_temporary(handle, name, value)?;
            }
        }
        Ok(())
    }

    /// Writes a statement that exchanges values in a subgroup.
    fn write_subgroup_operation(&mut self, statement: &Statement) -> WriteResult {
        let (result, call) = match *statement {
            Statement::SubgroupBallot { result, predicate } => {
                let predicate = predicate.map_or(Ok("true".to_owned()), |p| self.value(p))?;
                (result, format!("subgroupBallot({}, {predicate})", self.lane_mask(statement)))
            }
            Statement::SubgroupGather { mode, argument, result } => {
                let mask = self.lane_mask(statement);
                (result, self.gather_call(mode, mask, argument)?)
            }
            Statement::SubgroupCollectiveOperation { op, collective_op, argument, result } => {
                let mask = self.lane_mask(statement);
                let argument = self.value(argument)?;
                (result, collective_call(op, collective_op, mask, &argument)?)
            }
            _ => return unsupported("an unknown subgroup operation"),
        };
        self.assign_result(result, call)
    }

    fn write_cooperative_store(&mut self, target: Handle<Expression>, data: &CooperativeData) -> WriteResult {
        if !matches!(
            self.expression_type(target),
            TypeInner::CooperativeMatrix { role: CooperativeRole::C, .. }
        ) {
            return unsupported("a store of a cooperative matrix A or B");
        }
        let (matrix, lvalue) = (self.value(target)?, self.lvalue(data.pointer)?);
        let (stride, row_major) = (self.value(data.stride)?, data.row_major);
        self.write_line(format!("coop_store_c<{row_major}>({matrix}, &{lvalue}, {stride});"));
        Ok(())
    }

    /// Returns the mask of the lanes that take part in a subgroup operation.
    fn lane_mask(&mut self, statement: &Statement) -> &'static str {
        self.context.require_prelude(|p| (p.subgroup, p.math) = (true, true));
        if self.uniformity.is_convergent(statement) { "all_lanes()" } else { "__activemask()" }
    }

    fn write_switch(&mut self, selector: Handle<Expression>, cases: &[SwitchCase]) -> WriteResult {
        let selector = self.value(selector)?;
        self.write_line(format!("switch ({selector}) {{"));
        self.depth += 1;
        for case in cases {
            let label = match case.value {
                SwitchValue::I32(i32::MIN) => "case i32(0x80000000u):".to_owned(),
                SwitchValue::I32(value) => format!("case {value}:"),
                SwitchValue::U32(value) => format!("case {value}u:"),
                SwitchValue::Default => "default:".to_owned(),
            };
            if case.fall_through && case.body.is_empty() {
                self.write_line(label);
                continue;
            }
            self.write_line(format!("{label} {{"));
            self.write_indented(&case.body)?;
            self.write_line(if case.fall_through { "}" } else { "} break;" });
        }
        self.depth -= 1;
        self.write_line("}");
        Ok(())
    }

    /// Writes a loop. `continue` must still run the `continuing` block: it jumps to a label there, out of the
    /// scope of the body. Values of the body that `continuing` uses are declared before the loop.
    fn write_loop(
        &mut self,
        body: &Block,
        continuing: &Block,
        break_if: Option<Handle<Expression>>,
    ) -> WriteResult {
        let tail = !continuing.is_empty() || break_if.is_some();
        let label = (tail && has_continue(body)).then(|| {
            self.labels += 1;
            format!("next_{}", self.labels)
        });
        if label.is_some() {
            self.hoist_declarations(body, continuing, break_if)?;
        }
        self.write_line("for (;;) {");
        self.depth += 1;
        self.loops.push(label.clone());
        if label.is_some() {
            self.write_line("{");
            self.write_indented(body)?;
            self.write_line("}");
        } else {
            self.write_block(body)?;
        }
        self.loops.pop();
        if let Some(label) = label {
            self.write_line(format!("{label}:;"));
        }
        self.write_block(continuing)?;
        if let Some(condition) = break_if {
            let condition = self.value(condition)?;
            self.write_line(format!("if ({condition}) break;"));
        }
        self.depth -= 1;
        self.write_line("}");
        Ok(())
    }

    fn hoist_declarations(
        &mut self,
        body: &Block,
        continuing: &Block,
        break_if: Option<Handle<Expression>>,
    ) -> WriteResult {
        let mut used = FastHashSet::default();
        collect_block_uses(self.function, continuing, &mut used);
        if let Some(condition) = break_if {
            collect_uses(self.function, condition, &mut used);
        }
        let mut declared = Vec::new();
        for statement in body.iter() {
            match *statement {
                Statement::Emit(ref range) => {
                    let handles = range.clone().filter(|h| used.contains(h));
                    declared.extend(handles.filter_map(|h| Some((h, self.temporary_name(h)?))));
                }
                ref other => {
                    let result = statement_result(other).filter(|h| used.contains(h));
                    declared.extend(result.map(|h| (h, format!("e{}", h.index()))));
                }
            }
        }
        for (handle, name) in declared {
            let ty = self.type_name_of(handle)?;
            self.write_line(format!("{ty} {name};"));
            self.hoisted.insert(handle);
            self.temporaries.insert(handle, name);
        }
        Ok(())
    }

    fn call_expression(
        &self,
        function: Handle<Function>,
        arguments: &[Handle<Expression>],
    ) -> Result<String, TranslateError> {
        let mut parts = arguments.iter().map(|&a| self.value(a)).collect::<Result<Vec<_>, _>>()?;
        parts.extend(self.context.implicit_parameters(function).map(|(_, name)| name));
        Ok(format!("{}({})", self.context.functions[&function], parts.join(", ")))
    }

    fn write_atomic(
        &mut self,
        pointer: Handle<Expression>,
        fun: &AtomicFunction,
        value: Handle<Expression>,
        result: Option<Handle<Expression>>,
    ) -> WriteResult {
        self.context.require_prelude(|p| p.atomic = true);
        let (lvalue, value) = (self.lvalue(pointer)?, self.value(value)?);
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
                let name = match result {
                    Some(result) => format!("atomicCompareExchangeWeak<{}>", self.type_name_of(result)?),
                    None => "exchange_if".to_owned(),
                };
                let call = format!("{name}({lvalue}, {}, {value})", self.value(compare)?);
                return self.write_call(result, call);
            }
        };
        self.write_call(result, format!("{name}({lvalue}, {value})"))
    }

    fn gather_call(
        &self,
        mode: GatherMode,
        mask: &str,
        argument: Handle<Expression>,
    ) -> Result<String, TranslateError> {
        let value = self.value(argument)?;
        let xor = |bits| Ok(format!("subgroupShuffleXor({mask}, {value}, {bits})"));
        let (name, index) = match mode {
            GatherMode::BroadcastFirst => return Ok(format!("subgroupBroadcastFirst({mask}, {value})")),
            GatherMode::Broadcast(index) => ("subgroupBroadcast", index),
            GatherMode::Shuffle(index) => ("subgroupShuffle", index),
            GatherMode::ShuffleDown(index) => ("subgroupShuffleDown", index),
            GatherMode::ShuffleUp(index) => ("subgroupShuffleUp", index),
            GatherMode::ShuffleXor(index) => ("subgroupShuffleXor", index),
            GatherMode::QuadBroadcast(index) => ("quadBroadcast", index),
            GatherMode::QuadSwap(Direction::X) => return xor("1u"),
            GatherMode::QuadSwap(Direction::Y) => return xor("2u"),
            GatherMode::QuadSwap(Direction::Diagonal) => return xor("3u"),
        };
        Ok(format!("{name}({mask}, {value}, {})", self.value(index)?))
    }
}

fn collective_call(
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
    Ok(match (kind, identity) {
        (CollectiveOperation::Reduce, _) => format!("subgroupReduce<{op}>({mask}, {argument})"),
        (CollectiveOperation::InclusiveScan, _) => format!("subgroupInclusive<{op}>({mask}, {argument})"),
        (CollectiveOperation::ExclusiveScan, Some(identity)) => {
            format!("subgroupExclusive<{op}>({mask}, {argument}, {identity})")
        }
        (CollectiveOperation::ExclusiveScan, None) => {
            return unsupported("an exclusive scan of minima, maxima or bits");
        }
    })
}

/// Reports whether a `continue` in the block belongs to the enclosing loop.
fn has_continue(block: &Block) -> bool {
    block.iter().any(|statement| match statement {
        Statement::Continue => true,
        Statement::Block(block) => has_continue(block),
        Statement::If { accept, reject, .. } => has_continue(accept) || has_continue(reject),
        Statement::Switch { cases, .. } => cases.iter().any(|case| has_continue(&case.body)),
        _ => false,
    })
}
