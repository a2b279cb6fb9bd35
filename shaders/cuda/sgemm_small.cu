// c = a · b (+ bias) of f32 matrices, for products too small to fill a device with one block for each tile.
// The blocks of a cluster split the sums of one tile (split-K), and so do slices of threads in a block
// (slice-K). Partial sums are added in shared memory, in a fixed order.
//
// Definitions:
// - ROWS x COLS: a block's tile of c. THREAD_ROWS x THREAD_COLS: a thread's part of it.
// - K_SLICES: slices of threads. CLUSTER_BLOCKS: blocks of a cluster.
// - A_MN_MAJOR and B_MN_MAJOR: 1 if a (or b) is MN-major, 0 if it is K-major.
// - BIAS: 1 to add one value to each column. ROW_SUMS: 1 to write the sums of a's rows too (needs A_MN_MAJOR).
// - DEPTH: 32, elements along K of a stage, which TMA loads. STAGES: number of stages.
// tma_pipeline.cuh precedes this file.
//
// In K-major operands, a row's 128 bytes of a stage are contiguous. Their eight 16-byte parts are swizzled by
// the row's last three bits, so that eight rows are read at once.

#define THREADS_M (ROWS / THREAD_ROWS)
#define THREADS_N (COLS / THREAD_COLS)
#define THREADS (THREADS_M * THREADS_N * K_SLICES)
#define SIZE_A (ROWS * DEPTH)
#define SIZE_B (COLS * DEPTH)
#define PITCH (COLS + 4)

struct Params {
    // [batch][rows or columns][K] or [batch][K][rows or columns], in boxes of a stage.
    Map a, b;
    const float* bias;
    float *c, *sums;
    // Strides of c between rows and between matrices of the batch, in elements.
    i64 row_stride, batch_stride;
    int m, n, k, tiles_n;
    float beta;
    int unused;
};

INLINE float4 load_shared(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at));
    return v;
}
// Reads from the shared memory of another block of the cluster.
INLINE float4 load_cluster_shared(int block, u32 at) {
#if CLUSTER_BLOCKS > 1
    float4 v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(at), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at));
    return v;
#else
    return load_shared(at);
#endif
}
INLINE float component(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Row (or column) of a tile that is a thread's i-th: neighbours in shared memory are read together.
template <int MN_MAJOR, int THREAD_COUNT> INLINE int tile_index(int thread, int i) {
    return MN_MAJOR ? thread * 4 + i / 4 * (THREAD_COUNT * 4) + i % 4 : thread + i * THREAD_COUNT;
}

// Reads four elements along K, from k on, of each of a thread's rows (or columns): [line][k].
template <int TILE_EXTENT, int MN_MAJOR, int THREAD_COUNT, int COUNT>
INLINE void load_fragment(float (&to)[COUNT][4], u32 tile, int thread, int k) {
    if (MN_MAJOR) {
        const u32 at = tile + (k * TILE_EXTENT + thread * 4) * 4;
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 4) {
                const float4 v = load_shared(at + (j * TILE_EXTENT + tile_index<1, THREAD_COUNT>(0, i)) * 4);
                to[i][j] = v.x, to[i + 1][j] = v.y, to[i + 2][j] = v.z, to[i + 3][j] = v.w;
            }
        }
    } else {
        // Rows a multiple of eight apart have the same swizzle.
        const u32 at = tile + thread * (DEPTH * 4), same = at + ((k / 4 ^ thread) & 7) * 16;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const u32 other = at + ((k / 4 ^ (thread + i * THREAD_COUNT)) & 7) * 16;
            const float4 v = load_shared((THREAD_COUNT % 8 == 0 ? same : other) + i * (THREAD_COUNT * DEPTH * 4));
            to[i][0] = v.x, to[i][1] = v.y, to[i][2] = v.z, to[i][3] = v.w;
        }
    }
}

INLINE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
#if CLUSTER_BLOCKS > 1
    __cluster_dims__(CLUSTER_BLOCKS, 1, 1)
