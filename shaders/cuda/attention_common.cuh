// Code shared by the attention kernels: tiles in shared memory, tensor core products, causal and window
// masks. attention_mask.cuh follows this file.
//
// Definitions:
// - HEAD: size of a head, a multiple of 8, at most 128. BF16: 1, or 0 for f16.
// - HOPPER: 1 for wgmma and TMA (sm_90a), else mma and cp.async (from sm_80 on).
// - For each kernel: WARPS, rows of its inner tiles (COLS), tiles in shared memory (STAGES), blocks on a
//   multiprocessor (BLOCKS).
// - ROWS16: fragments of 16 rows of a warp (1 with wgmma).
// - MASK: 0 for none, 1 for bool, 2 for f32, 3 for the element type. DROPOUT: 1 for dropout.
// - MASK_PAIRS: 1 if rows of the mask are contiguous pairs of elements, which are loaded at once.
// - MASK_STAGES: tiles of the mask in shared memory, which TMA loads; 0 if threads load the mask's elements.
// tma_pipeline.cuh and packed_halves.cuh precede this file.
//
// A tile is rows x HEAD elements in panels of 64 elements. A row of a panel has 128 bytes; its eight 16-byte
// parts are swizzled by the row's last three bits. No access has bank conflicts, and wgmma supports the
// layout as 128-byte swizzle.

#define DEPTH ((HEAD + 15) / 16 * 16)
#define PANELS ((DEPTH + 63) / 64)
#define THREADS (WARPS * 32)
#define ROWS (WARPS * 16 * ROWS16)
#define NEG_INFINITY __int_as_float(0xff800000)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

// Heads of rows of HEAD elements; strides in elements, multiples of 8.
struct Heads {
    u16* data;
    i64 batch, head;
    int row, unused;
};

struct Params {
    // Of [batch][heads][rows][HEAD], in boxes of 64 rows and 64 elements.
    Map q_map, k_map, v_map, grad_map;
    // Of [batch or 1][heads or 1][queries][keys], in boxes of 64 rows of 128 bytes.
    Map mask_map;
    Heads q, k, v, out, grad, dq, dk, dv;
    // [batch][heads][queries]: log-sum-exp of each query's scores.
    float* lse;
    // Log-sum-exp in the unit of `score_offset`, then the sum of grad · out of each query: scratch memory
    // between the passes.
    float* stats;
    // [batch][blocks of ROWS rows][heads of q, k and v][HEAD], or null: the sums of the gradients over a
    // block's rows.
    float* sums;
    int batch, heads, kv_heads, queries, keys;
    // Query i attends to keys i - left to i + right.
    int left, right;
    // Heads processed at a time, so that their shared operands stay in the cache.
    int group;
    float scale;
    // Of attention_bwd_one_pass.cu: groups of heads whose blocks iterate over tiles in ascending order.
    int ascending_groups;
#if MASK || DROPOUT
    // [batch][heads][queries][keys], with strides in elements.
    const void* mask;
    i64 mask_batch, mask_head;
    u32 mask_query, mask_key;
    // Philox offset and seed, as two words each.
    const uint4* random;
    // A weight is kept if its 16 bits are not below the threshold, and then multiplied by `dropout_scale`.
    u32 threshold;
    float dropout_scale;
#endif
};

INLINE u16* head_of(const Heads& h, int batch, int head) { return h.data + batch * h.batch + head * h.head; }

INLINE u32 shared_base(const void* memory) {
    return (static_cast<u32>(__cvta_generic_to_shared(memory)) + 1023) & ~1023u;
}

#define TILE_BYTES(rows) ((rows) * PANELS * 128)

// Address of part `part` (8 elements) of a row of a tile.
template <int TILE_ROWS> INLINE u32 tile_address(u32 tile, int row, int part) {
    return tile + (part >> 3) * (TILE_ROWS * 128) + row * 128 + (((part ^ row) & 7) << 4);
}

