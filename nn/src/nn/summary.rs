//! Description of a model as a tree: PyTorch's `print(model)`, with the parameters counted.

use std::any::type_name;
use std::collections::BTreeMap;
use std::fmt::{self, Write};

use super::{Module, ModuleEntry};
use crate::{Tensor, autograd};

/// Modules of a model with their options and numbers of parameters, which [`Module::summary`] returns.
///
/// `Display` prints PyTorch's tree with the number of parameters of each module. `Debug` prints the tree alone.
#[derive(Clone)]
pub struct ModuleSummary {
    kind: String,
    /// Options by name; text without a name stands for itself.
    options: Vec<(String, String)>,
    /// Parameters of the module's own.
    parameters: Vec<ParameterCount>,
    children: Vec<(String, ModuleSummary)>,
}

/// Number of elements of a parameter.
#[derive(Clone, Copy, Debug)]
struct ParameterCount {
    leaf: u64,
    numel: usize,
    is_trained: bool,
}

/// Line of a printed tree, with the number of parameters of the module that it begins.
struct Line {
    text: String,
    count: Option<usize>,
}

/// Kind of the lists of modules, whose equal elements are printed once.
const LIST: &str = "ModuleList";

impl ModuleSummary {
    /// Creates the description of a module of this type.
    #[doc(hidden)]
    #[must_use]
    pub fn new(kind: &str) -> Self {
        Self { kind: kind.to_owned(), options: Vec::new(), parameters: Vec::new(), children: Vec::new() }
    }

    /// Describes a module by its type's name and the parameters of a visit.
    pub(super) fn from_visit<M: Module + ?Sized>(module: &M) -> Self {
        let mut summary = Self::new(short_type_name::<M>());
        module.visit("", &mut |_, entry| {
            if let ModuleEntry::Parameter(t) = entry {
                summary.add_parameter(t);
            }
        });
        summary
    }

    pub(super) fn add_parameter(&mut self, t: &Tensor) {
        if let Some(leaf) = autograd::leaf_id(t) {
            let count = ParameterCount { leaf, numel: t.numel(), is_trained: t.requires_grad() };
            self.parameters.push(count);
        }
    }

    pub(super) fn add_option(&mut self, name: &str, value: impl fmt::Debug) {
        let text = match format!("{value:?}").as_str() {
            "true" => "True".to_owned(),
            "false" => "False".to_owned(),
            other => other.to_owned(),
        };
        self.options.push((name.to_owned(), text));
    }

    /// Replaces the options by this text.
    #[doc(hidden)]
    pub fn set_options(&mut self, text: String) {
        self.options = vec![(String::new(), text)];
    }

    pub(super) fn add_options_of(&mut self, other: Self) {
        self.options.extend(other.options);
    }

    /// Adds the description of a child. One without a name, as of a wrapper's field, becomes a part of this one.
    #[doc(hidden)]
    pub fn add_child(&mut self, name: &str, child: Self) {
        if name.is_empty() {
            self.options.extend(child.options);
            self.parameters.extend(child.parameters);
            self.children.extend(child.children);
        } else {
            self.children.push((name.to_owned(), child));
        }
    }

    /// Adds a list of children. A list of plain values is an option, and a list of tensors consists of parameters.
    pub(super) fn add_list(&mut self, name: &str, list: Self) {
        if !list.children.is_empty() {
            return self.add_child(name, list);
        }
        self.parameters.extend(list.parameters);
        if !list.options.is_empty() {
            let values = list.options.into_iter().map(|(_, value)| value).collect::<Vec<_>>();
            self.options.push((name.to_owned(), format!("[{}]", values.join(", "))));
        }
    }

    /// Returns the tree of the module that described itself as the only child of this one.
    pub(super) fn into_root(mut self) -> Self {
        match self.children.pop() {
            Some((_, child)) => child,
            None => self,
        }
    }

    /// Returns the number of elements of all parameters, each once, and of those that require a gradient.
    fn count_parameters(&self) -> (usize, usize) {
        let mut all = BTreeMap::new();
        self.collect_parameters(&mut all);
        let trained = all.values().filter(|p| p.is_trained).map(|p| p.numel).sum();
        (all.values().map(|p| p.numel).sum(), trained)
    }

    fn collect_parameters(&self, all: &mut BTreeMap<u64, ParameterCount>) {
        all.extend(self.parameters.iter().map(|p| (p.leaf, *p)));
        self.children.iter().for_each(|(_, child)| child.collect_parameters(all));
    }

