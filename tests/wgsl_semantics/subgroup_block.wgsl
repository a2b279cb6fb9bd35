// A sum over the workgroup: first in each subgroup, then of the partial sums in one subgroup.
// expect: 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0 2016.0
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

var<workgroup> partial: array<f32, 64>;

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_invocation_id) id: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) count: u32,
) {
    let sum = subgroupAdd(f32(lane));
    if id == 0u {
        partial[subgroup] = sum;
    }
    workgroupBarrier();
    if subgroup == 0u {
        var total = 0.0;
        for (var i = id; i < count; i += size) {
            total += partial[i];
        }
        total = subgroupAdd(total);
        if id == 0u {
            partial[0] = total;
        }
    }
    workgroupBarrier();
    out[lane] = bitcast<u32>(partial[0] + f32(subgroup * 0u));
}
