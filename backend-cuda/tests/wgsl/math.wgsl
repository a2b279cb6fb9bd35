// FLOAT: f16 f32 f64
// Every builtin function on one type, scalars and vectors; the costly ones only on scalars and vec3.
@group(0) @binding(0) var<storage, read> a: array<FLOAT>;
@group(0) @binding(1) var<storage, read_write> out: array<FLOAT>;

fn numbers_1(x: FLOAT, y: FLOAT, z: FLOAT) -> FLOAT {
    var r = x;
    r += abs(r);
    r += acos(r);
    r += acosh(r);
    r += asin(r);
    r += asinh(r);
    r += atan(r);
    r += atanh(r);
    r += ceil(r);
    r += cos(r);
    r += cosh(r);
    r += degrees(r);
    r += exp(r);
    r += exp2(r);
    r += floor(r);
    r += fract(r);
    r += inverseSqrt(r);
    r += log(r);
    r += log2(r);
    r += radians(r);
    r += round(r);
    r += saturate(r);
    r += sign(r);
    r += sin(r);
    r += sinh(r);
    r += sqrt(r);
    r += tan(r);
    r += tanh(r);
    r += trunc(r);
    r += atan2(r, y);
    r += max(r, y);
    r += min(r, y);
    r += pow(r, y);
    r += step(r, y);
    r += clamp(r, y, z);
    r += fma(r, y, z);
    r += mix(r, y, z);
    r += smoothstep(r, y, z);
    r = -r % y - x * y / z;
    let m = modf(x);
    let f = frexp(y);
    r += length(x) + distance(x, y) + m.fract + m.whole + f.fract + FLOAT(f.exp) + ldexp(x, i32(f.exp))
        + select(x, y, x == y);
    return r;
}

fn numbers_2(x: vec2<FLOAT>, y: vec2<FLOAT>, z: vec2<FLOAT>) -> vec2<FLOAT> {
    var r = x;
    r += abs(r);
    r += ceil(r);
    r += degrees(r);
    r += floor(r);
    r += fract(r);
    r += inverseSqrt(r);
    r += radians(r);
    r += round(r);
    r += saturate(r);
    r += sign(r);
    r += sqrt(r);
    r += trunc(r);
    r += max(r, y);
    r += min(r, y);
    r += step(r, y);
    r += clamp(r, y, z);
    r += fma(r, y, z);
    r += mix(r, y, z);
    r += smoothstep(r, y, z);
    r = -r % y - x * y / z;
    r += normalize(x) + faceForward(x, y, z) + reflect(x, y) + refract(x, y, z.x) + mix(x, y, z.x);
    r = select(r, x, x < y) + x * z.x + z.x * x + x / z.x + z.x / x + (x - z.x) + (z.x + x);
    r += vec2<FLOAT>(length(x) + distance(x, y) + dot(x, z));
    let m = modf(x);
    let f = frexp(y);
    r += m.fract + m.whole + f.fract + vec2<FLOAT>(f.exp) + ldexp(x, vec2<i32>(f.exp));
    return r;
}

fn numbers_3(x: vec3<FLOAT>, y: vec3<FLOAT>, z: vec3<FLOAT>) -> vec3<FLOAT> {
    var r = x;
    r += abs(r);
    r += acos(r);
    r += acosh(r);
    r += asin(r);
    r += asinh(r);
    r += atan(r);
    r += atanh(r);
    r += ceil(r);
    r += cos(r);
    r += cosh(r);
    r += degrees(r);
    r += exp(r);
    r += exp2(r);
    r += floor(r);
    r += fract(r);
    r += inverseSqrt(r);
    r += log(r);
    r += log2(r);
    r += radians(r);
    r += round(r);
    r += saturate(r);
    r += sign(r);
    r += sin(r);
    r += sinh(r);
    r += sqrt(r);
    r += tan(r);
    r += tanh(r);
    r += trunc(r);
    r += atan2(r, y);
    r += max(r, y);
    r += min(r, y);
    r += pow(r, y);
    r += step(r, y);
    r += clamp(r, y, z);
    r += fma(r, y, z);
    r += mix(r, y, z);
    r += smoothstep(r, y, z);
    r = -r % y - x * y / z;
    r += normalize(x) + faceForward(x, y, z) + reflect(x, y) + refract(x, y, z.x) + mix(x, y, z.x);
    r = select(r, x, x < y) + x * z.x + z.x * x + x / z.x + z.x / x + (x - z.x) + (z.x + x);
    r += vec3<FLOAT>(length(x) + distance(x, y) + dot(x, z));
    r += cross(x, y);
    let m = modf(x);
    let f = frexp(y);
    r += m.fract + m.whole + f.fract + vec3<FLOAT>(f.exp) + ldexp(x, vec3<i32>(f.exp));
    return r;
}

fn numbers_4(x: vec4<FLOAT>, y: vec4<FLOAT>, z: vec4<FLOAT>) -> vec4<FLOAT> {
    var r = x;
    r += abs(r);
    r += ceil(r);
    r += degrees(r);
    r += floor(r);
    r += fract(r);
    r += inverseSqrt(r);
    r += radians(r);
    r += round(r);
    r += saturate(r);
    r += sign(r);
    r += sqrt(r);
    r += trunc(r);
    r += max(r, y);
    r += min(r, y);
    r += step(r, y);
    r += clamp(r, y, z);
    r += fma(r, y, z);
    r += mix(r, y, z);
    r += smoothstep(r, y, z);
    r = -r % y - x * y / z;
    r += normalize(x) + faceForward(x, y, z) + reflect(x, y) + refract(x, y, z.x) + mix(x, y, z.x);
    r = select(r, x, x < y) + x * z.x + z.x * x + x / z.x + z.x / x + (x - z.x) + (z.x + x);
    r += vec4<FLOAT>(length(x) + distance(x, y) + dot(x, z));
    let m = modf(x);
    let f = frexp(y);
    r += m.fract + m.whole + f.fract + vec4<FLOAT>(f.exp) + ldexp(x, vec4<i32>(f.exp));
    return r;
}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.x;
    out[i] = numbers_1(a[i], a[i + 1u], a[i + 2u])
        + numbers_2(vec2<FLOAT>(a[i]), vec2(a[i], a[i + 1u]), vec2(a[i])).x
        + numbers_3(vec3<FLOAT>(a[i]), vec3(a[i], a[i + 1u], a[0]), vec3(a[i])).z
        + numbers_4(vec4<FLOAT>(a[i]), vec4(a[i], a[i + 1u], a[2], a[3]), vec4(a[i])).w;
}
