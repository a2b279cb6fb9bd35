// c = a · b for batches of matrices of 16-bit floats, most of them small, with sums in f32. Memory bounds these
// products: a block has one tile of c, and several blocks of a multiprocessor load while others multiply.
//
// Batches have up to three dimensions, with strides of their own in each operand. A stride of 0 repeats a matrix of
// a or b. A dimension without a stride in c is summed: its matrices are further terms of the same sums.
//
// Defined before:
// - BF16: 1, or 0 for f16. OUT_F32: 1 if c is f32, 0 if it has the type of a and b.
// - ROWS x COLS: a block's tile of c. DEPTH: terms of its sums in one stage.
// - WARPS_M x WARPS_N: warps that split the tile. WARPS_K: groups of warps that split the sums.
// - STAGES: stages in shared memory. One stage is for sums that fit it.
// - A_MN_MAJOR, B_MN_MAJOR: 1 if a (or b) has neighbours along rows of c (or columns), 0 along terms of the sum.
// - SUMS: 1 if dimensions of the batch are summed.
// tma_pipeline.cuh and packed_halves.cuh precede this file.

#define THREADS (WARPS_M * WARPS_N * WARPS_K * 32)
#define WARP_ROWS (ROWS / WARPS_M)
#define WARP_COLS (COLS / WARPS_N)
// Stages that are loaded ahead.
#define AHEAD (STAGES > 1 ? STAGES - 1 : 1)

// A tile of an operand has lines of elements that are neighbours in memory. A line has 16 bytes more, so that the same
// part of eight lines is in different banks.
#define LINE_BYTES(length) ((length) * 2 + 16)
#define A_LINES (A_MN_MAJOR ? DEPTH : ROWS)
#define A_LENGTH (A_MN_MAJOR ? ROWS : DEPTH)
#define B_LINES (B_MN_MAJOR ? DEPTH : COLS)
#define B_LENGTH (B_MN_MAJOR ? COLS : DEPTH)
#define A_BYTES (A_LINES * LINE_BYTES(A_LENGTH))
#define STAGE_BYTES (A_BYTES + B_LINES * LINE_BYTES(B_LENGTH))
// Elements between rows of the sums in shared memory: the stores of a warp are in different banks.
#define SUM_PITCH (COLS + 8)

struct Params {
    const u16 *a, *b;
    void* c;
    // Elements between lines of a and b, and between rows of c.
    i64 a_line, b_line, c_line;
    // Strides of the batch dimensions.
    i64 a_batch[3], b_batch[3], c_batch[3];
    int m, n, k;
    // Extents of the dimensions that c has, and of those that are summed. The others are 1.
    int batch[3], terms[3];
    int tiles_m, tiles_n;
    // 1 to add to c.
    int accumulate;
};

// Starts to load a tile. Elements outside of the matrix, beyond `lines` or `length`, become zero.
template <int LINES, int LENGTH> INLINE void load_tile(u32 to, const u16* from, i64 stride, int lines, int length) {
    constexpr int PARTS = LENGTH / 8, COUNT = LINES * PARTS;
#pragma unroll
    for (int i = 0; i < COUNT; i += THREADS) {
        const int at = i + threadIdx.x;
        if (COUNT % THREADS != 0 && at >= COUNT) break;
        const int line = at / PARTS, part = at % PARTS;
        const int bytes = line < lines ? min(max(length - part * 8, 0), 8) * 2 : 0;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     ::"r"(to + line * LINE_BYTES(LENGTH) + part * 16),
                     "l"(from + (bytes > 0 ? line * stride + part * 8 : 0)), "r"(bytes) : "memory");
    }
}