    /// Returns the lines of the tree. `indent` is that of the children.
    fn lines(&self, indent: usize) -> Vec<Line> {
        let options: Vec<String> =
            self.options.iter().map(|(name, value)| format_option(name, value)).collect();
        let options = options.join(", ");
        let count = Some(self.count_parameters().0).filter(|n| *n > 0);
        if self.children.is_empty() {
            return vec![Line { text: format!("{}({options})", self.kind), count }];
        }
        let mut lines = vec![Line { text: format!("{}(", self.kind), count }];
        if !options.is_empty() {
            lines.push(Line { text: format!("{:indent$}{options}", ""), count: None });
        }
        let mut children = self.children.iter().peekable();
        while let Some((name, child)) = children.next() {
            let mut child_lines = child.lines(indent + 2);
            let (mut last, mut repeats) = (name, 1);
            while self.kind == LIST
                && let Some((next, _)) =
                    children.next_if(|(_, next)| are_equal(&next.lines(indent + 2), &child_lines))
            {
                (last, repeats) = (next, repeats + 1);
            }
            let first = &mut child_lines[0];
            if repeats > 1 {
                first.text = format!("{:indent$}({name}-{last}): {repeats} x {}", "", first.text);
                first.count = first.count.map(|n| n * repeats);
            } else {
                first.text = format!("{:indent$}({name}): {}", "", first.text);
            }
            lines.extend(child_lines);
        }
        lines.push(Line { text: format!("{:width$})", "", width = indent - 2), count: None });
        lines
    }
}

fn are_equal(a: &[Line], b: &[Line]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.text == b.text && a.count == b.count)
}

fn format_option(name: &str, value: &str) -> String {
    // An index of a tuple struct is no name.
    let has_name = name.chars().next().is_some_and(|c| !c.is_ascii_digit());
    if has_name { format!("{name}={value}") } else { value.to_owned() }
}

/// Returns the last segment of a type's path, without generic arguments.
pub(super) fn short_type_name<T: ?Sized>() -> &'static str {
    let full = type_name::<T>();
    let path = if full.ends_with('>') { full.split('<').next().unwrap_or(full) } else { full };
    path.rsplit("::").next().unwrap_or(path).trim_matches(['{', '}'])
}

/// Formats extents as PyTorch prints them: `(3, 3)`, `(768,)`.
pub(super) fn tuple(extents: &[usize]) -> String {
    match extents {
        [one] => format!("({one},)"),
        all => format!("({})", all.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// Formats a flag as PyTorch prints it.
pub(super) fn flag(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// Writes digits in groups of three: `1,234,567`.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (k, digit) in digits.chars().enumerate() {
        if k > 0 && (digits.len() - k).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

impl fmt::Debug for ModuleSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.lines(2).into_iter().map(|line| line.text).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl fmt::Display for ModuleSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.lines(2);
        let counts: Vec<String> =
            lines.iter().map(|line| line.count.map_or(String::new(), grouped)).collect();
        let of_text = lines.iter().map(|line| line.text.chars().count()).max().unwrap_or(0);
        let of_count = counts.iter().map(String::len).max().unwrap_or(0);
        for (Line { text, .. }, count) in lines.iter().zip(&counts) {
            let line = format!("{text:of_text$}  {count:>of_count$}");
            writeln!(f, "{}", line.trim_end())?;
        }
        let (all, trained) = self.count_parameters();
        write!(f, "{} parameters, {} of them trained", grouped(all), grouped(trained))
    }
}

/// Builder of a layer's options: PyTorch's `extra_repr`.
#[derive(Debug, Default)]
pub(super) struct OptionsText(String);

impl OptionsText {
    /// Adds a value without a name.
    pub(super) fn value(mut self, value: impl fmt::Display) -> Self {
        let between = if self.0.is_empty() { "" } else { ", " };
        // Writing to a string cannot fail.
        _ = write!(self.0, "{between}{value}");
        self
    }

    /// Adds an option.
    pub(super) fn set(self, name: &str, value: impl fmt::Display) -> Self {
        self.value(format_args!("{name}={value}"))
    }

    /// Adds an option unless it has its default.
    pub(super) fn set_if(self, condition: bool, name: &str, value: impl fmt::Display) -> Self {
        if condition { self.set(name, value) } else { self }
    }

    pub(super) fn finish(self) -> String {
        self.0
    }
}
