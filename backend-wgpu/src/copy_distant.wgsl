// Copies between ranges of one large buffer that are too far apart for one binding.

@group(0) @binding(1) var<storage, read_write> source_words: array<u32>;
@group(0) @binding(1) var<storage, read_write> source_quads: array<vec4<u32>>;

@compute @workgroup_size(64)
fn copy_distant_words(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = position(id, groups);
    if i < params.count {
        words[params.dst + i] = source_words[params.src + i];
    }
}

@compute @workgroup_size(64)
fn copy_distant_quads(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = position(id, groups);
    if i < params.count {
        quads[params.dst + i] = source_quads[params.src + i];
    }
}
