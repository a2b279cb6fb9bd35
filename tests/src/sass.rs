//! Check of machine code (SASS): a kernel must wait for the previous kernel before it accesses memory.
//!
//! With programmatic dependent launch (`shaders/cuda/pdl.cuh`), a kernel starts before the previous one ends.
//! The compiler may assume that read-only memory does not change, and move reads before the wait.

/// Architecture whose instruction encoding is known here.
pub(crate) const SASS_ARCH: u32 = 90;

/// Opcode of `griddepcontrol.wait`, in the low 12 bits of an instruction.
const OPCODE_GRIDDEP_WAIT: u16 = 0x82e;
/// Opcodes of loads, stores, atomics, reductions and copies to shared memory, as nvdisasm 13.5 names them.
const MEMORY_OPCODES: [u16; 13] =
    [0x980, 0x981, 0x985, 0x986, 0x98e, 0x3a8, 0x3a9, 0x9a3, 0x9a8, 0x38a, 0x98a, 0xfae, 0x5b4];

/// Returns the number of kernels in a cubin, or an error for a kernel that accesses memory before its wait.
pub(crate) fn count_waiting_kernels(cubin: &[u8]) -> Result<usize, String> {
    let mut count = 0;
    for (name, code) in elf_sections(cubin).ok_or("the cubin is not an ELF file of 64 bits")? {
        // Names with `_Z` are functions that a kernel calls.
        let Some(name) = name.strip_prefix(".text.").filter(|name| !name.starts_with("_Z")) else { continue };
        let first = code
            .chunks_exact(16)
            .map(|instruction| u16::from_le_bytes([instruction[0], instruction[1]]) & 0xfff)
            .find(|operation| *operation == OPCODE_GRIDDEP_WAIT || MEMORY_OPCODES.contains(operation));
        match first {
            Some(OPCODE_GRIDDEP_WAIT) => count += 1,
            Some(operation) => {
                return Err(format!(
                    "{name} touches memory (operation {operation:#x}) before it waits for the kernel in front of it"
                ));
            }
            None => return Err(format!("{name} does not wait for the kernel in front of it")),
        }
    }
    Ok(count)
}

/// Returns the names and contents of an ELF file's sections.
fn elf_sections(file: &[u8]) -> Option<Vec<(&str, &[u8])>> {
    let number = |at: usize, bytes: usize| {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(file.get(at..at.checked_add(bytes)?)?);
        usize::try_from(u64::from_le_bytes(word)).ok()
    };
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, each, count, names) =
        (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?, number(0x3e, 2)?);
    let contents = |section: usize| {
        let header = table + section * each;
        let (start, bytes) = (number(header + 0x18, 8)?, number(header + 0x20, 8)?);
        // A section of type NOBITS has a size but no contents.
        if number(header + 4, 4)? == 8 { Some(&[][..]) } else { file.get(start..start.checked_add(bytes)?) }
    };
    let names = contents(names)?;
    let named = |section: usize| {
        let name = names.get(number(table + section * each, 4)?..)?;
        let end = name.iter().position(|byte| *byte == 0)?;
        Some((std::str::from_utf8(&name[..end]).ok()?, contents(section)?))
    };
    (0..count).map(named).collect()
}

#[cfg(test)]
mod tests {
    use forebay::backend::KernelSource;
    use forebay_cuda::nvrtc;
    use forebay_cuda::translate::translate;

    use super::{SASS_ARCH, count_waiting_kernels};

    #[test]
    fn read_only_loads_come_after_the_wait() {
        if !nvrtc::is_available() {
            return println!("NVRTC was not found: nothing to look at");
        }
        // Without the wait, this read could be moved to the start: nothing in the kernel writes `a`.
        let wgsl = "@group(0) @binding(0) var<storage, read> a: array<vec4<f32>>;
            @group(0) @binding(1) var<storage, read_write> b: array<vec4<f32>>;
            @compute @workgroup_size(64)
            fn main(@builtin(global_invocation_id) id: vec3<u32>) { b[id.x] = a[0] + a[id.x]; }";
        let source = KernelSource {
            label: "",
            wgsl,
            entry_point: "main",
            overrides: &[],
            zero_workgroup_memory: true,
        };
        let kernel = translate(&source).unwrap();
        assert_eq!(count_waiting_kernels(&nvrtc::compile(&kernel.source, "copy", SASS_ARCH).unwrap()), Ok(1));
    }

    #[test]
    fn a_kernel_that_reads_before_its_wait_is_detected() {
        if !nvrtc::is_available() {
            return println!("NVRTC was not found: nothing to look at");
        }
        let kernel = |body: &str| {
            let source = format!("extern \"C\" __global__ void k(const int* a, int* b) {{ {body} }}");
            count_waiting_kernels(&nvrtc::compile(&source, "k", SASS_ARCH).unwrap())
        };
        let wait = "asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");";
        assert_eq!(kernel(&format!("{wait} b[0] = a[0];")), Ok(1));
        for (wrong, why) in [
            (format!("int x = *(const volatile int*)a; {wait} b[0] = x;"), "before it waits"),
            (format!("b[1] = 2; {wait} b[0] = a[0];"), "before it waits"),
            (format!("atomicAdd(b, 3); {wait} b[1] = a[0];"), "before it waits"),
            ("b[0] = a[0];".to_owned(), "before it waits"),
            (String::new(), "does not wait"),
        ] {
            let error = kernel(&wrong).unwrap_err();
            assert!(error.starts_with("k ") && error.contains(why), "{wrong}: {error}");
        }
        assert!(count_waiting_kernels(b"no cubin").is_err());
    }
}