INLINE void copy_async(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
INLINE void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
INLINE void copy_async4(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
}
INLINE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> INLINE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Loads of the loop over tiles, in groups. Group `t` is one `begin_stage_loads` with all its rows, its
// `load_tile`s, and `commit_stage_loads`. `wait_stage_loads` waits for the group, and makes it visible to every
// thread and to wgmma. Rows after the last one, and elements beyond HEAD, become zero.
#if HOPPER
// One thread issues the TMA loads, whose bytes a barrier of each stage counts.
#define ISSUES_LOADS (__shfl_sync(0xffffffff, threadIdx.x >> 5, 0) == 0)
// A warp-uniform branch keeps addresses in uniform registers, as wgmma requires.
#define ELECT_ONE "{.reg .pred one; elect.sync _|one, 0xffffffff; @one "

struct TileSource {
    const Map* map;
    int head, batch;
};
INLINE TileSource tile_source(const Map& map, const Heads&, int batch, int head, int) { return {&map, head, batch}; }
INLINE void advance_head(TileSource& rows, const Heads&) { rows.head++; }

INLINE u32 stage_barrier(int t) {
    __shared__ u64 barriers[STAGES];
    return static_cast<u32>(__cvta_generic_to_shared(barriers)) + t % STAGES * 8;
}
INLINE void init_stages() {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int t = 0; t < STAGES; t++) init_barrier(stage_barrier(t), 1);
        fence_barrier_init();
    }
    __syncthreads();
}
// Announces tiles of `rows` rows in all, and `other` bytes.
INLINE void begin_stage_loads(int t, int rows, int other = 0) {
    asm volatile(ELECT_ONE "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;}"
                 ::"r"(stage_barrier(t)), "r"(TILE_BYTES(rows) + other) : "memory");
}
// Loads a box if `issues` is true. No branch may stand between the start of a product and the wait for it.
INLINE void load_stage_box_if(bool issues, u32 to, const Map* map, int x, int y, int z, int w, int t) {
    asm volatile("{.reg .pred one, issues; setp.ne.u32 issues, %7, 0; elect.sync _|one, 0xffffffff; "
                 "and.pred one, one, issues; "
                 "@one cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];}"
                 ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(stage_barrier(t)), "r"((u32)issues)
                 : "memory");
}
INLINE void load_stage_box(u32 to, const Map* map, int x, int y, int z, int w, int t) {
    asm volatile(ELECT_ONE "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];}"
                 ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(stage_barrier(t)) : "memory");
}
template <int TILE_ROWS> INLINE void load_tile(u32 tile, const TileSource& from, int first, int t) {
    static_assert(TILE_ROWS == 64 && HEAD == DEPTH, "boxes have 64 rows, and tiles no elements after HEAD");
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        load_stage_box(tile + panel * (TILE_ROWS * 128), from.map, panel * 64, first, from.head, from.batch, t);
}
INLINE void commit_stage_loads() {}
INLINE void wait_stage_loads(int t) {
    u32 done;
    do {
        asm volatile("{.reg .pred done; mbarrier.try_wait.parity.shared.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
                     : "=r"(done) : "r"(stage_barrier(t)), "r"(t / STAGES & 1) : "memory");
    } while (!__all_sync(0xffffffff, done));
    __syncthreads();
}
#else
#define ISSUES_LOADS true

struct TileSource {
    const u16* data;
    int stride, end;
};
INLINE TileSource tile_source(const Map&, const Heads& heads, int batch, int head, int count) {
    return {head_of(heads, batch, head), heads.row, count};
}
INLINE void advance_head(TileSource& rows, const Heads& heads) { rows.data += heads.head; }

