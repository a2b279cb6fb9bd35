// Builtin numeric functions with WGSL's names; f16 goes through f32.
namespace wgsl {

#define WGSL_EACH1(NAME)                                                                               \
    template <class T, u32 N> WGSL_FN vec<T, N> NAME(const vec<T, N>& a) {                             \
        return map([](T x) { return NAME(x); }, a);                                                    \
    }
#define WGSL_EACH2(NAME)                                                                               \
    template <class T, u32 N> WGSL_FN vec<T, N> NAME(const vec<T, N>& a, const vec<T, N>& b) {         \
        return map([](T x, T y) { return NAME(x, y); }, a, b);                                         \
    }
#define WGSL_EACH3(NAME)                                                                               \
    template <class T, u32 N>                                                                          \
    WGSL_FN vec<T, N> NAME(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {               \
        return map([](T x, T y, T z) { return NAME(x, y, z); }, a, b, c);                              \
    }
#define WGSL_FLOAT1(NAME, SINGLE, DOUBLE)                                                              \
    WGSL_FN f32 NAME(f32 x) { return SINGLE; }                                                         \
    WGSL_FN f64 NAME(f64 x) { return DOUBLE; }                                                         \
    WGSL_FN f16 NAME(f16 x) { return narrow(NAME(widen(x))); }                                         \
    WGSL_EACH1(NAME)
#define WGSL_FLOAT2(NAME, SINGLE, DOUBLE)                                                              \
    WGSL_FN f32 NAME(f32 x, f32 y) { return SINGLE; }                                                  \
    WGSL_FN f64 NAME(f64 x, f64 y) { return DOUBLE; }                                                  \
    WGSL_FN f16 NAME(f16 x, f16 y) { return narrow(NAME(widen(x), widen(y))); }                        \
    WGSL_EACH2(NAME)
#define WGSL_FLOAT3(NAME, SINGLE, DOUBLE)                                                              \
    WGSL_FN f32 NAME(f32 x, f32 y, f32 z) { return SINGLE; }                                           \
    WGSL_FN f64 NAME(f64 x, f64 y, f64 z) { return DOUBLE; }                                           \
    WGSL_FN f16 NAME(f16 x, f16 y, f16 z) { return narrow(NAME(widen(x), widen(y), widen(z))); }       \
    WGSL_EACH3(NAME)

#define WGSL_INTEGER(T)                                                                                \
    WGSL_FN T min(T x, T y) { return x < y ? x : y; }                                                  \
    WGSL_FN T max(T x, T y) { return x > y ? x : y; }                                                  \
    WGSL_FN T clamp(T x, T low, T high) { return min(max(x, low), high); }                             \
    WGSL_FN T abs(T x) { return x < T(0) ? neg(x) : x; }                                               \
    WGSL_FN T sign(T x) { return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0); }
WGSL_INTEGER(i16)
WGSL_INTEGER(u16)
WGSL_INTEGER(i32)
WGSL_INTEGER(u32)
WGSL_INTEGER(i64)
WGSL_INTEGER(u64)
WGSL_FLOAT2(min, ::fminf(x, y), ::fmin(x, y))
WGSL_FLOAT2(max, ::fmaxf(x, y), ::fmax(x, y))
WGSL_FLOAT3(clamp, ::fminf(::fmaxf(x, y), z), ::fmin(::fmax(x, y), z))
WGSL_FLOAT1(abs, ::fabsf(x), ::fabs(x))
WGSL_FLOAT1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f, x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : 0.0)
WGSL_FLOAT1(saturate, ::fminf(::fmaxf(x, 0.0f), 1.0f), ::fmin(::fmax(x, 0.0), 1.0))