INLINE void ldmatrix(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
INLINE void ldmatrix_trans(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// Reads 16 rows of a, from `row` on, and 16 terms, from 16 · `k` on.
INLINE void load_a(u32 (&r)[4], u32 tile, int row, int k) {
    const int lane = threadIdx.x % 32;
#if A_MN_MAJOR
    const int line = k * 16 + lane / 16 * 8 + lane % 8;
    ldmatrix_trans(r, tile + line * LINE_BYTES(A_LENGTH) + row * 2 + lane / 8 % 2 * 16);
#else
    ldmatrix(r, tile + (row + lane % 16) * LINE_BYTES(A_LENGTH) + k * 32 + lane / 16 * 16);
#endif
}
// Reads 16 columns of b, from `col` on, and 16 terms, from 16 · `k` on: two fragments of 8 columns.
INLINE void load_b(u32 (&r)[4], u32 tile, int col, int k) {
    const int lane = threadIdx.x % 32;
#if B_MN_MAJOR
    const int line = k * 16 + lane / 8 % 2 * 8 + lane % 8;
    ldmatrix_trans(r, tile + line * LINE_BYTES(B_LENGTH) + col * 2 + lane / 16 * 16);
#else
    const int line = col + lane / 16 * 8 + lane % 8;
    ldmatrix(r, tile + line * LINE_BYTES(B_LENGTH) + k * 32 + lane / 8 % 2 * 16);
#endif
}
INLINE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Position of matrix `i` of a batch in an operand.
INLINE i64 batch_offset(int i, const int (&extents)[3], const i64 (&strides)[3]) {
    const int last = i % extents[2], others = i / extents[2];
    return last * strides[2] + others % extents[1] * strides[1] + others / extents[1] * strides[0];
}

#if OUT_F32
typedef float Element;
#define WIDTH 4
#else
typedef u16 Element;
#define WIDTH 8
#endif

// Stores `count` neighbours, at most WIDTH, and first adds the elements that are there if `accumulate` is true.
INLINE void store(Element* to, float (&v)[WIDTH], int count, bool accumulate) {
    if (count >= WIDTH && (reinterpret_cast<u64>(to) & 15) == 0) {
#if OUT_F32
        float4* vector = reinterpret_cast<float4*>(to);
        if (accumulate) {
            const float4 old = *vector;
            v[0] += old.x, v[1] += old.y, v[2] += old.z, v[3] += old.w;
        }
        *vector = make_float4(v[0], v[1], v[2], v[3]);
#else
        uint4* vector = reinterpret_cast<uint4*>(to);
        if (accumulate) {
            const uint4 old = *vector;
            v[0] += low_half(old.x), v[1] += high_half(old.x), v[2] += low_half(old.y), v[3] += high_half(old.y);
            v[4] += low_half(old.z), v[5] += high_half(old.z), v[6] += low_half(old.w), v[7] += high_half(old.w);
        }
        *vector = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
#endif
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            if (i >= count) break;
#if OUT_F32
            to[i] = accumulate ? v[i] + to[i] : v[i];
#else
            to[i] = static_cast<u16>(pack(accumulate ? v[i] + low_half(to[i]) : v[i], 0));
#endif
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) batched_matmul(const __grid_constant__ Params p) {
    PDL_WAIT();
    extern __shared__ __align__(16) unsigned char memory[];
    const u32 base = static_cast<u32>(__cvta_generic_to_shared(memory));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp / WARPS_N % WARPS_M * WARP_ROWS, warp_col = warp % WARPS_N * WARP_COLS;
    const int slice = warp / (WARPS_M * WARPS_N);
    const int tile = blockIdx.x % (p.tiles_m * p.tiles_n), item = blockIdx.x / (p.tiles_m * p.tiles_n);
    const int row0 = tile / p.tiles_n * ROWS, col0 = tile % p.tiles_n * COLS;
    const int rows = p.m - row0, cols = p.n - col0;
    const u16* a = p.a + batch_offset(item, p.batch, p.a_batch) + row0 * (A_MN_MAJOR ? 1 : p.a_line);
    const u16* b = p.b + batch_offset(item, p.batch, p.b_batch) + col0 * (B_MN_MAJOR ? 1 : p.b_line);

    // Stages of one matrix, then those of the next that is summed.
    const int stages = (p.k + DEPTH - 1) / DEPTH;
#if SUMS
    const int steps = stages * p.terms[0] * p.terms[1] * p.terms[2];
#else
    const int steps = stages;
#endif
    auto load = [&](int step) {
#if SUMS
        const int k = step % stages * DEPTH;
        const u16* from_a = a + batch_offset(step / stages, p.terms, p.a_batch);
        const u16* from_b = b + batch_offset(step / stages, p.terms, p.b_batch);
#else
        const int k = step * DEPTH;
        const u16 *from_a = a, *from_b = b;
#endif
        from_a += k * (A_MN_MAJOR ? p.a_line : 1);
        from_b += k * (B_MN_MAJOR ? p.b_line : 1);
        const u32 to = base + step % STAGES * STAGE_BYTES;
        const int terms = p.k - k;
        load_tile<A_LINES, A_LENGTH>(to, from_a, p.a_line, A_MN_MAJOR ? terms : rows, A_MN_MAJOR ? rows : terms);
        load_tile<B_LINES, B_LENGTH>(to + A_BYTES, from_b, p.b_line, B_MN_MAJOR ? terms : cols,
            B_MN_MAJOR ? cols : terms);
    };
    // A group of loads for each step, empty after the last.
    auto load_group = [&](int step) {
        if (step < steps) load(step);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int step = 0; step < AHEAD; step++) load_group(step);
    float sum[WARP_ROWS / 16][WARP_COLS / 8][4] = {};
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
        // All warps have read the stage before, which is loaded next.
        __syncthreads();
        if (STAGES > 1) load_group(step + AHEAD);
        const u32 tile_a = base + step % STAGES * STAGE_BYTES, tile_b = tile_a + A_BYTES;
#pragma unroll
        for (int i = 0; i < DEPTH / 16 / WARPS_K; i++) {
            const int k = i * WARPS_K + slice;
            u32 x[WARP_ROWS / 16][4];
#pragma unroll
            for (int r = 0; r < WARP_ROWS / 16; r++) load_a(x[r], tile_a, warp_row + r * 16, k);
#pragma unroll
            for (int s = 0; s < WARP_COLS / 16; s++) {
                u32 y[4];
                load_b(y, tile_b, warp_col + s * 16, k);
#pragma unroll
                for (int r = 0; r < WARP_ROWS / 16; r++) {
                    multiply(sum[r][2 * s], x[r], y[0], y[1]);
                    multiply(sum[r][2 * s + 1], x[r], y[2], y[3]);
                }
            }
        }
    }

    // The sums of all slices take the place of the stages. Threads then add and store neighbours.
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int r = 0; r < WARP_ROWS / 16; r++)
#pragma unroll
        for (int s = 0; s < WARP_COLS / 8; s++) {
            const int row = slice * ROWS + warp_row + r * 16 + lane / 4, col = warp_col + s * 8 + lane % 4 * 2;
            float2* to = reinterpret_cast<float2*>(sums + row * SUM_PITCH + col);
            to[0] = make_float2(sum[r][s][0], sum[r][s][1]);
            to[8 * SUM_PITCH / 2] = make_float2(sum[r][s][2], sum[r][s][3]);
        }
    __syncthreads();
    Element* c = static_cast<Element*>(p.c) + batch_offset(item, p.batch, p.c_batch) + row0 * p.c_line + col0;
#pragma unroll
    for (int i = 0; i < ROWS * COLS / WIDTH; i += THREADS) {
        const int at = i + threadIdx.x, row = at / (COLS / WIDTH), col = at % (COLS / WIDTH) * WIDTH;
        if (ROWS * COLS / WIDTH % THREADS != 0 && at >= ROWS * COLS / WIDTH) break;
        if (row >= rows || col >= cols) continue;
        float v[WIDTH] = {};
#pragma unroll
        for (int k = 0; k < WARPS_K; k++)
#pragma unroll
            for (int j = 0; j < WIDTH; j += 4) {
                const float4 part =
                    *reinterpret_cast<const float4*>(sums + (k * ROWS + row) * SUM_PITCH + col + j);
                v[j] += part.x, v[j + 1] += part.y, v[j + 2] += part.z, v[j + 3] += part.w;
            }
        store(c + row * p.c_line + col, v, cols - col, p.accumulate);
    }
}
