// Backward pass through a linear layer and the GELU before it, in one kernel: c = (a · b) times the derivative of
// gelu_tanh at x. The kernel also writes gelu_tanh(x), for the layer's weight gradient, and the column sums of c for
// each tile of rows, for the gradient of the bias before GELU.
//
// Warp specialisation (sm_90a): TMA loads stages of a and b, and two warpgroups multiply them by wgmma. The warpgroups
// write the sums of a tile to shared memory, rounded to the element type like those of a product, and continue with
// the next tile. Epilogue warps finish the tile: they have few registers and wait for memory. Barriers synchronise
// both the stages and the tile.
//
// Definitions: BF16, 1 or 0 (f16), and STAGES. tma_pipeline.cuh, packed_halves.cuh and wgmma.cuh precede this file.
// DEPTH is the number of elements along K in a stage. a is K-major and b is MN-major, in panels of 64 rows or columns
// of 128 bytes, with 128-byte swizzle.

#define ROWS 128
#define COLS 256
#define DEPTH 64
#define BYTES_A (ROWS * 128)
#define STAGE_BYTES ((ROWS + COLS) * 128)
#define PANEL_BYTES (DEPTH * 128)
// Rows of the output tile are padded by 16 bytes, against bank conflicts.
#define PITCH (COLS * 2 + 16)
#define MMA_WARPS 8
#define EPILOGUE_WARPS 7
#define THREADS ((MMA_WARPS + EPILOGUE_WARPS + 1) * 32)
// Rows that an epilogue warp finishes at a time, and the number of iterations.
#define ROWS_AT_ONCE 4
#define ITERATIONS ((ROWS + EPILOGUE_WARPS * ROWS_AT_ONCE - 1) / (EPILOGUE_WARPS * ROWS_AT_ONCE))

struct Params {
    Map a, b;
    const u16* x;
    u16 *gelu, *c;
    // [tiles of rows][n].
    float* sums;
    // Row strides in elements.
    i64 x_stride, gelu_stride, c_stride;
    int m, n, k, tiles_n, tiles, unused;
};

// x times the sigmoid of u = sqrt(8 / pi) (x + 0.044715 x^3), and its derivative. NaN stays NaN.
INLINE void gelu_with_slope(float x, float& gelu, float& slope) {
    float clamped, power, s;
    // Beyond 30 the derivative of the sigmoid is zero, and its factor must not become infinite.
    asm("{.reg .f32 least; max.NaN.f32 least, %1, 0fC1F00000; min.NaN.f32 %0, least, 0f41F00000;}" : "=f"(clamped)
        : "f"(x));
    const float square = clamped * clamped;
    // 2^-u, with log2(e) in the factors.
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(clamped * fmaf(-0.10294324f, square, -2.3022082f)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + power));
    gelu = x * s;
    slope = fmaf(fmaf(-s, s, s), clamped * fmaf(0.21406444f, square, 1.5957691f), s);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gelu_grad(const __grid_constant__ Params p) {
    PDL_WAIT();
    // Stages, the output tile, its column sums by each epilogue warp, barriers.
    extern __shared__ __align__(1024) char memory[];
    const u32 stages = static_cast<u32>(__cvta_generic_to_shared(memory)), out = stages + STAGES * STAGE_BYTES;
    const u32 columns = out + ROWS * PITCH, out_full = columns + EPILOGUE_WARPS * COLS * 4, out_empty = out_full + 8;
    auto full = [&](int stage) { return out_full + 16 + stage * 16; };
    auto empty = [&](int stage) { return out_full + 24 + stage * 16; };
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            init_barrier(full(stage), 1);
            init_barrier(empty(stage), 2);
        }
        init_barrier(out_full, MMA_WARPS);
        init_barrier(out_empty, EPILOGUE_WARPS);
        fence_barrier_init();
    }
    __syncthreads();
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    // A warp-uniform value keeps addresses in uniform registers, as wgmma requires.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    int stage = 0;

    if (warp < MMA_WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        // A warpgroup of four warps has 64 rows, as wgmma requires.
        const int group = warp / 4;
        const bool is_leader = threadIdx.x % 128 == 0;
        u32 phase = 0, out_phase = 1;
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            float d[COLS / 2];
            int last = 0;
            for (int step = 0; step < steps; step++) {
                wait_barrier(full(stage), phase);
                const u32 from = stages + stage * STAGE_BYTES, a = descriptor_low_word(from + group * 64 * 128, 16),
                    b = descriptor_low_word(from + BYTES_A, PANEL_BYTES);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        wgmma<false, true>(d + half * 64, make_descriptor(a + k * 2),
                            make_descriptor(b + k * 128 + half * (2 * PANEL_BYTES / 16)), step > 0 || k > 0);
                wgmma_commit();
                if (step > 0) {
                    wgmma_wait<1>();
                    if (is_leader) arrive_barrier(empty(last));
                }
                last = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            wgmma_wait<0>();
            fence_sums<COLS / 2>(d);
            if (is_leader) arrive_barrier(empty(last));

            wait_barrier(out_empty, out_phase);
            out_phase ^= 1;
            const u32 to = out + (warp * 16 + lane / 4) * PITCH + lane % 4 * 4;
#pragma unroll
            for (int n = 0; n < COLS / 8; n++) {
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + n * 16), "r"(pack(d[4 * n], d[4 * n + 1]))
                             : "memory");
                asm volatile("st.shared.b32 [%0], %1;"
                             ::"r"(to + n * 16 + 8 * PITCH), "r"(pack(d[4 * n + 2], d[4 * n + 3])) : "memory");
            }
            __syncwarp();
            if (lane == 0) arrive_barrier(out_full);
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
        if (warp < MMA_WARPS + EPILOGUE_WARPS) {
            const int first = warp - MMA_WARPS;
            u32 phase = 0;
            for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
                // A lane has eight columns, a warp every EPILOGUE_WARPS-th row.
                const int row0 = tile / p.tiles_n * ROWS, col = tile % p.tiles_n * COLS + lane * 8;
                const int rows = col < p.n ? min(p.m - row0, ROWS) : 0;
                auto row_of = [&](int iteration,
                    int i) { return (iteration * ROWS_AT_ONCE + i) * EPILOGUE_WARPS + first; };
                float sums[8] = {};
                uint4 x[ROWS_AT_ONCE], next[ROWS_AT_ONCE];
                auto prefetch = [&](int iteration) {
#pragma unroll
                    for (int i = 0; i < ROWS_AT_ONCE; i++) {
                        const int row = row_of(iteration, i);
                        next[i] = make_uint4(0, 0, 0, 0);
                        if (row < rows)
                            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                                         : "=r"(next[i].x), "=r"(next[i].y), "=r"(next[i].z), "=r"(next[i].w)
                                         : "l"(p.x + (row0 + row) * p.x_stride + col));
                    }
                };
                prefetch(0);
                wait_barrier(out_full, phase);
                phase ^= 1;
