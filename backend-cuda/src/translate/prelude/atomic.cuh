// Atomics are relaxed, as in WGSL. A load or store must not be torn, cached or moved out of a loop, so it is
// volatile.
namespace wgsl {

template <class T> WGSL_FN T atomicLoad(const T& p) { return *const_cast<const volatile T*>(&p); }
template <class T> WGSL_FN void atomicStore(T& p, T v) { *const_cast<volatile T*>(&p) = v; }

#define WGSL_ATOMIC(NAME, T, AS) \
    WGSL_FN T NAME(T& p, T v) { return T(::NAME(reinterpret_cast<AS*>(&p), AS(v))); }
#define WGSL_ATOMIC_INT(NAME)       \
    WGSL_ATOMIC(NAME, u32, u32)     \
    WGSL_ATOMIC(NAME, i32, i32)
WGSL_ATOMIC_INT(atomicAdd)
WGSL_ATOMIC_INT(atomicSub)
WGSL_ATOMIC_INT(atomicMin)
WGSL_ATOMIC_INT(atomicMax)
WGSL_ATOMIC_INT(atomicAnd)
WGSL_ATOMIC_INT(atomicOr)
WGSL_ATOMIC_INT(atomicXor)
WGSL_ATOMIC_INT(atomicExch)
WGSL_ATOMIC(atomicAdd, f32, f32)
WGSL_ATOMIC(atomicExch, f32, f32)
WGSL_FN f32 atomicSub(f32& p, f32 v) { return ::atomicAdd(&p, -v); }
#define WGSL_ATOMIC_WIDE(NAME)      \
    WGSL_ATOMIC(NAME, u64, u64)     \
    WGSL_ATOMIC(NAME, i64, u64)
WGSL_ATOMIC_WIDE(atomicAdd)
WGSL_ATOMIC_WIDE(atomicAnd)
WGSL_ATOMIC_WIDE(atomicOr)
WGSL_ATOMIC_WIDE(atomicXor)
WGSL_ATOMIC_WIDE(atomicExch)
WGSL_ATOMIC(atomicMin, u64, u64)
WGSL_ATOMIC(atomicMax, u64, u64)
WGSL_ATOMIC(atomicMin, i64, i64)
WGSL_ATOMIC(atomicMax, i64, i64)
WGSL_FN u64 atomicSub(u64& p, u64 v) { return ::atomicAdd(&p, neg(v)); }
WGSL_FN i64 atomicSub(i64& p, i64 v) { return atomicAdd(p, neg(v)); }

WGSL_FN u32 exchange_if(u32& p, u32 compare, u32 v) { return ::atomicCAS(&p, compare, v); }
WGSL_FN i32 exchange_if(i32& p, i32 compare, i32 v) { return ::atomicCAS(&p, compare, v); }
WGSL_FN u64 exchange_if(u64& p, u64 compare, u64 v) { return ::atomicCAS(&p, compare, v); }
WGSL_FN i64 exchange_if(i64& p, i64 compare, i64 v) {
    return i64(::atomicCAS(reinterpret_cast<u64*>(&p), u64(compare), u64(v)));
}
WGSL_FN f32 exchange_if(f32& p, f32 compare, f32 v) {
    return __uint_as_float(::atomicCAS(reinterpret_cast<u32*>(&p), __float_as_uint(compare), __float_as_uint(v)));
}
// R is the result struct that naga declares.
template <class R, class T> WGSL_FN R atomicCompareExchangeWeak(T& p, T compare, T v) {
    R r;
    r.m_old_value = exchange_if(p, compare, v);
    r.m_exchanged = r.m_old_value == compare;
    return r;
}

} // namespace wgsl
