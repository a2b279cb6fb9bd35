// Cooperative matrices of 16 x 16 elements, in the layout of the PTX instruction mma.m16n8k16. Lane l of a warp
// holds the rows l / 4 and l / 4 + 8 of A and of the sums. Of B it holds the columns l / 4 and l / 4 + 8. Along the
// other dimension it holds the elements 2 (l % 4), the next one, and both again 8 elements later.
namespace wgsl {

struct operand_f16 {};
struct operand_bf16 {};

// Parts of 8 x 8 elements, two elements in a word. In A: (0, 0), (8, 0), (0, 8), (8, 8) as (row, k).
template <class E> struct coop_a { u32 part[4]; };
// In B: (0, 0), (8, 0), (0, 8), (8, 8) as (k, column).
template <class E> struct coop_b { u32 part[4]; };
// Sums: two neighbours of each part (0, 0), (8, 0), (0, 8), (8, 8) as (row, column).
struct coop_c { f32 sum[8]; };

WGSL_FN u32 coop_lane() { u32 r; asm("mov.u32 %0, %%laneid;" : "=r"(r)); return r; }

// Reads four parts from shared memory. Lanes 8 i to 8 i + 7 have the addresses of the lines of part i.
template <bool TRANSPOSED> WGSL_FN void load_parts(u32 (&part)[4], u32 address) {
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3]) : "r"(address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3]) : "r"(address) : "memory");
    }
}

// Loads an operand whose `lines` are the rows of A or the columns of B, and whose pairs are along k. IN_LINES: the
// elements of a line are neighbours in memory; otherwise, those of one k are. `stride` counts elements of type P.
template <bool IN_LINES, bool SHARED, u32 LINE_PARTS, class P>
WGSL_FN void load_operand(u32 (&part)[4], const P* from, u32 stride) {
    const u32 lane = coop_lane();
    const u32 pitch = stride * u32(sizeof(P)) / 2;
    // Lines are 16 bytes apart at least, as ldmatrix requires.
    if (SHARED && sizeof(P) == 16) {
        const u32 of = lane / 8, at = lane % 8;
        const u32 line = (LINE_PARTS == 1 ? of % 2 : of / 2) * 8, k = (LINE_PARTS == 1 ? of / 2 : of % 2) * 8;
        const u32 index = IN_LINES ? (line + at) * pitch + k : (k + at) * pitch + line;
        load_parts<!IN_LINES>(part, u32(__cvta_generic_to_shared(from)) + 2 * index);
        return;
    }
    const u16* elements = reinterpret_cast<const u16*>(from);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 line = lane / 4 + (LINE_PARTS == 1 ? i % 2 : i / 2) * 8;
        const u32 k = lane % 4 * 2 + (LINE_PARTS == 1 ? i / 2 : i % 2) * 8;
        const u32 first = IN_LINES ? line * pitch + k : k * pitch + line;
        part[i] = u32(elements[first]) | u32(elements[first + (IN_LINES ? 1 : pitch)]) << 16;
    }
}
template <class E, bool ROW_MAJOR, bool SHARED, class P> WGSL_FN coop_a<E> coop_load_a(const P* from, u32 stride) {
    coop_a<E> m;
    load_operand<ROW_MAJOR, SHARED, 1>(m.part, from, stride);
    return m;
}
template <class E, bool ROW_MAJOR, bool SHARED, class P> WGSL_FN coop_b<E> coop_load_b(const P* from, u32 stride) {
    coop_b<E> m;
    load_operand<!ROW_MAJOR, SHARED, 2>(m.part, from, stride);
    return m;
}

// Position of a lane's element i in memory.
template <bool ROW_MAJOR> WGSL_FN u32 sum_index(u32 lane, u32 i, u32 pitch) {
    const u32 row = lane / 4 + i / 2 % 2 * 8, col = lane % 4 * 2 + i % 2 + i / 4 * 8;
    return ROW_MAJOR ? row * pitch + col : col * pitch + row;
}
template <bool ROW_MAJOR, class P> WGSL_FN coop_c coop_load_c(const P* from, u32 stride) {
    coop_c m;
    const u32 lane = coop_lane();
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        m.sum[i] = reinterpret_cast<const f32*>(from)[sum_index<ROW_MAJOR>(lane, i, stride * u32(sizeof(P)) / 4)];
    }
    return m;
}
template <bool ROW_MAJOR, class P> WGSL_FN void coop_store_c(const coop_c& m, P* to, u32 stride) {
    const u32 lane = coop_lane();
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        reinterpret_cast<f32*>(to)[sum_index<ROW_MAJOR>(lane, i, stride * u32(sizeof(P)) / 4)] = m.sum[i];
    }
}

#define COOP_MMA(E, TYPE) \
    WGSL_FN void multiply_half(const coop_a<E>& a, u32 b0, u32 b1, f32* sum) { \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
            "{%8, %9}, {%0, %1, %2, %3};" \
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) \
            : "r"(a.part[0]), "r"(a.part[1]), "r"(a.part[2]), "r"(a.part[3]), "r"(b0), "r"(b1)); \
    }
COOP_MMA(operand_f16, "f16")
COOP_MMA(operand_bf16, "bf16")
#undef COOP_MMA

template <class E> WGSL_FN coop_c coop_multiply_add(const coop_a<E>& a, const coop_b<E>& b, coop_c c) {
    multiply_half(a, b.part[0], b.part[1], c.sum);
    multiply_half(a, b.part[2], b.part[3], c.sum + 4);
    return c;
}

#define COOP_ELEMENTS(NAME, OP) \
    WGSL_FN coop_c NAME(coop_c a, const coop_c& b) { \
        _Pragma("unroll") for (u32 i = 0; i < 8; i++) a.sum[i] = a.sum[i] OP b.sum[i]; \
        return a; \
    }
COOP_ELEMENTS(operator+, +)
COOP_ELEMENTS(operator-, -)
COOP_ELEMENTS(coop_product, *)
#undef COOP_ELEMENTS
WGSL_FN coop_c operator*(coop_c a, f32 b) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) a.sum[i] = a.sum[i] * b;
    return a;
}
WGSL_FN coop_c operator*(f32 a, const coop_c& b) { return b * a; }

} // namespace wgsl