#pragma unroll 1
                for (int iteration = 0; iteration < ITERATIONS; iteration++) {
#pragma unroll
                    for (int i = 0; i < ROWS_AT_ONCE; i++) x[i] = next[i];
                    if (iteration + 1 < ITERATIONS) prefetch(iteration + 1);
#pragma unroll
                    for (int i = 0; i < ROWS_AT_ONCE; i++) {
                        const int row = row_of(iteration, i);
                        if (row >= rows) continue;
                        const u32 before[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
                        u32 g[4], gelu[4];
                        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                                     : "=r"(g[0]), "=r"(g[1]), "=r"(g[2]), "=r"(g[3])
                                     : "r"(out + row * PITCH + lane * 16));
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            float low, high, slope_low, slope_high;
                            gelu_with_slope(low_half(before[j]), low, slope_low);
                            gelu_with_slope(high_half(before[j]), high, slope_high);
                            gelu[j] = pack(low, high);
                            slope_low *= low_half(g[j]), slope_high *= high_half(g[j]);
                            sums[2 * j] += slope_low, sums[2 * j + 1] += slope_high;
                            g[j] = pack(slope_low, slope_high);
                        }
                        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                                     ::"l"(p.gelu + (row0 + row) * p.gelu_stride + col),
                                       "r"(gelu[0]), "r"(gelu[1]), "r"(gelu[2]), "r"(gelu[3]) : "memory");
                        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                                     ::"l"(p.c + (row0 + row) * p.c_stride + col),
                                       "r"(g[0]), "r"(g[1]), "r"(g[2]), "r"(g[3]) : "memory");
                    }
                }
                __syncwarp();
                if (lane == 0) arrive_barrier(out_empty);
                // Adds the rows of all warps in order, after all have read the previous tile's sums.
                asm volatile("bar.sync 1, %0;" ::"n"(EPILOGUE_WARPS * 32) : "memory");
                float* column = reinterpret_cast<float*>(memory + (columns - stages));
#pragma unroll
                for (int j = 0; j < 8; j++) column[first * COLS + lane * 8 + j] = sums[j];
                asm volatile("bar.sync 1, %0;" ::"n"(EPILOGUE_WARPS * 32) : "memory");
                for (int column_index = threadIdx.x - MMA_WARPS * 32;
                    column_index < min(COLS, p.n - tile % p.tiles_n * COLS);
                    column_index += EPILOGUE_WARPS * 32) {
                    float sum = 0;
#pragma unroll
                    for (int w = 0; w < EPILOGUE_WARPS; w++) sum += column[w * COLS + column_index];
                    p.sums[(i64)(tile / p.tiles_n) * p.n + tile % p.tiles_n * COLS + column_index] = sum;
                }
            }
        } else if (lane == 0) {
            u32 phase = 1;
            for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x)
                for (int step = 0; step < steps; step++) {
                    wait_barrier(empty(stage), phase);
                    const u32 to = stages + stage * STAGE_BYTES, barrier = full(stage);
                    expect_tx(barrier, STAGE_BYTES);
                    load_box(to, p.a, step * DEPTH, tile / p.tiles_n * ROWS, barrier);
                    for (int panel = 0; panel < COLS / 64; panel++)
                        load_box(to + BYTES_A + panel * PANEL_BYTES, p.b, tile % p.tiles_n * COLS + panel * 64,
                            step * DEPTH, barrier);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
        }
    }
}
