// Every conversion between scalar types, and of vectors.
enable f16;
enable wgpu_int16;

@group(0) @binding(0) var<storage, read_write> out: array<u32>;

fn from_bool(x: bool) -> u32 {
    var r = 0u;
    r += u32(i32(x));
    r += u32(vec3<i32>(vec3<bool>(x)).z);
    r += u32(u32(x));
    r += u32(vec3<u32>(vec3<bool>(x)).z);
    r += u32(f32(x));
    r += u32(vec3<f32>(vec3<bool>(x)).z);
    r += u32(f16(x));
    r += u32(vec3<f16>(vec3<bool>(x)).z);
    r += u32(f64(x));
    r += u32(vec3<f64>(vec3<bool>(x)).z);
    r += u32(i64(x));
    r += u32(vec3<i64>(vec3<bool>(x)).z);
    r += u32(u64(x));
    r += u32(vec3<u64>(vec3<bool>(x)).z);
    r += u32(i16(x));
    r += u32(vec3<i16>(vec3<bool>(x)).z);
    r += u32(u16(x));
    r += u32(vec3<u16>(vec3<bool>(x)).z);
    return r;
}

fn from_i32(x: i32) -> u32 {
    var r = 0u;
    r += u32(bool(x));
    r += u32(vec3<bool>(vec3<i32>(x)).z);
    r += u32(u32(x));
    r += u32(vec3<u32>(vec3<i32>(x)).z);
    r += u32(f32(x));
    r += u32(vec3<f32>(vec3<i32>(x)).z);
    r += u32(f16(x));
    r += u32(vec3<f16>(vec3<i32>(x)).z);
    r += u32(f64(x));
    r += u32(vec3<f64>(vec3<i32>(x)).z);
    r += u32(i64(x));
    r += u32(vec3<i64>(vec3<i32>(x)).z);
    r += u32(u64(x));
    r += u32(vec3<u64>(vec3<i32>(x)).z);
    r += u32(i16(x));
    r += u32(vec3<i16>(vec3<i32>(x)).z);
    r += u32(u16(x));
    r += u32(vec3<u16>(vec3<i32>(x)).z);
    return r;
}

fn from_u32(x: u32) -> u32 {
    var r = 0u;
    r += u32(bool(x));
    r += u32(vec3<bool>(vec3<u32>(x)).z);
    r += u32(i32(x));
    r += u32(vec3<i32>(vec3<u32>(x)).z);
    r += u32(f32(x));
    r += u32(vec3<f32>(vec3<u32>(x)).z);
    r += u32(f16(x));
    r += u32(vec3<f16>(vec3<u32>(x)).z);
    r += u32(f64(x));
    r += u32(vec3<f64>(vec3<u32>(x)).z);
    r += u32(i64(x));
    r += u32(vec3<i64>(vec3<u32>(x)).z);
    r += u32(u64(x));
    r += u32(vec3<u64>(vec3<u32>(x)).z);
    r += u32(i16(x));
    r += u32(vec3<i16>(vec3<u32>(x)).z);
    r += u32(u16(x));
    r += u32(vec3<u16>(vec3<u32>(x)).z);
    return r;
}

fn from_f32(x: f32) -> u32 {
    var r = 0u;
    r += u32(bool(x));
    r += u32(vec3<bool>(vec3<f32>(x)).z);
    r += u32(i32(x));
    r += u32(vec3<i32>(vec3<f32>(x)).z);
    r += u32(u32(x));
    r += u32(vec3<u32>(vec3<f32>(x)).z);
    r += u32(f16(x));
    r += u32(vec3<f16>(vec3<f32>(x)).z);
    r += u32(f64(x));
    r += u32(vec3<f64>(vec3<f32>(x)).z);
    r += u32(i64(x));
    r += u32(vec3<i64>(vec3<f32>(x)).z);
    r += u32(u64(x));
    r += u32(vec3<u64>(vec3<f32>(x)).z);
    r += u32(i16(x));
    r += u32(vec3<i16>(vec3<f32>(x)).z);
    r += u32(u16(x));
    r += u32(vec3<u16>(vec3<f32>(x)).z);
    return r;
}

fn from_f16(x: f16) -> u32 {
    var r = 0u;
    r += u32(bool(x));
    r += u32(vec3<bool>(vec3<f16>(x)).z);
    r += u32(i32(x));
    r += u32(vec3<i32>(vec3<f16>(x)).z);
    r += u32(u32(x));
    r += u32(vec3<u32>(vec3<f16>(x)).z);
    r += u32(f32(x));
    r += u32(vec3<f32>(vec3<f16>(x)).z);
    r += u32(f64(x));
    r += u32(vec3<f64>(vec3<f16>(x)).z);
    r += u32(i64(x));
    r += u32(vec3<i64>(vec3<f16>(x)).z);
    r += u32(u64(x));
    r += u32(vec3<u64>(vec3<f16>(x)).z);
    r += u32(i16(x));
    r += u32(vec3<i16>(vec3<f16>(x)).z);
    r += u32(u16(x));
    r += u32(vec3<u16>(vec3<f16>(x)).z);
    return r;
}

