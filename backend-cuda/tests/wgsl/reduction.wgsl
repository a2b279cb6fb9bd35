// Reductions in workgroup memory, with and without subgroups.
struct Params {
    rows: u32,
    cols: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;

const THREADS = 256u;
var<workgroup> partial: array<f32, THREADS>;

fn sum(lane: u32, value: f32) -> f32 {
    partial[lane] = value;
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if lane < step {
            partial[lane] += partial[lane + step];
        }
    }
    workgroupBarrier();
    return partial[0];
}

@compute @workgroup_size(THREADS)
fn row_sums(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.x;
    if row >= p.rows {
        return;
    }
    var total = 0.0;
    for (var c = lane; c < p.cols; c += THREADS) {
        total += x[row * p.cols + c];
    }
    let all = sum(lane, total);
    if lane == 0u {
        y[row] = all;
    }
}

@compute @workgroup_size(THREADS)
fn row_sums_subgroup(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_invocation_id) in_subgroup: u32,
) {
    var total = 0.0;
    for (var c = lane; c < p.cols; c += THREADS) {
        total += x[group.x * p.cols + c];
    }
    total = subgroupAdd(total);
    if in_subgroup == 0u {
        partial[subgroup] = total;
    }
    workgroupBarrier();
    if subgroup == 0u {
        let value = select(0.0, partial[in_subgroup], in_subgroup < subgroups);
        let all = subgroupAdd(value);
        if in_subgroup == 0u {
            y[group.x] = all;
        }
    }
}