INLINE void init_stages() {}
INLINE void begin_stage_loads(int, int, int = 0) {}
template <int TILE_ROWS> INLINE void load_tile(u32 tile, const TileSource& from, int first, int) {
    constexpr int PARTS = DEPTH / 8;
    if constexpr (THREADS % (8 * PARTS) == 0 && TILE_ROWS * PARTS % THREADS == 0) {
        // A thread's parts are a multiple of eight rows apart, so one address with a constant stride
        // suffices.
        constexpr int STEP = THREADS / PARTS;
        int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
        u32 to = tile_address<TILE_ROWS>(tile, row, part);
        const u16* at = from.data + (i64)(first + row) * from.stride + part * 8;
        // Most tiles are complete.
        if (HEAD == DEPTH && first + TILE_ROWS <= from.end) {
#pragma unroll
            for (int i = 0; i < TILE_ROWS / STEP; i++, at += STEP * from.stride) copy_async(to + i * (STEP * 128), at);
        } else {
            int valid_rows = part * 8 < HEAD ? from.end - first - row : 0;
#pragma unroll
            for (int i = 0; i < TILE_ROWS / STEP; i++, at += STEP * from.stride)
                copy_async(to + i * (STEP * 128), at, i * STEP < valid_rows);
        }
    } else {
#pragma unroll
        for (int i = 0; i < TILE_ROWS * PARTS; i += THREADS) {
            int at = i + threadIdx.x;
            if (TILE_ROWS * PARTS % THREADS != 0 && at >= TILE_ROWS * PARTS) break;
            int row = at / PARTS, part = at % PARTS;
            bool inside = first + row < from.end && part * 8 < HEAD;
            copy_async(tile_address<TILE_ROWS>(tile, row, part),
                from.data + (inside ? (i64)(first + row) * from.stride + part * 8 : 0), inside);
        }
    }
}
INLINE void commit_stage_loads() { cp_async_commit(); }
INLINE void wait_stage_loads(int) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
}
#endif

INLINE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
INLINE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
INLINE void ldmatrix_x4(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
INLINE void ldmatrix_x4_trans(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// Reads the 16 x 16 fragment of a tile for a warp's A operand: rows from `row`, elements from 16 · `k`.
template <int TILE_ROWS> INLINE void load_a_fragment(u32 (&a)[4], u32 tile, int row, int k) {
    int lane = threadIdx.x & 31;
    ldmatrix_x4(a, tile_address<TILE_ROWS>(tile, row + (lane & 15), 2 * k + (lane >> 4)));
}

// Accumulators of a warp: [ROWS16][columns / 8][4], in the layout of mma and wgmma. Rows lane / 4 and lane /
// 4 + 8 of each 16, columns 2 (lane % 4) and the next of each 8.
template <int N> struct Accumulators {
    float v[ROWS16][N / 8][4];
};
// Accumulators rounded to 16 bits: the A operand of a product over these columns.
template <int N> struct AFragments {
    u32 v[ROWS16][N / 16][4];
};

template <int N> INLINE void clear(Accumulators<N>& s) {
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s.v[m][n][i] = 0;
}

template <int N> INLINE void pack_fragments(AFragments<N>& h, const Accumulators<N>& s) {
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            h.v[m][n][0] = pack(s.v[m][2 * n][0], s.v[m][2 * n][1]);
            h.v[m][n][1] = pack(s.v[m][2 * n][2], s.v[m][2 * n][3]);
            h.v[m][n][2] = pack(s.v[m][2 * n + 1][0], s.v[m][2 * n + 1][1]);
            h.v[m][n][3] = pack(s.v[m][2 * n + 1][2], s.v[m][2 * n + 1][3]);
        }
}

// All A fragments of a warp's rows of a tile, in registers.
struct TileFragments {
    u32 v[ROWS16][DEPTH / 16][4];
};
template <int TILE_ROWS> INLINE void load_fragments(TileFragments& a, u32 tile, int row) {
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) load_a_fragment<TILE_ROWS>(a.v[m][k], tile, row + 16 * m, k);
}

#if HOPPER
INLINE void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> INLINE void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Keeps the compiler from moving uses of accumulators across a wait.
template <int N> INLINE void fence_accumulators(Accumulators<N>& s) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(s.v[0][n][i])::"memory");
}

#define F4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define F32 F4(0), F4(1), F4(2), F4(3), F4(4), F4(5), F4(6), F4(7)
#define R32                                                                             \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

