{#-
Writes the generator's state for kernels that read it from memory: two words of the Philox offset, two of its
seed.
-#}
struct Params {
    words: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read_write> result: array<u32>;

@compute @workgroup_size(4)
fn main(@builtin(local_invocation_index) i: u32) {
    result[i] = p.words[i];
}
