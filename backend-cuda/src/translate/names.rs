//! Identifiers: every WGSL name gets a prefix by kind (`v_` values, `g_` globals, `f_` functions, `s_`
//! structs, `m_` members). So none can be a keyword, a macro or a function of CUDA.

use naga::FastHashSet;

/// Names used in one scope.
#[derive(Debug, Default)]
pub(super) struct NameScope {
    used: FastHashSet<String>,
}

impl NameScope {
    /// Returns a name for `wgsl` that no earlier call has returned.
    pub(super) fn unique_name(&mut self, prefix: &str, wgsl: &str) -> String {
        let base = match to_identifier(wgsl) {
            nameless if nameless.is_empty() => format!("{prefix}unnamed"),
            name => format!("{prefix}{name}"),
        };
        let mut name = base.clone();
        let mut suffix = 1;
        while !self.used.insert(name.clone()) {
            name = format!("{base}_{suffix}");
            suffix += 1;
        }
        name
    }
}

/// Replaces characters that C++ identifiers cannot contain; WGSL identifiers may be of any script.
pub(super) fn to_identifier(wgsl: &str) -> String {
    let mut text = String::with_capacity(wgsl.len());
    for c in wgsl.trim_matches('_').chars() {
        match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' => text.push(c),
            _ if c.is_alphanumeric() => text.push_str(&format!("u{:x}", u32::from(c))),
            // Two consecutive underscores are reserved.
            _ if !text.ends_with('_') => text.push('_'),
            _ => {}
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_valid_and_unique() {
        let mut names = NameScope::default();
        assert_eq!(names.unique_name("v_", "int"), "v_int");
        assert_eq!(names.unique_name("v_", "int"), "v_int_1");
        assert_eq!(names.unique_name("v_", "int_1"), "v_int_1_1");
        assert_eq!(names.unique_name("s_", "__frexp_result_f32"), "s_frexp_result_f32");
        assert_eq!(names.unique_name("v_", "größe"), "v_gruf6udfe");
        assert_eq!(names.unique_name("v_", "a__b<i32>"), "v_a_b_i32_");
    }
}