// 64 x 64 accumulators += (or =) 64 x 16 of registers · 16 x 64 of shared memory. B is K-major: rows of shared
// memory are columns of the product.
template <bool ADD> INLINE void wgmma_rs(float (*d)[4], const u32 (&a)[4], u64 b) {
    asm volatile("{wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " R32
                 ", {%32, %33, %34, %35}, %36, %37, 1, 1, 0;}"
                 : F32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD ? 1 : 0));
}
// Adds a product whose B is MN-major: rows of shared memory are terms of the sum.
INLINE void wgmma_rs_mn_major(float (*d)[4], const u32 (&a)[4], u64 b) {
    asm volatile("{wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " R32
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;}"
                 : F32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <bool ADD> INLINE void wgmma_ss(float (*d)[4], u64 a, u64 b) {
    asm volatile("{wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " R32 ", %32, %33, %34, 1, 1, 0, 0;}"
                 : F32 : "l"(a), "l"(b), "n"(ADD ? 1 : 0));
}

// Computes s = a · bᵀ, with the rows of a in registers.
template <int TILE_ROWS, int N> INLINE void mma_abt(Accumulators<N>& s, const TileFragments& a, u32 b) {
#pragma unroll
    for (int n = 0; n < N; n += 64)
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            u64 b_descriptor =
                make_descriptor(descriptor_low_word(b, 16) + (k / 4) * (TILE_ROWS * 8) + n * 8 + (k % 4) * 2);
            if (k == 0) wgmma_rs<false>(&s.v[0][n / 8], a.v[0][k], b_descriptor);
            else wgmma_rs<true>(&s.v[0][n / 8], a.v[0][k], b_descriptor);
        }
}
// Computes s = a · bᵀ, with the rows of a from `row` on in a tile of A_ROWS rows.
template <int A_ROWS, int TILE_ROWS, int N> INLINE void mma_abt(Accumulators<N>& s, u32 a, int row, u32 b) {
    row = A_ROWS == 64 ? 0 : row & ~63;
#pragma unroll
    for (int n = 0; n < N; n += 64)
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            u64 a_descriptor =
                make_descriptor(descriptor_low_word(a, 16) + (k / 4) * (A_ROWS * 8) + row * 8 + (k % 4) * 2);
            u64 b_descriptor =
                make_descriptor(descriptor_low_word(b, 16) + (k / 4) * (TILE_ROWS * 8) + n * 8 + (k % 4) * 2);
            if (k == 0) wgmma_ss<false>(&s.v[0][n / 8], a_descriptor, b_descriptor);
            else wgmma_ss<true>(&s.v[0][n / 8], a_descriptor, b_descriptor);
        }
}
// Computes s += a · b.
template <int TILE_ROWS, int N> INLINE void mma_ab(Accumulators<DEPTH>& s, const AFragments<N>& a, u32 b) {
#pragma unroll
    for (int k = 0; k < N / 16; k++)
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            wgmma_rs_mn_major(&s.v[0][8 * panel], a.v[0][k],
                make_descriptor(descriptor_low_word(b, 16) + panel * (TILE_ROWS * 8) + k * 128));
}
#else
INLINE void mma_fence() {}
INLINE void mma_commit() {}
template <int N> INLINE void mma_wait() {}
template <int N> INLINE void fence_accumulators(Accumulators<N>&) {}

INLINE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int TILE_ROWS, int N> INLINE void mma_k_step(Accumulators<N>& s, const u32 (&a)[ROWS16][4], u32 b, int k) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
        u32 r[4];
        ldmatrix_x4(r, tile_address<TILE_ROWS>(b, 16 * n + (lane & 7) + (lane >> 4) * 8, 2 * k + ((lane >> 3) & 1)));
