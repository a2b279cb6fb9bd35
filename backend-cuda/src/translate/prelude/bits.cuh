// Builtin functions on the bits of integers.
namespace wgsl {

WGSL_FN u32 countOneBits(u32 x) { return __popc(x); }
WGSL_FN u64 countOneBits(u64 x) { return __popcll(x); }
WGSL_FN u32 countLeadingZeros(u32 x) { return __clz(x); }
WGSL_FN u64 countLeadingZeros(u64 x) { return __clzll(x); }
WGSL_FN u32 countTrailingZeros(u32 x) { return x == 0 ? 32u : u32(__ffs(x)) - 1u; }
WGSL_FN u64 countTrailingZeros(u64 x) { return x == 0 ? 64u : u64(__ffsll(x)) - 1u; }
WGSL_FN u32 reverseBits(u32 x) { return __brev(x); }
WGSL_FN u64 reverseBits(u64 x) { return __brevll(x); }
WGSL_FN u32 firstTrailingBit(u32 x) { return u32(__ffs(x)) - 1u; }
WGSL_FN u64 firstTrailingBit(u64 x) { return u64(i64(__ffsll(x)) - 1); }
WGSL_FN u32 firstLeadingBit(u32 x) { return 31u - u32(__clz(x)); }
WGSL_FN u64 firstLeadingBit(u64 x) { return u64(63 - i64(__clzll(x))); }
// For signed integers: the highest bit that differs from the sign.
WGSL_FN i32 firstLeadingBit(i32 x) { return i32(firstLeadingBit(u32(x < 0 ? ~x : x))); }
WGSL_FN i64 firstLeadingBit(i64 x) { return i64(firstLeadingBit(u64(x < 0 ? ~x : x))); }
#define WGSL_SIGNED_BITS(NAME)                                                         \
    WGSL_FN i32 NAME(i32 x) { return i32(NAME(u32(x))); }                              \
    WGSL_FN i64 NAME(i64 x) { return i64(NAME(u64(x))); }
WGSL_SIGNED_BITS(countOneBits)
WGSL_SIGNED_BITS(countLeadingZeros)
WGSL_SIGNED_BITS(countTrailingZeros)
WGSL_SIGNED_BITS(reverseBits)
WGSL_SIGNED_BITS(firstTrailingBit)
#define WGSL_BITS_EACH(NAME)                                                           \
    template <class T, u32 N> WGSL_FN vec<T, N> NAME(const vec<T, N>& a) {             \
        return map([](T x) { return NAME(x); }, a);                                    \
    }
WGSL_BITS_EACH(countOneBits)
WGSL_BITS_EACH(countLeadingZeros)
WGSL_BITS_EACH(countTrailingZeros)
WGSL_BITS_EACH(reverseBits)
WGSL_BITS_EACH(firstTrailingBit)
WGSL_BITS_EACH(firstLeadingBit)

// WGSL clamps offset and count to the width; shifts by the width itself are avoided.
WGSL_FN u32 field_offset(u32 o) { return o < 32u ? o : 32u; }
WGSL_FN u32 field_count(u32 o, u32 c) { return c < 32u - o ? c : 32u - o; }
WGSL_FN u32 extractBits(u32 x, u32 offset, u32 count) {
    u32 o = field_offset(offset), c = field_count(o, count);
    return c == 0 ? 0u : (x << (32u - o - c)) >> (32u - c);
}
WGSL_FN i32 extractBits(i32 x, u32 offset, u32 count) {
    u32 o = field_offset(offset), c = field_count(o, count);
    return c == 0 ? 0 : i32(u32(x) << (32u - o - c)) >> (32u - c);
}
WGSL_FN u32 insertBits(u32 x, u32 y, u32 offset, u32 count) {
    u32 o = field_offset(offset), c = field_count(o, count);
    if (c == 0) return x;
    u32 mask = (0xffffffffu >> (32u - c)) << o;
    return (x & ~mask) | ((y << o) & mask);
}
WGSL_FN i32 insertBits(i32 x, i32 y, u32 offset, u32 count) {
    return i32(insertBits(u32(x), u32(y), offset, count));
}
template <class T, u32 N> WGSL_FN vec<T, N> extractBits(const vec<T, N>& a, u32 offset, u32 count) {
    return map([offset, count](T x) { return extractBits(x, offset, count); }, a);
}
template <class T, u32 N>
WGSL_FN vec<T, N> insertBits(const vec<T, N>& a, const vec<T, N>& b, u32 offset, u32 count) {
    return map([offset, count](T x, T y) { return insertBits(x, y, offset, count); }, a, b);
}

} // namespace wgsl
