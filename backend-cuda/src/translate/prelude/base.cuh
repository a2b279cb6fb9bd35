// Scalars, vectors and arrays with WGSL's layouts and arithmetic. Aggregates have no constructors, so that
// they can live in __shared__ memory and be written as brace lists.
#pragma nv_diag_suppress 177, 186 // unused functions; unsigned numbers below zero
#define WGSL_FN __device__ __forceinline__

namespace wgsl {

using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using f32 = float;
using f64 = double;
struct f16 { u16 bits; };

// No cuda_fp16.h: NVRTC has no include path. Both conversions round to nearest even.
WGSL_FN f32 widen(f16 x) { f32 r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits)); return r; }
WGSL_FN f16 narrow(f32 x) { f16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x)); return r; }
WGSL_FN f16 narrow(f64 x) { f16 r; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(r.bits) : "d"(x)); return r; }

template <class T, u32 N> struct vec;
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
    T x, y;
    WGSL_FN T& operator[](u32 i) { return (&x)[i]; }
    WGSL_FN const T& operator[](u32 i) const { return (&x)[i]; }
};
template <class T> struct vec<T, 3> {
    T x, y, z;
    WGSL_FN T& operator[](u32 i) { return (&x)[i]; }
    WGSL_FN const T& operator[](u32 i) const { return (&x)[i]; }
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
    T x, y, z, w;
    WGSL_FN T& operator[](u32 i) { return (&x)[i]; }
    WGSL_FN const T& operator[](u32 i) const { return (&x)[i]; }
};

// Array element: only in arrays, a vec3 takes the size of a vec4.
template <class T> struct cell { T t; };
template <class T> struct alignas(4 * sizeof(T)) cell<vec<T, 3>> { vec<T, 3> t; };

template <class T, u32 N> struct arr {
    cell<T> v[N];
    WGSL_FN T& operator[](u32 i) { return v[i].t; }
    WGSL_FN const T& operator[](u32 i) const { return v[i].t; }
};

// The runtime-sized array at the end of a struct.
template <class E, class S> WGSL_FN E* tail(S& s, u64 offset) {
    return reinterpret_cast<E*>(reinterpret_cast<char*>(&s) + offset);
}
template <class E, class S> WGSL_FN const E* tail(const S& s, u64 offset) {
    return reinterpret_cast<const E*>(reinterpret_cast<const char*>(&s) + offset);
}

// Component of a vector value. Selects avoid an address, which would put the vector into local memory.
template <class T> WGSL_FN T at(const vec<T, 2>& v, u32 i) { return i == 0 ? v.x : v.y; }
template <class T> WGSL_FN T at(const vec<T, 3>& v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : v.z; }
template <class T> WGSL_FN T at(const vec<T, 4>& v, u32 i) { return i < 2 ? (i == 0 ? v.x : v.y) : i == 2 ? v.z : v.w; }

template <u32 N, class T> struct splatter;
template <class T> struct splatter<2, T> { static WGSL_FN vec<T, 2> of(T x) { return {x, x}; } };
template <class T> struct splatter<3, T> { static WGSL_FN vec<T, 3> of(T x) { return {x, x, x}; } };
template <class T> struct splatter<4, T> { static WGSL_FN vec<T, 4> of(T x) { return {x, x, x, x}; } };
template <u32 N, class T> WGSL_FN vec<T, N> splat(T x) { return splatter<N, T>::of(x); }

template <u32 A, u32 B, class V> WGSL_FN auto swizzle(const V& v) -> vec<decltype(v.x), 2> { return {v[A], v[B]}; }
template <u32 A, u32 B, u32 C, class V> WGSL_FN auto swizzle(const V& v) -> vec<decltype(v.x), 3> {
    return {v[A], v[B], v[C]};
}
template <u32 A, u32 B, u32 C, u32 D, class V> WGSL_FN auto swizzle(const V& v) -> vec<decltype(v.x), 4> {
    return {v[A], v[B], v[C], v[D]};
}