#pragma unroll
        for (int m = 0; m < ROWS16; m++) {
            mma(s.v[m][2 * n], a[m], r[0], r[1]);
            mma(s.v[m][2 * n + 1], a[m], r[2], r[3]);
        }
    }
}
template <int TILE_ROWS, int N> INLINE void mma_abt(Accumulators<N>& s, const TileFragments& a, u32 b) {
    clear(s);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        u32 fragments[ROWS16][4];
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) fragments[m][i] = a.v[m][k][i];
        mma_k_step<TILE_ROWS, N>(s, fragments, b, k);
    }
}
template <int A_ROWS, int TILE_ROWS, int N> INLINE void mma_abt(Accumulators<N>& s, u32 a, int row, u32 b) {
    clear(s);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        u32 fragments[ROWS16][4];
#pragma unroll
        for (int m = 0; m < ROWS16; m++) load_a_fragment<A_ROWS>(fragments[m], a, row + 16 * m, k);
        mma_k_step<TILE_ROWS, N>(s, fragments, b, k);
    }
}
template <int TILE_ROWS, int N> INLINE void mma_ab(Accumulators<DEPTH>& s, const AFragments<N>& a, u32 b) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < N / 16; k++)
#pragma unroll
        for (int n = 0; n < DEPTH / 16; n++) {
            u32 r[4];
            ldmatrix_x4_trans(r, tile_address<TILE_ROWS>(b, 16 * k + (lane & 15), 2 * n + (lane >> 4)));
#pragma unroll
            for (int m = 0; m < ROWS16; m++) {
                mma(s.v[m][2 * n], a.v[m][k], r[0], r[1]);
                mma(s.v[m][2 * n + 1], a.v[m][k], r[2], r[3]);
            }
        }
}
#endif

// Scales rows of accumulators by their factors, and stores them in 16 bits: through the warp's rows of a tile
// to memory.
template <int TILE_ROWS>
INLINE void store_tile(const Accumulators<DEPTH>& s, const float (&factor)[ROWS16][2], u32 tile, int row, u16* to,
                       int stride, int first, int end) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int n = 0; n < DEPTH / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 word = pack(s.v[m][n][2 * half] * factor[m][half], s.v[m][n][2 * half + 1] * factor[m][half]);
                u32 at = tile_address<TILE_ROWS>(tile, row + 16 * m + 8 * half + (lane >> 2), n) + (lane & 3) * 4;
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
            }
    __syncwarp();
    constexpr int PARTS = HEAD / 8;
    for (int at = lane; at < ROWS16 * 16 * PARTS; at += 32) {
        int r = at / PARTS, part = at % PARTS;
        if (first + r >= end) break;
        u32 a, b, c, d;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                     : "r"(tile_address<TILE_ROWS>(tile, row + r, part)) : "memory");
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to + (i64)(first + r) * stride + part * 8), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    }
}

// Writes the sums over the first `rows` rows of a tile that `store_tile` left in shared memory to `to`. `scratch`
// holds HEAD floats for each row of threads; no thread reads its old contents any more.
template <int TILE_ROWS> INLINE void store_row_sums(u32 tile, int rows, u32 scratch, float* to) {
    constexpr int WORDS = HEAD / 2, ROW_GROUPS = THREADS / WORDS;
    const int word = threadIdx.x % WORDS, group = threadIdx.x / WORDS;
    __syncthreads();
    if (group < ROW_GROUPS) {
        float low = 0, high = 0;
        for (int r = group; r < rows; r += ROW_GROUPS) {
            u32 pair;
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair)
                         : "r"(tile_address<TILE_ROWS>(tile, r, word >> 2) + (word & 3) * 4) : "memory");
            low += low_half(pair);
            high += high_half(pair);
        }
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
                     ::"r"(scratch + (group * HEAD + 2 * word) * 4), "f"(low), "f"(high) : "memory");
    }
    __syncthreads();
    if (threadIdx.x < HEAD) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < ROW_GROUPS; t++) {
            float part;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part) : "r"(scratch + (t * HEAD + threadIdx.x) * 4)
                         : "memory");
            sum += part;
        }
        to[threadIdx.x] = sum;
    }
}