WGSL_FLOAT1(cos, ::cosf(x), ::cos(x))
WGSL_FLOAT1(cosh, ::coshf(x), ::cosh(x))
WGSL_FLOAT1(sin, ::sinf(x), ::sin(x))
WGSL_FLOAT1(sinh, ::sinhf(x), ::sinh(x))
WGSL_FLOAT1(tan, ::tanf(x), ::tan(x))
WGSL_FLOAT1(tanh, ::tanhf(x), ::tanh(x))
WGSL_FLOAT1(acos, ::acosf(x), ::acos(x))
WGSL_FLOAT1(acosh, ::acoshf(x), ::acosh(x))
WGSL_FLOAT1(asin, ::asinf(x), ::asin(x))
WGSL_FLOAT1(asinh, ::asinhf(x), ::asinh(x))
WGSL_FLOAT1(atan, ::atanf(x), ::atan(x))
WGSL_FLOAT1(atanh, ::atanhf(x), ::atanh(x))
WGSL_FLOAT2(atan2, ::atan2f(x, y), ::atan2(x, y))
WGSL_FLOAT1(radians, x * 0.017453292519943295f, x * 0.017453292519943295)
WGSL_FLOAT1(degrees, x * 57.29577951308232f, x * 57.29577951308232)

WGSL_FLOAT1(ceil, ::ceilf(x), ::ceil(x))
WGSL_FLOAT1(floor, ::floorf(x), ::floor(x))
WGSL_FLOAT1(round, ::rintf(x), ::rint(x))
WGSL_FLOAT1(fract, x - ::floorf(x), x - ::floor(x))
WGSL_FLOAT1(trunc, ::truncf(x), ::trunc(x))
WGSL_FLOAT1(exp, ::expf(x), ::exp(x))
WGSL_FLOAT1(exp2, ::exp2f(x), ::exp2(x))
WGSL_FLOAT1(log, ::logf(x), ::log(x))
WGSL_FLOAT1(log2, ::log2f(x), ::log2(x))
WGSL_FLOAT2(pow, ::powf(x, y), ::pow(x, y))
WGSL_FLOAT1(sqrt, ::sqrtf(x), ::sqrt(x))
WGSL_FLOAT1(inverseSqrt, ::rsqrtf(x), ::rsqrt(x))
WGSL_FLOAT3(fma, ::fmaf(x, y, z), ::fma(x, y, z))
WGSL_FLOAT2(step, x <= y ? 1.0f : 0.0f, x <= y ? 1.0 : 0.0)
WGSL_FLOAT3(mix, x * (1.0f - z) + y * z, x * (1.0 - z) + y * z)
template <class T, u32 N> WGSL_FN vec<T, N> mix(const vec<T, N>& a, const vec<T, N>& b, T t) {
    return map([t](T x, T y) { return mix(x, y, t); }, a, b);
}
WGSL_FN f32 hermite(f32 t) { return t * t * (3.0f - 2.0f * t); }
WGSL_FN f64 hermite(f64 t) { return t * t * (3.0 - 2.0 * t); }
WGSL_FLOAT3(smoothstep, hermite(saturate((z - x) / (y - x))), hermite(saturate((z - x) / (y - x))))
WGSL_FN f32 quantizeToF16(f32 x) { return widen(narrow(x)); }
WGSL_EACH1(quantizeToF16)
WGSL_FN f32 ldexp(f32 x, i32 e) { return ::ldexpf(x, e); }
WGSL_FN f64 ldexp(f64 x, i32 e) { return ::ldexp(x, e); }
WGSL_FN f16 ldexp(f16 x, i32 e) { return narrow(::ldexpf(widen(x), e)); }
template <class T, u32 N> WGSL_FN vec<T, N> ldexp(const vec<T, N>& a, const vec<i32, N>& b) {
    return map([](T x, i32 e) { return ldexp(x, e); }, a, b);
}