template <class T> WGSL_FN vec<T, 3> join(const vec<T, 2>& a, T b) { return {a.x, a.y, b}; }
template <class T> WGSL_FN vec<T, 3> join(T a, const vec<T, 2>& b) { return {a, b.x, b.y}; }
template <class T> WGSL_FN vec<T, 4> join(const vec<T, 2>& a, T b, T c) { return {a.x, a.y, b, c}; }
template <class T> WGSL_FN vec<T, 4> join(T a, const vec<T, 2>& b, T c) { return {a, b.x, b.y, c}; }
template <class T> WGSL_FN vec<T, 4> join(T a, T b, const vec<T, 2>& c) { return {a, b, c.x, c.y}; }
template <class T> WGSL_FN vec<T, 4> join(const vec<T, 2>& a, const vec<T, 2>& b) { return {a.x, a.y, b.x, b.y}; }
template <class T> WGSL_FN vec<T, 4> join(const vec<T, 3>& a, T b) { return {a.x, a.y, a.z, b}; }
template <class T> WGSL_FN vec<T, 4> join(T a, const vec<T, 3>& b) { return {a, b.x, b.y, b.z}; }

template <class F, class A> WGSL_FN auto map(F f, const vec<A, 2>& a) -> vec<decltype(f(a.x)), 2> {
    return {f(a.x), f(a.y)};
}
template <class F, class A> WGSL_FN auto map(F f, const vec<A, 3>& a) -> vec<decltype(f(a.x)), 3> {
    return {f(a.x), f(a.y), f(a.z)};
}
template <class F, class A> WGSL_FN auto map(F f, const vec<A, 4>& a) -> vec<decltype(f(a.x)), 4> {
    return {f(a.x), f(a.y), f(a.z), f(a.w)};
}
template <class F, class A, class B>
WGSL_FN auto map(F f, const vec<A, 2>& a, const vec<B, 2>& b) -> vec<decltype(f(a.x, b.x)), 2> {
    return {f(a.x, b.x), f(a.y, b.y)};
}
template <class F, class A, class B>
WGSL_FN auto map(F f, const vec<A, 3>& a, const vec<B, 3>& b) -> vec<decltype(f(a.x, b.x)), 3> {
    return {f(a.x, b.x), f(a.y, b.y), f(a.z, b.z)};
}
template <class F, class A, class B>
WGSL_FN auto map(F f, const vec<A, 4>& a, const vec<B, 4>& b) -> vec<decltype(f(a.x, b.x)), 4> {
    return {f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w)};
}
template <class F, class A, class B, class C>
WGSL_FN auto map(F f, const vec<A, 2>& a, const vec<B, 2>& b, const vec<C, 2>& c)
    -> vec<decltype(f(a.x, b.x, c.x)), 2> {
    return {f(a.x, b.x, c.x), f(a.y, b.y, c.y)};
}
template <class F, class A, class B, class C>
WGSL_FN auto map(F f, const vec<A, 3>& a, const vec<B, 3>& b, const vec<C, 3>& c)
    -> vec<decltype(f(a.x, b.x, c.x)), 3> {
    return {f(a.x, b.x, c.x), f(a.y, b.y, c.y), f(a.z, b.z, c.z)};
}
template <class F, class A, class B, class C>
WGSL_FN auto map(F f, const vec<A, 4>& a, const vec<B, 4>& b, const vec<C, 4>& c)
    -> vec<decltype(f(a.x, b.x, c.x)), 4> {
    return {f(a.x, b.x, c.x), f(a.y, b.y, c.y), f(a.z, b.z, c.z), f(a.w, b.w, c.w)};
}

