//! Recognises the kind of a file from its first bytes, for errors about files of an unexpected kind.

/// Number of bytes at the beginning of a file that tell its kind.
pub(crate) const HEADER_LEN: usize = 64;

/// Describes a file that starts with `head`, and what can be done with it; `None` for an unknown kind.
pub(crate) fn describe(head: &[u8]) -> Option<&'static str> {
    let text = String::from_utf8_lossy(head);
    let text = text.trim_start();
    let starts =
        |prefix: &str| text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    let first_key = text.strip_prefix('{').map(str::trim_start);
    let key = |name: &str| first_key.is_some_and(|rest| rest.starts_with(&format!("\"{name}\"")));
    Some(match head {
        [] => "it is empty: the program that writes it may have ended too early",
        [0x80, 2..=5, ..] => {
            "it is a Python pickle, as PyTorch writes snapshots of memory and old checkpoints; a snapshot in that form is for \
             pytorch.org/memory_viz, and cannot be read here"
        }
        [b'P', b'K', 3, 4, ..] => {
            "it is a zip archive, as `torch.save` writes; save weights with safetensors (`safetensors.torch.save_file`)"
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            "it is packed by xz, as traces are; `forebay replay` takes traces (their names end in `.trace.xz`)"
        }
        [0x1f, 0x8b, ..] => "it is packed by gzip: unpack it first",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "it is packed by zstd: unpack it first",
        [0x7f, b'E', b'L', b'F', ..] => "it is a program",
        [b'G', b'G', b'U', b'F', ..] => "it is a GGUF file of weights",
        [0x89, b'P', b'N', b'G', ..] => "it is an image",
        [_, _, _, _, _, 0, 0, 0, b'{', ..] => "it is a safetensors file of weights; `io::load` reads those",
        _ if starts("<!doctype") || starts("<html") => {
            "it is a page, as `forebay memory view` writes; the snapshot is the file that the page was made of"
        }
        _ if starts("<svg") || starts("<?xml") => "it is an SVG image or another XML file",
        _ if key("version") || key("device") => {
            "it is JSON of a snapshot of memory; `forebay memory report` takes those"
        }
        _ if key("workload") => "it is a trace, as text; `forebay replay` takes traces",
        _ if key("traceEvents") => "it is a profile for chrome://tracing and ui.perfetto.dev",
        _ if starts("{") => "it is JSON of another kind, or is damaged",
        _ if head.iter().all(|b| (b' '..=b'~').contains(b) || b.is_ascii_whitespace()) => "it is text",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_detected_by_their_first_bytes() {
        let of = |head: &[u8]| describe(head).unwrap_or("nothing");
        assert!(of(b"\x80\x02}(").contains("pickle"));
        assert!(of(b"\x80\x04\x95").contains("pickle"));
        assert!(of(b"PK\x03\x04\0").contains("torch.save"));
        assert!(of(b"\xfd7zXZ\0\0").contains("forebay replay"));
        assert!(of(b"\x10\x02\0\0\0\0\0\0{\"a\"").contains("safetensors"));
        assert!(of(b"<!DOCTYPE html>").contains("page"));
        assert!(of(b"{\"workload\": \"w\"}").contains("trace"));
        assert!(of(b"{\"version\":1,").contains("snapshot"));
        assert!(of(b"").contains("empty"));
        assert_eq!(of(&[1, 2, 3, 200]), "nothing");
    }
}
