// Division by zero and overflow, wrapping, remainders: zero is `zeros[0]`, which no compiler can know.
// expect: 7 0 0x80000000 0 0x80000001 5 0 -1 0xffffffff -3 -2 0x80000000 0 1 0x80000000 0x7fffffff
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let zero = i32(zeros[0]);
    let minus_one = zero - 1;
    let lowest = zero + (-2147483647 - 1);
    out[0] = u32((zero + 7) / zero);
    out[1] = u32((zero + 7) % zero);
    out[2] = u32(lowest / minus_one);
    out[3] = u32(lowest % minus_one);
    out[4] = u32((zero + 2147483647) + 2);
    out[5] = (zeros[0] + 5u) / zeros[0];
    out[6] = (zeros[0] + 5u) % zeros[0];
    out[7] = u32((zero + 7) / (zero - 4));
    out[8] = zeros[0] - 1u;
    out[9] = u32((zero - 7) % (zero + 4));
    out[10] = u32((zero - 8) / (zero + 4));
    out[11] = u32(-lowest);
    out[12] = u32((zero + 65536) * 65536);
    out[13] = u32((zero - 7) / (zero - 4));
    out[14] = u32(abs(lowest));
    out[15] = u32(lowest - 1);
}