// f16 arithmetic goes through f32: with 24 bits for an 11-bit format, the second rounding cannot change the
// result of one +, -, *, / or square root.
WGSL_FN f16 operator+(f16 a, f16 b) { return narrow(widen(a) + widen(b)); }
WGSL_FN f16 operator-(f16 a, f16 b) { return narrow(widen(a) - widen(b)); }
WGSL_FN f16 operator*(f16 a, f16 b) { return narrow(widen(a) * widen(b)); }
WGSL_FN f16 operator/(f16 a, f16 b) { return narrow(widen(a) / widen(b)); }
WGSL_FN f16 operator-(f16 a) { return f16{u16(a.bits ^ 0x8000u)}; }
WGSL_FN bool operator==(f16 a, f16 b) { return widen(a) == widen(b); }
WGSL_FN bool operator!=(f16 a, f16 b) { return widen(a) != widen(b); }
WGSL_FN bool operator<(f16 a, f16 b) { return widen(a) < widen(b); }
WGSL_FN bool operator<=(f16 a, f16 b) { return widen(a) <= widen(b); }
WGSL_FN bool operator>(f16 a, f16 b) { return widen(a) > widen(b); }
WGSL_FN bool operator>=(f16 a, f16 b) { return widen(a) >= widen(b); }

// Integers wrap: signed ones are computed unsigned, where C++ defines the result. x / 0 is x, x % 0 is 0. A
// quotient that overflows is x, too. Shift counts are taken modulo the width.
template <class T> WGSL_FN T add(T a, T b) { return a + b; }
template <class T> WGSL_FN T sub(T a, T b) { return a - b; }
template <class T> WGSL_FN T mul(T a, T b) { return a * b; }
template <class T> WGSL_FN T div(T a, T b) { return a / b; }
template <class T> WGSL_FN T neg(T a) { return -a; }
WGSL_FN f32 rem(f32 a, f32 b) { return ::fmodf(a, b); }
WGSL_FN f64 rem(f64 a, f64 b) { return ::fmod(a, b); }
WGSL_FN f16 rem(f16 a, f16 b) { return narrow(::fmodf(widen(a), widen(b))); }

// The intermediate type is at least 32 bits wide: 16-bit operands would be promoted to int.
#define WGSL_INT(T, U, BITS)                                                           \
    WGSL_FN T add(T a, T b) { return T(U(a) + U(b)); }                                 \
    WGSL_FN T sub(T a, T b) { return T(U(a) - U(b)); }                                 \
    WGSL_FN T mul(T a, T b) { return T(U(a) * U(b)); }                                 \
    WGSL_FN T neg(T a) { return T(U(0) - U(a)); }                                      \
    WGSL_FN T shl(T a, u32 n) { return T(U(a) << (n & (BITS - 1u))); }                 \
    WGSL_FN T shr(T a, u32 n) { return T(a >> (n & (BITS - 1u))); }                    \
    WGSL_FN T bit_and(T a, T b) { return T(a & b); }                                   \
    WGSL_FN T bit_or(T a, T b) { return T(a | b); }                                    \
    WGSL_FN T bit_xor(T a, T b) { return T(a ^ b); }                                   \
    WGSL_FN T bit_not(T a) { return T(~a); }
#define WGSL_SIGNED(T, U, BITS)                                                        \
    WGSL_INT(T, U, BITS)                                                               \
    WGSL_FN T div(T a, T b) { return b == 0 ? a : b == -1 ? neg(a) : T(a / b); }       \
    WGSL_FN T rem(T a, T b) { return b == 0 || b == -1 ? T(0) : T(a % b); }
#define WGSL_UNSIGNED(T, U, BITS)                                                      \
    WGSL_INT(T, U, BITS)                                                               \
    WGSL_FN T div(T a, T b) { return b == 0 ? a : T(a / b); }                          \
    WGSL_FN T rem(T a, T b) { return b == 0 ? T(0) : T(a % b); }
WGSL_SIGNED(i16, u32, 16)
WGSL_UNSIGNED(u16, u32, 16)
WGSL_SIGNED(i32, u32, 32)
WGSL_UNSIGNED(u32, u32, 32)
WGSL_SIGNED(i64, u64, 64)
WGSL_UNSIGNED(u64, u64, 64)
WGSL_FN bool bit_and(bool a, bool b) { return a && b; }
WGSL_FN bool bit_or(bool a, bool b) { return a || b; }
WGSL_FN bool bit_xor(bool a, bool b) { return a != b; }

