// Copies and fills inside one segment. WebGPU's own copies cannot do this: a buffer is never both source and
// destination there. A segment that fits one binding is bound as a whole, and of a larger buffer the range in use.

@compute @workgroup_size(64)
fn copy_words(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = position(id, groups);
    if i < params.count {
        words[params.dst + i] = words[params.src + i];
    }
}

@compute @workgroup_size(64)
fn copy_quads(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = position(id, groups);
    if i < params.count {
        quads[params.dst + i] = quads[params.src + i];
    }
}

@compute @workgroup_size(64)
fn fill_words(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = position(id, groups);
    if i < params.count {
        words[params.dst + i] = params.value;
    }
}

@compute @workgroup_size(64)
fn fill_quads(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = position(id, groups);
    if i < params.count {
        quads[params.dst + i] = vec4<u32>(params.value);
    }
}
