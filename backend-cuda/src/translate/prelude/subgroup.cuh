// Subgroups are warps. `mask` has the lanes that take part: all of the warp's in convergent code, else those
// of __activemask().
namespace wgsl {

const u32 FULL = 0xffffffffu;

// Types that one shuffle moves; f16 and 16-bit integers travel as 32 bits.
template <class T> WGSL_FN T lane_read(u32 mask, T x, u32 lane) { return __shfl_sync(mask, x, i32(lane)); }
WGSL_FN f16 lane_read(u32 mask, f16 x, u32 lane) { return f16{u16(__shfl_sync(mask, u32(x.bits), i32(lane)))}; }
WGSL_FN u16 lane_read(u32 mask, u16 x, u32 lane) { return u16(__shfl_sync(mask, u32(x), i32(lane))); }
WGSL_FN i16 lane_read(u32 mask, i16 x, u32 lane) { return i16(__shfl_sync(mask, i32(x), i32(lane))); }
WGSL_FN bool lane_read(u32 mask, bool x, u32 lane) { return __shfl_sync(mask, u32(x), i32(lane)) != 0; }
template <class T, u32 N> WGSL_FN vec<T, N> lane_read(u32 mask, const vec<T, N>& v, u32 lane) {
    return map([mask, lane](T x) { return lane_read(mask, x, lane); }, v);
}
WGSL_FN u32 lane_id() { u32 r; asm("mov.u32 %0, %%laneid;" : "=r"(r)); return r; }

template <class T> WGSL_FN T subgroupShuffle(u32 mask, const T& x, u32 lane) { return lane_read(mask, x, lane); }
template <class T> WGSL_FN T subgroupBroadcast(u32 mask, const T& x, u32 lane) { return lane_read(mask, x, lane); }
template <class T> WGSL_FN T subgroupBroadcastFirst(u32 mask, const T& x) {
    return lane_read(mask, x, u32(__ffs(mask)) - 1u);
}
template <class T> WGSL_FN T subgroupShuffleDown(u32 mask, const T& x, u32 delta) {
    return lane_read(mask, x, lane_id() + delta);
}
template <class T> WGSL_FN T subgroupShuffleUp(u32 mask, const T& x, u32 delta) {
    return lane_read(mask, x, lane_id() - delta);
}
template <class T> WGSL_FN T subgroupShuffleXor(u32 mask, const T& x, u32 bits) {
    return lane_read(mask, x, lane_id() ^ bits);
}
template <class T> WGSL_FN T quadBroadcast(u32 mask, const T& x, u32 id) {
    return lane_read(mask, x, (lane_id() & ~3u) | (id & 3u));
}
WGSL_FN vec<u32, 4> subgroupBallot(u32 mask, bool p) { return {__ballot_sync(mask, p), 0u, 0u, 0u}; }
WGSL_FN bool subgroupAll(u32 mask, bool p) { return __all_sync(mask, p); }
WGSL_FN bool subgroupAny(u32 mask, bool p) { return __any_sync(mask, p); }

struct op_add { template <class T> static WGSL_FN T of(T a, T b) { return add(a, b); } };
struct op_mul { template <class T> static WGSL_FN T of(T a, T b) { return mul(a, b); } };
struct op_min { template <class T> static WGSL_FN T of(T a, T b) { return min(a, b); } };
struct op_max { template <class T> static WGSL_FN T of(T a, T b) { return max(a, b); } };
struct op_and { template <class T> static WGSL_FN T of(T a, T b) { return bit_and(a, b); } };
struct op_or { template <class T> static WGSL_FN T of(T a, T b) { return bit_or(a, b); } };
struct op_xor { template <class T> static WGSL_FN T of(T a, T b) { return bit_xor(a, b); } };

// A butterfly if all lanes of the warp are in `mask`; else one lane after the other, so that no inactive lane is read.
template <class O, class T> WGSL_FN T reduce_lanes(u32 mask, T x) {
    if (mask == FULL) {
        for (u32 d = 16; d > 0; d >>= 1) x = O::of(x, lane_read(mask, x, lane_id() ^ d));
        return x;
    }
    u32 remaining = mask & (mask - 1u);
    T r = lane_read(mask, x, u32(__ffs(mask)) - 1u);
    for (; remaining != 0; remaining &= remaining - 1u) r = O::of(r, lane_read(mask, x, u32(__ffs(remaining)) - 1u));
    return r;
}
#if __CUDA_ARCH__ >= 800
#define WGSL_REDUCE(OP, CALL, T) \
    template <> WGSL_FN T reduce_lanes<OP, T>(u32 mask, T x) { return T(CALL(mask, x)); }
WGSL_REDUCE(op_add, __reduce_add_sync, u32)
WGSL_REDUCE(op_add, __reduce_add_sync, i32)
WGSL_REDUCE(op_min, __reduce_min_sync, u32)
WGSL_REDUCE(op_min, __reduce_min_sync, i32)
WGSL_REDUCE(op_max, __reduce_max_sync, u32)
WGSL_REDUCE(op_max, __reduce_max_sync, i32)
WGSL_REDUCE(op_and, __reduce_and_sync, u32)
WGSL_REDUCE(op_or, __reduce_or_sync, u32)
WGSL_REDUCE(op_xor, __reduce_xor_sync, u32)
#endif
template <class O, class T> WGSL_FN T scan_lanes(u32 mask, T x) {
    u32 lane = lane_id();
    if (mask == FULL) {
        for (u32 d = 1; d < 32; d <<= 1) {
            T y = lane_read(mask, x, lane - d);
            if (lane >= d) x = O::of(y, x);
        }
        return x;
    }
    T r = x;
    bool started = false;
    for (u32 remaining = mask; remaining != 0; remaining &= remaining - 1u) {
        u32 from = u32(__ffs(remaining)) - 1u;
        T y = lane_read(mask, x, from);
        if (from <= lane) {
            r = started ? O::of(r, y) : y;
            started = true;
        }
    }
    return r;
}
// The inclusive scan of the previous lane, found by its bit in the mask; the first lane gets the identity.
template <class O, class T> WGSL_FN T exclusive_lanes(u32 mask, T x, T identity) {
    T r = scan_lanes<O>(mask, x);
    u32 below = mask & ((1u << lane_id()) - 1u);
    T y = lane_read(mask, r, below == 0 ? lane_id() : 31u - u32(__clz(below)));
    return below == 0 ? identity : y;
}
template <class O, class T> WGSL_FN T subgroupReduce(u32 mask, T x) { return reduce_lanes<O, T>(mask, x); }
template <class O, class T, u32 N> WGSL_FN vec<T, N> subgroupReduce(u32 mask, const vec<T, N>& v) {
    return map([mask](T x) { return reduce_lanes<O, T>(mask, x); }, v);
}
template <class O, class T> WGSL_FN T subgroupInclusive(u32 mask, T x) { return scan_lanes<O>(mask, x); }
template <class O, class T, u32 N> WGSL_FN vec<T, N> subgroupInclusive(u32 mask, const vec<T, N>& v) {
    return map([mask](T x) { return scan_lanes<O>(mask, x); }, v);
}
template <class O, class T> WGSL_FN T subgroupExclusive(u32 mask, T x, i32 identity) {
    return exclusive_lanes<O>(mask, x, cast<T>(identity));
}
template <class O, class T, u32 N> WGSL_FN vec<T, N> subgroupExclusive(u32 mask, const vec<T, N>& v, i32 identity) {
    return map([mask, identity](T x) { return exclusive_lanes<O>(mask, x, cast<T>(identity)); }, v);
}

} // namespace wgsl