#define WGSL_OPERATOR(OP, CALL)                                                                                 \
    template <class T, u32 N> WGSL_FN vec<T, N> operator OP(const vec<T, N>& a, const vec<T, N>& b) {           \
        return map([](T x, T y) { return CALL(x, y); }, a, b);                                                  \
    }                                                                                                           \
    template <class T, u32 N> WGSL_FN vec<T, N> operator OP(const vec<T, N>& a, T b) {                          \
        return map([b](T x) { return CALL(x, b); }, a);                                                         \
    }                                                                                                           \
    template <class T, u32 N> WGSL_FN vec<T, N> operator OP(T a, const vec<T, N>& b) {                          \
        return map([a](T y) { return CALL(a, y); }, b);                                                         \
    }
WGSL_OPERATOR(+, add)
WGSL_OPERATOR(-, sub)
WGSL_OPERATOR(*, mul)
WGSL_OPERATOR(/, div)
WGSL_OPERATOR(%, rem)
WGSL_OPERATOR(&, bit_and)
WGSL_OPERATOR(|, bit_or)
WGSL_OPERATOR(^, bit_xor)
template <class T, u32 N> WGSL_FN vec<T, N> operator<<(const vec<T, N>& a, const vec<u32, N>& n) {
    return map([](T x, u32 y) { return shl(x, y); }, a, n);
}
template <class T, u32 N> WGSL_FN vec<T, N> operator>>(const vec<T, N>& a, const vec<u32, N>& n) {
    return map([](T x, u32 y) { return shr(x, y); }, a, n);
}
template <class T, u32 N> WGSL_FN vec<T, N> operator-(const vec<T, N>& a) {
    return map([](T x) { return neg(x); }, a);
}
template <class T, u32 N> WGSL_FN vec<T, N> operator~(const vec<T, N>& a) {
    return map([](T x) { return bit_not(x); }, a);
}
template <u32 N> WGSL_FN vec<bool, N> operator!(const vec<bool, N>& a) {
    return map([](bool x) { return !x; }, a);
}

#define WGSL_COMPARE(OP)                                                                                        \
    template <class T, u32 N> WGSL_FN vec<bool, N> operator OP(const vec<T, N>& a, const vec<T, N>& b) {        \
        return map([](T x, T y) { return x OP y; }, a, b);                                                      \
    }
WGSL_COMPARE(==)
WGSL_COMPARE(!=)
WGSL_COMPARE(<)
WGSL_COMPARE(<=)
WGSL_COMPARE(>)
WGSL_COMPARE(>=)

template <class T, u32 N> WGSL_FN vec<T, N> select(const vec<T, N>& no, const vec<T, N>& yes, const vec<bool, N>& c) {
    return map([](T n, T y, bool b) { return b ? y : n; }, no, yes, c);
}
WGSL_FN bool all(bool v) { return v; }
WGSL_FN bool any(bool v) { return v; }
WGSL_FN bool all(const vec<bool, 2>& v) { return v.x && v.y; }
WGSL_FN bool all(const vec<bool, 3>& v) { return v.x && v.y && v.z; }
WGSL_FN bool all(const vec<bool, 4>& v) { return v.x && v.y && v.z && v.w; }
WGSL_FN bool any(const vec<bool, 2>& v) { return v.x || v.y; }
WGSL_FN bool any(const vec<bool, 3>& v) { return v.x || v.y || v.z; }
WGSL_FN bool any(const vec<bool, 4>& v) { return v.x || v.y || v.z || v.w; }

