// Packing of several values into one u32.
namespace wgsl {

WGSL_FN u32 bytes(u32 a, u32 b, u32 c, u32 d) {
    return (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | (d & 255u) << 24;
}
WGSL_FN i32 signed_norm(f32 x, f32 scale) { return i32(::floorf(0.5f + scale * ::fminf(1.0f, ::fmaxf(-1.0f, x)))); }
WGSL_FN u32 unsigned_norm(f32 x, f32 scale) { return u32(::floorf(0.5f + scale * ::fminf(1.0f, ::fmaxf(0.0f, x)))); }
WGSL_FN u32 pack4x8snorm(const vec<f32, 4>& v) {
    return bytes(signed_norm(v.x, 127.0f), signed_norm(v.y, 127.0f), signed_norm(v.z, 127.0f),
        signed_norm(v.w, 127.0f));
}
WGSL_FN u32 pack4x8unorm(const vec<f32, 4>& v) {
    return bytes(unsigned_norm(v.x, 255.0f), unsigned_norm(v.y, 255.0f), unsigned_norm(v.z, 255.0f),
                 unsigned_norm(v.w, 255.0f));
}
WGSL_FN u32 pack2x16snorm(const vec<f32, 2>& v) {
    return (u32(signed_norm(v.x, 32767.0f)) & 0xffffu) | u32(signed_norm(v.y, 32767.0f)) << 16;
}
WGSL_FN u32 pack2x16unorm(const vec<f32, 2>& v) {
    return unsigned_norm(v.x, 65535.0f) | unsigned_norm(v.y, 65535.0f) << 16;
}
WGSL_FN u32 pack2x16float(const vec<f32, 2>& v) { return u32(narrow(v.x).bits) | u32(narrow(v.y).bits) << 16; }
WGSL_FN u32 pack4xI8(const vec<i32, 4>& v) { return bytes(v.x, v.y, v.z, v.w); }
WGSL_FN u32 pack4xU8(const vec<u32, 4>& v) { return bytes(v.x, v.y, v.z, v.w); }
WGSL_FN u32 pack4xI8Clamp(const vec<i32, 4>& v) {
    return pack4xI8(map([](i32 x) { return x < -128 ? -128 : x > 127 ? 127 : x; }, v));
}
WGSL_FN u32 pack4xU8Clamp(const vec<u32, 4>& v) {
    return pack4xU8(map([](u32 x) { return x > 255u ? 255u : x; }, v));
}

WGSL_FN vec<i32, 4> unpack4xI8(u32 x) {
    return {i32(x << 24) >> 24, i32(x << 16) >> 24, i32(x << 8) >> 24, i32(x) >> 24};
}
WGSL_FN vec<u32, 4> unpack4xU8(u32 x) { return {x & 255u, x >> 8 & 255u, x >> 16 & 255u, x >> 24}; }
WGSL_FN vec<f32, 4> unpack4x8snorm(u32 x) {
    return map([](i32 b) { return ::fmaxf(f32(b) / 127.0f, -1.0f); }, unpack4xI8(x));
}
WGSL_FN vec<f32, 4> unpack4x8unorm(u32 x) {
    return map([](u32 b) { return f32(b) / 255.0f; }, unpack4xU8(x));
}
WGSL_FN vec<f32, 2> unpack2x16snorm(u32 x) {
    return {::fmaxf(f32(i32(x << 16) >> 16) / 32767.0f, -1.0f), ::fmaxf(f32(i32(x) >> 16) / 32767.0f, -1.0f)};
}
WGSL_FN vec<f32, 2> unpack2x16unorm(u32 x) { return {f32(x & 0xffffu) / 65535.0f, f32(x >> 16) / 65535.0f}; }
WGSL_FN vec<f32, 2> unpack2x16float(u32 x) { return {widen(f16{u16(x & 0xffffu)}), widen(f16{u16(x >> 16)})}; }

WGSL_FN i32 dot4I8Packed(u32 a, u32 b) { return __dp4a(i32(a), i32(b), 0); }
WGSL_FN u32 dot4U8Packed(u32 a, u32 b) { return __dp4a(a, b, 0u); }

} // namespace wgsl
