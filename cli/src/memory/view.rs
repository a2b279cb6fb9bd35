//! The page of `forebay memory view`: an HTML template with the snapshot's JSON inside.

use std::path::Path;

use anyhow::{Context, Result};
use forebay::io::write_bytes as write_file;
use forebay::memory::Snapshot;

/// Page with a placeholder for the snapshot.
const TEMPLATE: &str = include_str!("viewer.html");
/// Text that the snapshot replaces.
const PLACEHOLDER: &str = "{{snapshot}}";

pub(super) fn write_page(snapshot: &Snapshot, path: &Path) -> Result<()> {
    Ok(write_file(path, render_page(snapshot)?)?)
}

fn render_page(snapshot: &Snapshot) -> Result<String> {
    // JSON has `<` only inside strings. The escape keeps a name from ending the page's script element.
    let json = serde_json::to_string(snapshot)?.replace('<', "\\u003c");
    let (before, after) =
        TEMPLATE.split_once(PLACEHOLDER).context("the template has no placeholder for the snapshot")?;
    Ok([before, &json, after].concat())
}

#[cfg(test)]
mod tests {
    use forebay::memory::AllocationSite;

    use super::*;

    #[test]
    fn names_cannot_end_the_script() -> Result<()> {
        let holder =
            AllocationSite { module: "</script><script>alert(1)".to_owned(), ..AllocationSite::default() };
        let page = render_page(&Snapshot { holders: vec![holder], ..Snapshot::default() })?;
        assert!(!page.contains("</script><script>alert"));
        assert_eq!(page.matches("</script>").count(), TEMPLATE.matches("</script>").count());
        assert!(!page.contains("http:") && !page.contains("https:"), "the page needs no network");
        Ok(())
    }
}