#endif
    sgemm_small(const __grid_constant__ Params p) {
    PDL_WAIT();
    // Tiles begin at multiples of 1024 bytes, after the barriers.
    extern __shared__ __align__(1024) float shared[];
    float* memory = shared + 256;
    const u32 base = static_cast<u32>(__cvta_generic_to_shared(memory)), barriers = base - 1024;
    const int tile = blockIdx.x / CLUSTER_BLOCKS, rank = blockIdx.x % CLUSTER_BLOCKS;
    const int row0 = tile / p.tiles_n * ROWS, col0 = tile % p.tiles_n * COLS;
    const int rows = p.m - row0, cols = p.n - col0;
    // This block's part of the sum, in stages.
    const int all = (p.k + DEPTH - 1) / DEPTH, first = all * rank / CLUSTER_BLOCKS,
        steps = all * (rank + 1) / CLUSTER_BLOCKS - first;
    const int slice = threadIdx.x / (THREADS_M * THREADS_N), thread_in_slice = threadIdx.x % (THREADS_M * THREADS_N);
    // A warp has 4 x 8 threads of a tile, which minimises its reads of shared memory.
    const int warp = thread_in_slice / 32, lane = thread_in_slice % 32;
    const int thread_row = warp / (THREADS_N / 4) * 8 + lane / 4, thread_col = warp % (THREADS_N / 4) * 4 + lane % 4;

    // Two barriers for each stage: the stage is full; all warps have read the stage.
    auto full = [&](int step) { return barriers + step % STAGES * 16; };
    auto empty = [&](int step) { return barriers + step % STAGES * 16 + 8; };
    if (threadIdx.x == 0) {
        for (int t = 0; t < STAGES; t++) {
            init_barrier(full(t), 1);
            init_barrier(empty(t), THREADS / 32);
        }
        fence_barrier_init();
    }
    __syncthreads();
    float sum[THREAD_ROWS][THREAD_COLS] = {};
#if ROW_SUMS
    float row_sum = 0;
#endif
    if (threadIdx.x == THREADS) {
        // One thread of the last warp issues the loads; this warp computes no part of the tile.
        for (int step = 0; step < steps; step++) {
            const int k = (first + step) * DEPTH;
            const u32 to = base + step % STAGES * ((SIZE_A + SIZE_B) * 4);
            if (step >= STAGES) wait_barrier(empty(step), step / STAGES - 1 & 1);
            expect_tx(full(step), (SIZE_A + SIZE_B) * 4);
            load_box(to, p.a, A_MN_MAJOR ? row0 : k, A_MN_MAJOR ? k : row0, blockIdx.y, full(step));
            load_box(to + SIZE_A * 4, p.b, B_MN_MAJOR ? col0 : k, B_MN_MAJOR ? k : col0, blockIdx.y, full(step));
        }
    } else if (threadIdx.x < THREADS) {
        for (int step = 0; step < steps; step++) {
            wait_barrier(full(step), step / STAGES & 1);
            const u32 tile_a = base + step % STAGES * ((SIZE_A + SIZE_B) * 4), tile_b = tile_a + SIZE_A * 4;
#if ROW_SUMS
            if (col0 == 0) {
                constexpr int threads = THREADS / ROWS;
                const int row = threadIdx.x % ROWS, k0 = threadIdx.x / ROWS * (DEPTH / threads);
#pragma unroll
                for (int k = k0; k < k0 + DEPTH / threads; k++)
                    row_sum += memory[step % STAGES * (SIZE_A + SIZE_B) + k * ROWS + row];
            }
#endif
#pragma unroll
            for (int k = 0; k < DEPTH / K_SLICES; k += 4) {
                float x[THREAD_ROWS][4], y[THREAD_COLS][4];
                load_fragment<ROWS, A_MN_MAJOR, THREADS_M>(x, tile_a, thread_row, slice * (DEPTH / K_SLICES) + k);
                load_fragment<COLS, B_MN_MAJOR, THREADS_N>(y, tile_b, thread_col, slice * (DEPTH / K_SLICES) + k);
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int r = 0; r < THREAD_ROWS; r++)
#pragma unroll
                        for (int s = 0; s < THREAD_COLS; s++) sum[r][s] = fmaf(x[r][j], y[s][j], sum[r][s]);
            }
            // TMA is another proxy: without a fence, its next loads may overtake reads that are still in
            // progress.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive_barrier(empty(step));
        }
    }
    __syncthreads();

    // Stores the slices' sums, one after the other in shared memory.
    if (threadIdx.x < THREADS) {
        float* slice_sums = memory + slice * (ROWS * PITCH);
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; r++)
#pragma unroll
            for (int s = 0; s < THREAD_COLS; s += (B_MN_MAJOR ? 4 : 1)) {
                float* to = slice_sums + tile_index<A_MN_MAJOR, THREADS_M>(thread_row, r) * PITCH
                    + tile_index<B_MN_MAJOR, THREADS_N>(thread_col, s);
                if (B_MN_MAJOR)
                    *reinterpret_cast<float4*>(to) =
                        make_float4(sum[r][s], sum[r][s + 1], sum[r][s + 2], sum[r][s + 3]);
                else *to = sum[r][s];
            }
    }
