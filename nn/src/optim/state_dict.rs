//! Saving and loading of optimiser states.

use std::collections::BTreeMap;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::fused::{FusedGroup, FusedOptimizer, UpdateRule};
use crate::nn::StagedCopies;
use crate::{DType, Error, Result, Tensor, fail, fail_if};
use forebay_core::printable::printable;

/// State of one parameter: its step count, and its states in the rule's order.
type LoadedState<'a> = (u64, SmallVec<[Option<&'a Tensor>; 3]>);

/// Parses a step count: a whole number of at least 0, as an integer or a float.
#[track_caller]
fn parse_step_count(name: &str, tensor: &Tensor) -> Result<u64> {
    let steps = if tensor.numel() == 1 { tensor.item()? } else { f64::NAN };
    if steps >= 0.0 && steps.fract() == 0.0 && steps <= u64::MAX as f64 {
        return Ok(steps as u64);
    }
    match tensor.numel() {
        1 => fail!(argument("load_state_dict"), "`{name}` is {steps}, expected a whole number of 0 or more"),
        _ => fail!(
            argument("load_state_dict"),
            "`{name}` has the shape {:?}, expected one number",
            tensor.shape()
        ),
    }
}

impl FusedOptimizer {
    #[track_caller]
    pub(super) fn state_dict(&self, rule: &impl UpdateRule) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        for group in &self.groups {
            for (member, &k) in group.members.iter().enumerate() {
                let p = &self.parameters[k];
                let steps = self.step_state.steps(k);
                if steps == 0 {
                    continue;
                }
                let step = match &group.step_counts {
                    Some(counts) => {
                        let at = FusedGroup::count_index(member, steps);
                        counts.select(0, at as isize)?.to_dtype(DType::I64)?
                    }
                    None => Tensor::from_slice(&[steps as i64], (), p.device())?,
                };
                tensors.insert(format!("{k}.step"), step);
                let views = group.state_views(rule, member, p.shape());
                tensors.extend(
                    rule.state_names().into_iter().zip(views).map(|(name, t)| (format!("{k}.{name}"), t)),
                );
            }
        }
        Ok(tensors)
    }

    #[track_caller]
    pub(super) fn load_state_dict(
        &mut self,
        rule: &impl UpdateRule,
        state: &BTreeMap<String, Tensor>,
    ) -> Result<()> {
        self.check_step(rule)?;
        // Checks everything before it overwrites a tensor or allocates memory.
        let loaded = self.match_state_dict(rule, state)?;
        self.create_groups(rule, |k, _| Ok(loaded.contains_key(&k)))?;
        let steps = |k: usize| loaded.get(&k).map_or(0, |(count, _)| *count);
        let mut staged = StagedCopies::default();
        for group in &self.groups {
            for (member, &k) in group.members.iter().enumerate() {
                let views = group.state_views(rule, member, self.parameters[k].shape());
                let Some((_, sources)) = loaded.get(&k) else {
                    // This parameter had not been stepped.
                    views.iter().for_each(|view| staged.add_zero(view));
                    continue;
                };
                for (view, source) in views.iter().zip(sources) {
                    source.map_or(Ok(()), |source| staged.add_copy(view, source).map(drop))?;
                }
            }
            // Writes in place, because a captured step may update these counts.
            if let Some(counts) = &group.step_counts {
                staged.add_copy(counts, &group.create_step_counts(steps, &self.parameters)?)?;
            }
        }
        staged.prepare()?.commit()?;
        (0..self.parameters.len()).for_each(|k| self.step_state.set_steps(k, steps(k)));
        Ok(())
    }

    /// Returns the states by parameter index; fails for names and shapes that do not match.
    #[track_caller]
    fn match_state_dict<'a, R: UpdateRule>(
        &self,
        rule: &R,
        state: &'a BTreeMap<String, Tensor>,
    ) -> Result<FxHashMap<usize, LoadedState<'a>>> {
        const OP: &str = "load_state_dict";
        let names = rule.state_names();
        let mut expected = FxHashSet::default();
        let mut loaded = FxHashMap::default();
        for (k, p) in self.parameters.iter().enumerate() {
            let step = format!("{k}.step");
            let has_state = |name: &&str| state.contains_key(&format!("{k}.{name}"));
            let count = match state.get(&step) {
                Some(tensor) => Some(parse_step_count(&step, tensor)?),
                None => (!R::HAS_STEP_COUNT && names.iter().any(has_state)).then_some(1),
            };
            let Some(count) = count else { continue };
            expected.insert(step);
            expected.extend(rule.derived_state_names().iter().map(|name| format!("{k}.{name}")));
            let mut sources = SmallVec::new();
            for &state_name in &names {
                let name = format!("{k}.{state_name}");
                let shape = rule.state_shape(state_name, p.shape());
                if shape.contains(&0) && !state.contains_key(&name) {
                    // PyTorch's state omits states that this parameter does not use.
                    sources.push(None);
                    continue;
                }
                let source = state.get(&name);
                let source = source.ok_or_else(|| Error::argument(OP, format!("missing: {name}")))?;
                fail_if!(
                    source.shape() != &*shape;
                    shape(OP, &[source.shape(), &shape]), "{name} has the shape that its parameter asks for"
                );
                fail_if!(
                    !source.dtype().is_float();
                    dtype(OP, source.dtype()), "{name} is kept as f32, and read from any float"
                );
                sources.push(Some(source));
                expected.insert(name);
            }
            loaded.insert(k, (count, sources));
        }
        let unknown = state.keys().map(String::as_str).filter(|name| !expected.contains(*name));
        let unknown = unknown.collect::<Vec<_>>().join(", ");
        fail_if!(!unknown.is_empty(); argument(OP),
            "unexpected: {}; the state is of another optimiser, or of other parameters", printable(&unknown));
        Ok(loaded)
    }
}