// R is the result struct that naga declares.
template <class R, class T> WGSL_FN R modf(const T& x) {
    R r;
    r.m_whole = trunc(x);
    r.m_fract = x - r.m_whole;
    return r;
}
WGSL_FN f32 mantissa(f32 x) { int e; return ::frexpf(x, &e); }
WGSL_FN f64 mantissa(f64 x) { int e; return ::frexp(x, &e); }
WGSL_FN f16 mantissa(f16 x) { return narrow(mantissa(widen(x))); }
WGSL_EACH1(mantissa)
WGSL_FN i32 exponent(f32 x) { int e; ::frexpf(x, &e); return e; }
WGSL_FN i32 exponent(f64 x) { int e; ::frexp(x, &e); return e; }
WGSL_FN i32 exponent(f16 x) { return exponent(widen(x)); }
template <class T, u32 N> WGSL_FN vec<i32, N> exponent(const vec<T, N>& a) {
    return map([](T x) { return exponent(x); }, a);
}
// The exponent has the width of the argument.
template <class T> WGSL_FN void set(T& to, i32 e) { to = T(e); }
template <class T, u32 N> WGSL_FN void set(vec<T, N>& to, const vec<i32, N>& e) { to = cast<T>(e); }
template <class R, class T> WGSL_FN R frexp(const T& x) {
    R r;
    r.m_fract = mantissa(x);
    set(r.m_exp, exponent(x));
    return r;
}

template <class T> WGSL_FN T dot(const vec<T, 2>& a, const vec<T, 2>& b) { return add(mul(a.x, b.x), mul(a.y, b.y)); }
template <class T> WGSL_FN T dot(const vec<T, 3>& a, const vec<T, 3>& b) {
    return add(add(mul(a.x, b.x), mul(a.y, b.y)), mul(a.z, b.z));
}
template <class T> WGSL_FN T dot(const vec<T, 4>& a, const vec<T, 4>& b) {
    return add(add(add(mul(a.x, b.x), mul(a.y, b.y)), mul(a.z, b.z)), mul(a.w, b.w));
}
template <class T> WGSL_FN vec<T, 3> cross(const vec<T, 3>& a, const vec<T, 3>& b) {
    return {a.y * b.z - b.y * a.z, a.z * b.x - b.z * a.x, a.x * b.y - b.x * a.y};
}
template <class T> WGSL_FN T length(T x) { return abs(x); }
template <class T, u32 N> WGSL_FN T length(const vec<T, N>& v) { return sqrt(dot(v, v)); }
template <class T> WGSL_FN auto distance(const T& a, const T& b) -> decltype(length(a - b)) { return length(a - b); }
template <class T, u32 N> WGSL_FN vec<T, N> normalize(const vec<T, N>& v) { return v / length(v); }
template <class T, u32 N> WGSL_FN vec<T, N> faceForward(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {
    return dot(b, c) < cast<T>(0) ? a : -a;
}
template <class T, u32 N> WGSL_FN vec<T, N> reflect(const vec<T, N>& a, const vec<T, N>& n) {
    return a - (cast<T>(2) * dot(n, a)) * n;
}
template <class T, u32 N> WGSL_FN vec<T, N> refract(const vec<T, N>& a, const vec<T, N>& n, T eta) {
    T d = dot(n, a);
    T k = cast<T>(1) - eta * eta * (cast<T>(1) - d * d);
    return k < cast<T>(0) ? vec<T, N>{} : eta * a - (eta * d + sqrt(k)) * n;
}
WGSL_FN bool isNan(f32 x) { return x != x; }
WGSL_FN bool isNan(f64 x) { return x != x; }
WGSL_FN bool isNan(f16 x) { return (x.bits & 0x7fffu) > 0x7c00u; }
WGSL_FN bool isInf(f32 x) { return ::fabsf(x) > 3.4028234663852886e38f; }
WGSL_FN bool isInf(f64 x) { return ::fabs(x) > 1.7976931348623157e308; }
WGSL_FN bool isInf(f16 x) { return (x.bits & 0x7fffu) == 0x7c00u; }
template <class T, u32 N> WGSL_FN vec<bool, N> isNan(const vec<T, N>& a) {
    return map([](T x) { return isNan(x); }, a);
}
template <class T, u32 N> WGSL_FN vec<bool, N> isInf(const vec<T, N>& a) {
    return map([](T x) { return isInf(x); }, a);
}

} // namespace wgsl