#if ROW_SUMS
    if (col0 == 0 && threadIdx.x < THREADS) memory[K_SLICES * ROWS * PITCH + threadIdx.x] = row_sum;
#endif
#if CLUSTER_BLOCKS > 1
    cluster_barrier();
#else
    __syncthreads();
#endif
    // Adds four sums over `parts` parts, `step` apart in the memory of each block of the cluster.
    auto sum_parts = [&](int at, int parts, int step) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int block = 0; block < CLUSTER_BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < parts; i++) {
                const float4 v = load_cluster_shared(block, base + (at + i * step) * 4);
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
        return sum;
    };
    // Each block of the cluster finishes some rows.
    constexpr int part_rows = ROWS / CLUSTER_BLOCKS, quads = COLS / 4;
    float* c = p.c + blockIdx.y * p.batch_stride;
#pragma unroll
    for (int at = threadIdx.x; at < part_rows * quads; at += THREADS + 32) {
        const int row = rank * part_rows + at / quads, col = at % quads * 4;
        float4 v = sum_parts(row * PITCH + col, K_SLICES, ROWS * PITCH);
        if (row >= rows) continue;
        float* to = c + (row0 + row) * p.row_stride + col0 + col;
#if BIAS
        const float* bias = p.bias + col0 + col;
        v.x += col < cols ? bias[0] : 0, v.y += col + 1 < cols ? bias[1] : 0;
        v.z += col + 2 < cols ? bias[2] : 0, v.w += col + 3 < cols ? bias[3] : 0;
#endif
        if (col + 4 <= cols && (reinterpret_cast<u64>(to) & 15) == 0) {
            float4* quad = reinterpret_cast<float4*>(to);
            if (p.beta != 0) {
                const float4 old = *quad;
                v.x = fmaf(p.beta, old.x, v.x), v.y = fmaf(p.beta, old.y, v.y);
                v.z = fmaf(p.beta, old.z, v.z), v.w = fmaf(p.beta, old.w, v.w);
            }
            *quad = v;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (col + i < cols) to[i] = p.beta != 0 ? fmaf(p.beta, to[i], component(v, i)) : component(v, i);
        }
    }
#if ROW_SUMS
    if (col0 == 0 && rank == 0 && threadIdx.x < ROWS / 4) {
        const int row = threadIdx.x * 4;
        const float4 v = sum_parts(K_SLICES * ROWS * PITCH + row, THREADS / ROWS, ROWS);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + i < rows) p.sums[row0 + row + i] = component(v, i);
    }
#endif
#if CLUSTER_BLOCKS > 1
    // Other blocks may still read this block's memory.
    cluster_barrier();
#endif
}