fn from_f64(x: f64) -> u32 {
    var r = 0u;
    r += u32(bool(x));
    r += u32(vec3<bool>(vec3<f64>(x)).z);
    r += u32(i32(x));
    r += u32(vec3<i32>(vec3<f64>(x)).z);
    r += u32(u32(x));
    r += u32(vec3<u32>(vec3<f64>(x)).z);
    r += u32(f32(x));
    r += u32(vec3<f32>(vec3<f64>(x)).z);
    r += u32(f16(x));
    r += u32(vec3<f16>(vec3<f64>(x)).z);
    r += u32(i64(x));
    r += u32(vec3<i64>(vec3<f64>(x)).z);
    r += u32(u64(x));
    r += u32(vec3<u64>(vec3<f64>(x)).z);
    r += u32(i16(x));
    r += u32(vec3<i16>(vec3<f64>(x)).z);
    r += u32(u16(x));
    r += u32(vec3<u16>(vec3<f64>(x)).z);
    return r;
}

fn from_i64(x: i64) -> u32 {
    var r = 0u;
    r += u32(bool(x));
    r += u32(vec3<bool>(vec3<i64>(x)).z);
    r += u32(i32(x));
    r += u32(vec3<i32>(vec3<i64>(x)).z);
    r += u32(u32(x));
    r += u32(vec3<u32>(vec3<i64>(x)).z);
    r += u32(f32(x));
    r += u32(vec3<f32>(vec3<i64>(x)).z);
    r += u32(f16(x));
    r += u32(vec3<f16>(vec3<i64>(x)).z);
    r += u32(f64(x));
    r += u32(vec3<f64>(vec3<i64>(x)).z);
    r += u32(u64(x));
    r += u32(vec3<u64>(vec3<i64>(x)).z);
    r += u32(i16(x));
    r += u32(vec3<i16>(vec3<i64>(x)).z);
    r += u32(u16(x));
    r += u32(vec3<u16>(vec3<i64>(x)).z);
    return r;
}

fn from_u64(x: u64) -> u32 {
    var r = 0u;
    r += u32(bool(x));
    r += u32(vec3<bool>(vec3<u64>(x)).z);
    r += u32(i32(x));
    r += u32(vec3<i32>(vec3<u64>(x)).z);
    r += u32(u32(x));
    r += u32(vec3<u32>(vec3<u64>(x)).z);
    r += u32(f32(x));
    r += u32(vec3<f32>(vec3<u64>(x)).z);
    r += u32(f16(x));
    r += u32(vec3<f16>(vec3<u64>(x)).z);
    r += u32(f64(x));
    r += u32(vec3<f64>(vec3<u64>(x)).z);
    r += u32(i64(x));
    r += u32(vec3<i64>(vec3<u64>(x)).z);
    r += u32(i16(x));
    r += u32(vec3<i16>(vec3<u64>(x)).z);
    r += u32(u16(x));
    r += u32(vec3<u16>(vec3<u64>(x)).z);
    return r;
}

fn from_i16(x: i16) -> u32 {
    var r = 0u;
    r += u32(bool(x));
    r += u32(vec3<bool>(vec3<i16>(x)).z);
    r += u32(i32(x));
    r += u32(vec3<i32>(vec3<i16>(x)).z);
    r += u32(u32(x));
    r += u32(vec3<u32>(vec3<i16>(x)).z);
    r += u32(f32(x));
    r += u32(vec3<f32>(vec3<i16>(x)).z);
    r += u32(f16(x));
    r += u32(vec3<f16>(vec3<i16>(x)).z);
    r += u32(f64(x));
    r += u32(vec3<f64>(vec3<i16>(x)).z);
    r += u32(i64(x));
    r += u32(vec3<i64>(vec3<i16>(x)).z);
    r += u32(u64(x));
    r += u32(vec3<u64>(vec3<i16>(x)).z);
    r += u32(u16(x));
    r += u32(vec3<u16>(vec3<i16>(x)).z);
    return r;
}

fn from_u16(x: u16) -> u32 {
    var r = 0u;
    r += u32(bool(x));
    r += u32(vec3<bool>(vec3<u16>(x)).z);
    r += u32(i32(x));
    r += u32(vec3<i32>(vec3<u16>(x)).z);
    r += u32(u32(x));
    r += u32(vec3<u32>(vec3<u16>(x)).z);
    r += u32(f32(x));
    r += u32(vec3<f32>(vec3<u16>(x)).z);
    r += u32(f16(x));
    r += u32(vec3<f16>(vec3<u16>(x)).z);
    r += u32(f64(x));
    r += u32(vec3<f64>(vec3<u16>(x)).z);
    r += u32(i64(x));
    r += u32(vec3<i64>(vec3<u16>(x)).z);
    r += u32(u64(x));
    r += u32(vec3<u64>(vec3<u16>(x)).z);
    r += u32(i16(x));
    r += u32(vec3<i16>(vec3<u16>(x)).z);
    return r;
}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let x = id.x;
    out[x] = from_bool(bool(x)) + from_i32(i32(x)) + from_u32(u32(x)) + from_f32(f32(x)) + from_f16(f16(x))
        + from_f64(f64(x)) + from_i64(i64(x)) + from_u64(u64(x)) + from_i16(i16(x)) + from_u16(u16(x));
}
