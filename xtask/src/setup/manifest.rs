//! Manifests by which the Vulkan loader finds drivers and layers.

use std::path::Path;

/// Returns the library that a manifest names.
pub(crate) fn library_path(json: &str) -> Option<&str> {
    let (start, end) = library_path_span(json)?;
    Some(&json[start..end])
}

/// Returns the manifest with another library; `None` if it names none.
pub(crate) fn with_library_path(json: &str, library: &Path) -> Option<String> {
    let (start, end) = library_path_span(json)?;
    Some(format!("{}{}{}", &json[..start], escape_json(library), &json[end..]))
}

/// Returns the manifest of the validation layer in a library.
pub(crate) fn validation_layer_manifest(library: &Path) -> String {
    format!(
        r#"{{
    "file_format_version": "1.1.0",
    "layer": {{
        "name": "VK_LAYER_KHRONOS_validation",
        "type": "GLOBAL",
        "library_path": "{}",
        "api_version": "1.3.0",
        "implementation_version": "1",
        "description": "Khronos validation layer",
        "instance_extensions": [
            {{ "name": "VK_EXT_debug_report", "spec_version": "9" }},
            {{ "name": "VK_EXT_debug_utils", "spec_version": "1" }},
            {{ "name": "VK_EXT_validation_features", "spec_version": "6" }}
        ]
    }}
}}
"#,
        escape_json(library)
    )
}

fn escape_json(path: &Path) -> String {
    path.to_string_lossy().replace('\\', r"\\").replace('"', "\\\"")
}

/// Returns the range of the value of `library_path`, without quotes. Paths of libraries contain no quotes.
fn library_path_span(json: &str) -> Option<(usize, usize)> {
    const KEY: &str = "\"library_path\"";
    let after_key = json.find(KEY)? + KEY.len();
    let rest = json[after_key..].trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?;
    let start = json.len() - rest.len();
    Some((start, start + rest.find('"')?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = r#"{ "ICD": { "api_version": "1.3.230",
        "library_path" : "./libvk_swiftshader.so" }, "file_format_version": "1.0.0" }"#;

    #[test]
    fn the_library_is_read_and_replaced() {
        assert_eq!(library_path(MANIFEST), Some("./libvk_swiftshader.so"));
        let changed =
            with_library_path(MANIFEST, Path::new("/else/lib.so")).expect("the manifest names a library");
        assert_eq!(library_path(&changed), Some("/else/lib.so"));
        assert_eq!(changed.replace("/else/lib.so", "./libvk_swiftshader.so"), MANIFEST);
    }

    #[test]
    fn a_manifest_without_a_library_is_refused() {
        for text in ["", "{}", r#"{"library_path"}"#, r#"{"library_path": 3}"#, r#"{"library_path": "open"#] {
            assert_eq!(library_path(text), None);
            assert_eq!(with_library_path(text, Path::new("/x")), None);
        }
    }

    #[test]
    fn the_layer_names_its_library() {
        assert_eq!(library_path(&validation_layer_manifest(Path::new("/a/libVk.so"))), Some("/a/libVk.so"));
    }
}
