// Counting, finding, reversing, extracting and inserting bits.
// expect: 8 31 32 3 32 0x80000000 12 -1 -1 8 12 -1 0x12 -128 0xa 0 0xfffff12f 0xffffffff 5 2 2 15 0xee
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = zeros[0];
    let i = i32(z);
    out[0] = countOneBits(z + 0xf0f0u);
    out[1] = countLeadingZeros(z + 1u);
    out[2] = countLeadingZeros(z);
    out[3] = countTrailingZeros(z + 8u);
    out[4] = countTrailingZeros(z);
    out[5] = reverseBits(z + 1u);
    out[6] = firstLeadingBit(z + 0x1000u);
    out[7] = firstLeadingBit(z);
    out[8] = u32(firstLeadingBit(i - 1));
    out[9] = u32(firstLeadingBit(i - 257));
    out[10] = firstTrailingBit(z + 0x1000u);
    out[11] = firstTrailingBit(z);
    out[12] = extractBits(z + 0xabcd1234u, 8u, 8u);
    out[13] = u32(extractBits(i + 0x00008034, 8u, 8u));
    out[14] = extractBits(z + 0xabcd1234u, z + 28u, z + 20u);
    out[15] = extractBits(z + 0xffffffffu, z + 40u, z + 3u);
    out[16] = insertBits(z + 0xffffffffu, z + 0x12u, 4u, 8u);
    out[17] = insertBits(z + 0x5u, z + 0xffffffffu, z + 0u, z + 32u);
    out[18] = insertBits(z + 0x5u, z + 0xffffffffu, z + 3u, z);
    out[19] = u32(countOneBits(vec2(i - 1, i + 3)).y);
    out[20] = u32(countTrailingZeros(i + 12) + countLeadingZeros(i - 1));
    out[21] = extractBits(vec2(z + 0xf0u, z), 4u, 4u).x;
    out[22] = ~(z + 1u) & (z | 0xffu) ^ 0x10u;
}
