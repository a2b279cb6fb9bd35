// Invocation ids of a workgroup of 4 x 2 x 2.
// expect: 1 1101 2201 3301 4011 5111 6211 7311 8002 9102 10202 11302 12012 13112 14212 15312
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

struct In {
    @builtin(local_invocation_id) local: vec3<u32>,
    @builtin(global_invocation_id) global: vec3<u32>,
    @builtin(workgroup_id) group: vec3<u32>,
}

@compute @workgroup_size(4, 2, 2)
fn main(in: In, @builtin(local_invocation_index) index: u32, @builtin(num_workgroups) groups: vec3<u32>) {
    let flat = in.local.x + in.local.y * 4u + in.local.z * 8u;
    out[index] = flat * 1000u + in.global.x * 100u + in.global.y * 10u + in.global.z + groups.x + in.group.y;
}