// Unroll factor of loops over tiles. With wgmma, the addresses of stages become constants; kernels with mma lack
// the registers for that.
constexpr int UNROLLED_TILES = HOPPER ? STAGES : 1;

// For lambdas that are instantiated twice, such as for tiles at the mask's edge and for others. Without it, the
// compiler may call them; wgmma products allow no such branch between their start and the wait for them.
#define FORCE_INLINE __attribute__((always_inline))

// First row of this warp in its block's tile, and first row of its unit: a warpgroup with wgmma.
INLINE int warp_row() { return (threadIdx.x >> 5) * (16 * ROWS16); }
#if HOPPER
INLINE int unit_row() { return (threadIdx.x >> 7) * 64; }
#define UNIT_ROWS 64
#else
INLINE int unit_row() { return warp_row(); }
#define UNIT_ROWS (16 * ROWS16)
#endif

struct TileCoord {
    int batch, head, tile;
};

// Assigns a tile and a head to block `id`, the tiles with the most work of each group of heads first.
INLINE TileCoord assign_tile(u32 id, u32 heads, u32 batch, u32 tiles, u32 group, bool last_first) {
    u32 total = heads * batch, wave = id / (group * tiles), id_in_wave = id - wave * (group * tiles);
    u32 wave_heads = min(group, total - wave * group), tile = id_in_wave / wave_heads,
        head_index = wave * group + (id_in_wave - tile * wave_heads);
    u32 batch_index = head_index / heads;
    return {(int)batch_index, (int)(head_index - batch_index * heads), (int)(last_first ? tiles - 1 - tile : tile)};
}
// Saves the block's assignment in shared memory until the epilogue reads it, to free registers in the loop.
// Barriers separate the write from the reads.
INLINE void save_assignment(TileCoord& saved, const TileCoord& work) {
    if (threadIdx.x == 0) saved = work;
}

// Returns where a block writes its row sums for head `head`; heads of queries precede those of keys and values.
INLINE float* block_sums(const Params& p, int rows, const TileCoord& work, int head) {
    int blocks = (rows + ROWS - 1) / ROWS;
    return p.sums + ((i64)(work.batch * blocks + work.tile) * (p.heads + 2 * p.kv_heads) + head) * HEAD;
}

// Tiles of columns that some row of a block attends to, and the subrange for this unit's rows. Row i attends
// to columns i - left to i + right.
struct TileRange {
    int first, count, begin, end;
};
INLINE TileRange attended_tiles(int start, int rows, int columns, int left, int right) {
    int last = min(start + ROWS, rows) - 1, unit_start = start + unit_row(), unit_last = unit_start + UNIT_ROWS - 1;
    int first = max(start - left, 0) / COLS;
    int count = max((min(last + right + 1, columns) + COLS - 1) / COLS - first, 0);
    if (ROWS == UNIT_ROWS) return {first, count, 0, count};
    int begin = max(unit_start - left, 0) / COLS - first;
    int end = unit_start > last ? begin : min((min(unit_last + right + 1, columns) + COLS - 1) / COLS - first, count);
    return {first, count, begin, end};
}

// Masks the columns that a row does not attend to: below i - left, above i + right, and after the last. A
// thread has two rows of each 16; `half` selects one.
INLINE void mask_window(Accumulators<COLS>& s, int m, int half, int row, int column, int left, int right, int last) {
    // Relative to this thread's first column.
    int lane = threadIdx.x & 31, i = row + 16 * m + 8 * half + (lane >> 2), thread_column = column + 2 * (lane & 3);
    int low = i - left - thread_column, high = min(i + right, last) - thread_column;
#pragma unroll
    for (int n = 0; n < COLS / 8; n++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (8 * n + k < low || 8 * n + k > high) s.v[m][n][2 * half + k] = NEG_INFINITY;
}
INLINE void mask_window(Accumulators<COLS>& s, int row, int column, int left, int right, int last) {
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) mask_window(s, m, half, row, column, left, right, last);
}