// Conversions of values. Floats saturate to the largest value that both types hold. The low end needs no
// clamp if the instruction saturates.
template <class T, class S> struct caster { static WGSL_FN T of(S s) { return static_cast<T>(s); } };
template <class S> struct caster<bool, S> { static WGSL_FN bool of(S s) { return s != S(0); } };
template <> struct caster<i32, f32> {
    static WGSL_FN i32 of(f32 s) { return __float2int_rz(::fminf(s, 2147483520.0f)); }
};
template <> struct caster<u32, f32> {
    static WGSL_FN u32 of(f32 s) { return __float2uint_rz(::fminf(s, 4294967040.0f)); }
};
template <> struct caster<i64, f32> {
    static WGSL_FN i64 of(f32 s) { return __float2ll_rz(::fminf(s, 9223371487098961920.0f)); }
};
template <> struct caster<u64, f32> {
    static WGSL_FN u64 of(f32 s) { return __float2ull_rz(::fmaxf(0.0f, ::fminf(s, 18446742974197923840.0f))); }
};
template <> struct caster<i16, f32> {
    static WGSL_FN i16 of(f32 s) { return i16(__float2int_rz(::fmaxf(-32768.0f, ::fminf(s, 32767.0f)))); }
};
template <> struct caster<u16, f32> {
    static WGSL_FN u16 of(f32 s) { return u16(__float2uint_rz(::fminf(s, 65535.0f))); }
};
template <> struct caster<i32, f64> { static WGSL_FN i32 of(f64 s) { return __double2int_rz(s); } };
template <> struct caster<u32, f64> { static WGSL_FN u32 of(f64 s) { return __double2uint_rz(::fmax(0.0, s)); } };
template <> struct caster<i64, f64> {
    static WGSL_FN i64 of(f64 s) { return __double2ll_rz(::fmin(s, 9223372036854774784.0)); }
};
template <> struct caster<u64, f64> {
    static WGSL_FN u64 of(f64 s) { return __double2ull_rz(::fmax(0.0, ::fmin(s, 18446744073709549568.0))); }
};
template <> struct caster<i16, f64> {
    static WGSL_FN i16 of(f64 s) { return i16(__double2int_rz(::fmax(-32768.0, ::fmin(s, 32767.0)))); }
};
template <> struct caster<u16, f64> {
    static WGSL_FN u16 of(f64 s) { return u16(__double2uint_rz(::fmax(0.0, ::fmin(s, 65535.0)))); }
};
template <class T> struct caster<T, f16> { static WGSL_FN T of(f16 s) { return caster<T, f32>::of(widen(s)); } };
template <class S> struct caster<f16, S> { static WGSL_FN f16 of(S s) { return narrow(static_cast<f32>(s)); } };
template <> struct caster<f16, f64> { static WGSL_FN f16 of(f64 s) { return narrow(s); } };
template <> struct caster<f16, f16> { static WGSL_FN f16 of(f16 s) { return s; } };
template <> struct caster<bool, f16> { static WGSL_FN bool of(f16 s) { return (s.bits & 0x7fffu) != 0; } };

template <class T, class S> WGSL_FN T cast(S s) { return caster<T, S>::of(s); }
template <class T, class S, u32 N> WGSL_FN vec<T, N> cast(const vec<S, N>& v) {
    return map([](S s) { return caster<T, S>::of(s); }, v);
}
template <class T, class S> WGSL_FN T bitcast(const S& s) {
    static_assert(sizeof(T) == sizeof(S), "a bitcast keeps the size");
    T t;
    memcpy(&t, &s, sizeof(T));
    return t;
}

// Workgroup memory starts as zeros: each invocation clears every `step`-th element.
template <class T> struct cells {
    static const u32 count = 1;
    static WGSL_FN void clear(T& t, u32) { t = T{}; }
};
template <class T, u32 N> struct cells<arr<T, N>> {
    static const u32 count = N * cells<T>::count;
    static WGSL_FN void clear(arr<T, N>& a, u32 i) { cells<T>::clear(a[i / cells<T>::count], i % cells<T>::count); }
};
template <class T> WGSL_FN void zero(T& t, u32 first, u32 step) {
    for (u32 i = first; i < cells<T>::count; i += step) cells<T>::clear(t, i);
}

} // namespace wgsl
