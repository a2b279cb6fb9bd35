// Every operator and builtin function on integers of every width.
enable wgpu_int16;

@group(0) @binding(0) var<storage, read_write> out: array<u32>;

fn i32_1(x: i32, y: i32) -> i32 {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << u32(3u) >> u32(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += countLeadingZeros(r);
    r += countTrailingZeros(r);
    r += countOneBits(r);
    r += reverseBits(r);
    r += firstLeadingBit(r);
    r += firstTrailingBit(r);
    r += extractBits(r, 3u, 4u) + insertBits(r, x, 2u, 9u);
    return r;
}

fn i32_2(x: vec2<i32>, y: vec2<i32>) -> vec2<i32> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec2<u32>(3u) >> vec2<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec2<i32>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    r += countLeadingZeros(r);
    r += countTrailingZeros(r);
    r += countOneBits(r);
    r += reverseBits(r);
    r += firstLeadingBit(r);
    r += firstTrailingBit(r);
    r += extractBits(r, 3u, 4u) + insertBits(r, x, 2u, 9u);
    return r;
}

fn i32_3(x: vec3<i32>, y: vec3<i32>) -> vec3<i32> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec3<u32>(3u) >> vec3<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec3<i32>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    r += countLeadingZeros(r);
    r += countTrailingZeros(r);
    r += countOneBits(r);
    r += reverseBits(r);
    r += firstLeadingBit(r);
    r += firstTrailingBit(r);
    r += extractBits(r, 3u, 4u) + insertBits(r, x, 2u, 9u);
    return r;
}

fn i32_4(x: vec4<i32>, y: vec4<i32>) -> vec4<i32> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec4<u32>(3u) >> vec4<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec4<i32>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    r += countLeadingZeros(r);
    r += countTrailingZeros(r);
    r += countOneBits(r);
    r += reverseBits(r);
    r += firstLeadingBit(r);
    r += firstTrailingBit(r);
    r += extractBits(r, 3u, 4u) + insertBits(r, x, 2u, 9u);
    return r;
}

fn u32_1(x: u32, y: u32) -> u32 {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << u32(3u) >> u32(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += countLeadingZeros(r);
    r += countTrailingZeros(r);
    r += countOneBits(r);
    r += reverseBits(r);
    r += firstLeadingBit(r);
    r += firstTrailingBit(r);
    r += extractBits(r, 3u, 4u) + insertBits(r, x, 2u, 9u);
    return r;
}

fn u32_2(x: vec2<u32>, y: vec2<u32>) -> vec2<u32> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec2<u32>(3u) >> vec2<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec2<u32>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    r += countLeadingZeros(r);
    r += countTrailingZeros(r);
    r += countOneBits(r);
    r += reverseBits(r);
    r += firstLeadingBit(r);
    r += firstTrailingBit(r);
    r += extractBits(r, 3u, 4u) + insertBits(r, x, 2u, 9u);
    return r;
}

fn u32_3(x: vec3<u32>, y: vec3<u32>) -> vec3<u32> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec3<u32>(3u) >> vec3<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec3<u32>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    r += countLeadingZeros(r);
    r += countTrailingZeros(r);
    r += countOneBits(r);
    r += reverseBits(r);
    r += firstLeadingBit(r);
    r += firstTrailingBit(r);
    r += extractBits(r, 3u, 4u) + insertBits(r, x, 2u, 9u);
    return r;
}

fn u32_4(x: vec4<u32>, y: vec4<u32>) -> vec4<u32> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec4<u32>(3u) >> vec4<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec4<u32>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    r += countLeadingZeros(r);
    r += countTrailingZeros(r);
    r += countOneBits(r);
    r += reverseBits(r);
    r += firstLeadingBit(r);
    r += firstTrailingBit(r);
    r += extractBits(r, 3u, 4u) + insertBits(r, x, 2u, 9u);
    return r;
}

fn i64_1(x: i64, y: i64) -> i64 {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << u32(3u) >> u32(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    return r;
}

fn i64_2(x: vec2<i64>, y: vec2<i64>) -> vec2<i64> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec2<u32>(3u) >> vec2<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec2<i64>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn i64_3(x: vec3<i64>, y: vec3<i64>) -> vec3<i64> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec3<u32>(3u) >> vec3<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec3<i64>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn i64_4(x: vec4<i64>, y: vec4<i64>) -> vec4<i64> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec4<u32>(3u) >> vec4<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec4<i64>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn u64_1(x: u64, y: u64) -> u64 {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << u32(3u) >> u32(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    return r;
}

fn u64_2(x: vec2<u64>, y: vec2<u64>) -> vec2<u64> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec2<u32>(3u) >> vec2<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec2<u64>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn u64_3(x: vec3<u64>, y: vec3<u64>) -> vec3<u64> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec3<u32>(3u) >> vec3<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec3<u64>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn u64_4(x: vec4<u64>, y: vec4<u64>) -> vec4<u64> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec4<u32>(3u) >> vec4<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec4<u64>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn i16_1(x: i16, y: i16) -> i16 {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << u32(3u) >> u32(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    return r;
}

fn i16_2(x: vec2<i16>, y: vec2<i16>) -> vec2<i16> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec2<u32>(3u) >> vec2<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec2<i16>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn i16_3(x: vec3<i16>, y: vec3<i16>) -> vec3<i16> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec3<u32>(3u) >> vec3<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec3<i16>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn i16_4(x: vec4<i16>, y: vec4<i16>) -> vec4<i16> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec4<u32>(3u) >> vec4<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = -r + sign(x);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec4<i16>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn u16_1(x: u16, y: u16) -> u16 {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << u32(3u) >> u32(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    return r;
}

fn u16_2(x: vec2<u16>, y: vec2<u16>) -> vec2<u16> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec2<u32>(3u) >> vec2<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec2<u16>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn u16_3(x: vec3<u16>, y: vec3<u16>) -> vec3<u16> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec3<u32>(3u) >> vec3<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec3<u16>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

fn u16_4(x: vec4<u16>, y: vec4<u16>) -> vec4<u16> {
    var r = x;
    r = r + y;
    r = r - y;
    r = r * y;
    r = r / y;
    r = r % y;
    r = r & y;
    r = r | y;
    r = r ^ y;
    r = ~r << vec4<u32>(3u) >> vec4<u32>(x);
    r += min(x, y) + max(x, y) + clamp(r, x, y) + abs(r);
    r = select(x, r, x < y);
    r = select(x, r, x != y);
    r += vec4<u16>(dot(x, y)) + x * y.x + y.x * x + x / y.y;
    return r;
}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.x;
    var sum = 0u;
    let i32_x = i32(i);
    sum += u32(i32_1(i32_x, i32_x + i32(3)));
    sum += u32(i32_2(vec2<i32>(i32_x), vec2<i32>(i32_x, i32(1))).y);
    sum += u32(i32_3(vec3<i32>(i32_x), vec3<i32>(i32_x, i32(1), i32(2))).y);
    sum += u32(i32_4(vec4<i32>(i32_x), vec4<i32>(i32_x, i32(1), i32(2), i32(3))).y);
    let u32_x = u32(i);
    sum += u32(u32_1(u32_x, u32_x + u32(3)));
    sum += u32(u32_2(vec2<u32>(u32_x), vec2<u32>(u32_x, u32(1))).y);
    sum += u32(u32_3(vec3<u32>(u32_x), vec3<u32>(u32_x, u32(1), u32(2))).y);
    sum += u32(u32_4(vec4<u32>(u32_x), vec4<u32>(u32_x, u32(1), u32(2), u32(3))).y);
    let i64_x = i64(i);
    sum += u32(i64_1(i64_x, i64_x + i64(3)));
    sum += u32(i64_2(vec2<i64>(i64_x), vec2<i64>(i64_x, i64(1))).y);
    sum += u32(i64_3(vec3<i64>(i64_x), vec3<i64>(i64_x, i64(1), i64(2))).y);
    sum += u32(i64_4(vec4<i64>(i64_x), vec4<i64>(i64_x, i64(1), i64(2), i64(3))).y);
    let u64_x = u64(i);
    sum += u32(u64_1(u64_x, u64_x + u64(3)));
    sum += u32(u64_2(vec2<u64>(u64_x), vec2<u64>(u64_x, u64(1))).y);
    sum += u32(u64_3(vec3<u64>(u64_x), vec3<u64>(u64_x, u64(1), u64(2))).y);
    sum += u32(u64_4(vec4<u64>(u64_x), vec4<u64>(u64_x, u64(1), u64(2), u64(3))).y);
    let i16_x = i16(i);
    sum += u32(i16_1(i16_x, i16_x + i16(3)));
    sum += u32(i16_2(vec2<i16>(i16_x), vec2<i16>(i16_x, i16(1))).y);
    sum += u32(i16_3(vec3<i16>(i16_x), vec3<i16>(i16_x, i16(1), i16(2))).y);
    sum += u32(i16_4(vec4<i16>(i16_x), vec4<i16>(i16_x, i16(1), i16(2), i16(3))).y);
    let u16_x = u16(i);
    sum += u32(u16_1(u16_x, u16_x + u16(3)));
    sum += u32(u16_2(vec2<u16>(u16_x), vec2<u16>(u16_x, u16(1))).y);
    sum += u32(u16_3(vec3<u16>(u16_x), vec3<u16>(u16_x, u16(1), u16(2))).y);
    sum += u32(u16_4(vec4<u16>(u16_x), vec4<u16>(u16_x, u16(1), u16(2), u16(3))).y);
    out[i] = sum;
}
