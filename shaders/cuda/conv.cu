// Convolutions of 16-bit floats as implicit matrix products over taps and channels, in three dimensions; images of two
// have a depth of 1. WEIGHT_GRAD chooses one of two kernels, here for strides of 1:
// - 0, `conv`: out[image, row, z, y, x] = bias[row] + the sum over taps and channels of
//   weights[tap_z, tap_y, tap_x, channel, row] · columns[image, channel, tap_x, z + tap_z, y + tap_y, x]. It computes
//   the output, and the gradient of the input.
// - 1, `conv_weight_grad`: partial[split, row, tap, channel] = the sum over the positions of a split of
//   grad[image, row, z, y, x] · columns[image, channel, tap_x, z + tap_z, y + tap_y, x].
//
// The columns are a column matrix for the width of the filter only, because TMA loads boxes that begin at
// multiples of 16 bytes. A block of pixels is WIDTH pixels wide, and its lines are those of one plane. For each tap,
// TMA loads the block that the tap shifts by planes and lines. TMA fills lines outside of the image with zeros, so
// padding costs nothing. TMA counts planes and taps of the width in one dimension, so planes outside are left out, or
// get an index outside. Boxes have the order [line][channel][pixel]: each line is a panel of swizzled rows of WIDTH
// pixels.
//
// Warp specialisation (sm_90a) as in gelu_grad.cu: two groups of warps multiply, and one warp loads. Others store the
// tiles of `conv` while the next tile is multiplied.
//
// Definitions: BF16, 1 or 0 (f16); WEIGHT_GRAD; ROWS, 64 or 128; WIDTH, 16, 32 or 64; STAGES; DEPTH, 16, 32 or 64.
// DEPTH is the channels of a stage of `conv`, and of a panel of columns of `conv_weight_grad`. tma_pipeline.cuh,
// packed_halves.cuh and wgmma.cuh precede this file.

#define COLS 256
#define MMA_WARPS 8
// A group of four warps has 64 rows, as wgmma requires, and half the columns of a tile of 64 rows.
#define GROUP_COLS (ROWS == 128 ? COLS : COLS / 2)
#define LINE_BYTES (WIDTH * 2)
#define LINE_HIGH_WORD DESCRIPTOR_HIGH_WORD(LINE_BYTES)
#if WEIGHT_GRAD
// Pixels of a stage: LINES lines, each with K-major rows of WIDTH pixels.
#define PIXELS 64
#define LINES (PIXELS / WIDTH)
#define BYTES_A (ROWS * PIXELS * 2)
#define STAGE_BYTES (BYTES_A + COLS * PIXELS * 2)
#else
#define LINES (COLS / WIDTH)
// Weights: MN-major panels of 64 rows. Pixels: MN-major panels of WIDTH pixels.
#define PANEL_BYTES_A (DEPTH * 128)
#define BYTES_A (ROWS / 64 * PANEL_BYTES_A)
#define PANEL_BYTES_B (DEPTH * LINE_BYTES)
#define STAGE_BYTES (BYTES_A + LINES * PANEL_BYTES_B)
#endif

struct Params {
    // `conv`: weights [taps][channels][rows]. `conv_weight_grad`: the output's gradient.
    Map a, columns;
    // Null, or [rows].
    const u16* bias;
    void* out;
    int rows, channels, kernel_depth, kernel_height, kernel_width;
    // Plane and line of the first tap for position 0, the distance to the next position, and that to the next tap: the
    // dilation or its negative.
    int first_z, first_y, stride_z, stride_y, step_z, step_y;
    // Planes of the columns; positions of an image, and blocks of pixels in a plane.
    int input_depth, depth, height, width, blocks_y, blocks_x;
    // Blocks of pixels in all images.
    int blocks;
    // Tiles along rows; tiles of `conv`, or tiles of one split of `conv_weight_grad`; splits.
    int tiles_m, tiles, splits;
};

// First pixel of a block with `lines` lines.
struct Origin {
    int x, y, z, image;
};
INLINE Origin origin_of(const Params& p, int block, int lines) {
    const int line = block / p.blocks_x, plane = line / p.blocks_y;
    return {block % p.blocks_x * WIDTH, line % p.blocks_y * lines, plane % p.depth, plane / p.depth};
}

// Plane that tap `tap` along the depth reads for positions in plane `z`.
INLINE int plane_of(const Params& p, int z, int tap) { return z * p.stride_z + p.first_z + tap * p.step_z; }
INLINE bool has_plane(const Params& p, int plane) { return plane >= 0 && plane < p.input_depth; }

// Index of a plane of the columns of tap `tap_x`, which is outside of all columns for planes outside of the image.
INLINE int columns_plane(const Params& p, int plane, int tap_x) {
    return has_plane(p, plane) ? tap_x * p.input_depth + plane : -1;
}

// Stages of shared memory, which all roles use in order.
struct Pipeline {
    u32 data, barriers, phase;
    int stage;

    INLINE u32 full() const { return barriers + stage * 16; }
    INLINE u32 empty() const { return barriers + stage * 16 + 8; }
    INLINE void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Adds the products of `steps` stages. `issue` issues those of the stage at an address.
template <typename Issue> INLINE void multiply_stages(Pipeline& pipeline, int steps, bool is_leader, Issue issue) {
    u32 last = 0;
    for (int step = 0; step < steps; step++) {
        wait_barrier(pipeline.full(), pipeline.phase);
        wgmma_fence();
        issue(pipeline.data + pipeline.stage * STAGE_BYTES, step > 0);
        wgmma_commit();
        if (step > 0) {
            wgmma_wait<1>();
            if (is_leader) arrive_barrier(last);
        }
        last = pipeline.empty();
        pipeline.advance();
    }
    wgmma_wait<0>();
    if (is_leader) arrive_barrier(last);
}

INLINE void init_stages(u32 barriers) {
    for (int stage = 0; stage < STAGES; stage++) {
        init_barrier(barriers + stage * 16, 1);
        init_barrier(barriers + stage * 16 + 8, 2);
    }
}

#if !WEIGHT_GRAD
// Rows of the output tile are padded by 16 bytes, against bank conflicts.
#define PITCH (COLS * 2 + 16)
#define EPILOGUE_WARPS 7
#define THREADS ((MMA_WARPS + EPILOGUE_WARPS + 1) * 32)
#define ROWS_AT_ONCE 4

// Taps along the depth from `first` on to `end`.
struct TapRange {
    int first, end;
};
// Taps whose planes are in the image, for the positions of a block; if there are none, one whose plane is outside.
INLINE TapRange depth_taps(const Params& p, int block) {
    TapRange taps = {0, p.kernel_depth};
    if (p.kernel_depth == 1) return taps;
    const int z = origin_of(p, block, LINES).z;
    while (taps.first + 1 < taps.end && !has_plane(p, plane_of(p, z, taps.first))) taps.first++;
    while (taps.first + 1 < taps.end && !has_plane(p, plane_of(p, z, taps.end - 1))) taps.end--;
    return taps;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv(const __grid_constant__ Params p) {
    PDL_WAIT();
    // Stages, the output tile, barriers.
    extern __shared__ __align__(1024) char memory[];
    const u32 stages = static_cast<u32>(__cvta_generic_to_shared(memory)), out = stages + STAGES * STAGE_BYTES;
    const u32 out_full = out + ROWS * PITCH, out_empty = out_full + 8;
    Pipeline pipeline = {stages, out_full + 16, 0, 0};
    if (threadIdx.x == 0) {
        init_stages(pipeline.barriers);
        init_barrier(out_full, MMA_WARPS);
        init_barrier(out_empty, EPILOGUE_WARPS);
        fence_barrier_init();
    }
    __syncthreads();
    // A warp-uniform value keeps addresses in uniform registers, as wgmma requires.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int steps_of_plane = (p.channels + DEPTH - 1) / DEPTH * p.kernel_height * p.kernel_width;

    if (warp < MMA_WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        const int group = warp / 4;
        const u32 group_a = ROWS == 128 ? group * PANEL_BYTES_A : 0;
        const u32 group_col = ROWS == 128 ? 0 : group * GROUP_COLS;
        const int row = (ROWS == 128 ? warp : warp % 4) * 16 + lane / 4;
        u32 out_phase = 1;
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            float d[GROUP_COLS / 2];
            const TapRange taps = depth_taps(p, tile / p.tiles_m);
            const int steps = (taps.end - taps.first) * steps_of_plane;
            multiply_stages(pipeline, steps, threadIdx.x % 128 == 0, [&](u32 from, bool add) {
                const u32 a = descriptor_low_word(from + group_a, PANEL_BYTES_A);
                const u32 b = descriptor_low_word(from + BYTES_A + group_col * DEPTH * 2, PANEL_BYTES_B);
#pragma unroll
                for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
                    for (int half = 0; half < GROUP_COLS / 128; half++)
                        wgmma<true, true>(d + half * 64, make_descriptor(a + k * 128),
                            make_descriptor<LINE_HIGH_WORD>(b + k * LINE_BYTES + half * (DEPTH * 16)), add || k > 0);
            });
            fence_sums<GROUP_COLS / 2>(d);
            float bias[2] = {};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = tile % p.tiles_m * ROWS + row + i * 8;
                if (p.bias && at < p.rows) bias[i] = low_half(p.bias[at]);
            }
            wait_barrier(out_empty, out_phase);
            out_phase ^= 1;
            const u32 to = out + row * PITCH + group_col * 2 + lane % 4 * 4;
#pragma unroll
            for (int n = 0; n < GROUP_COLS / 8; n++) {
                asm volatile("st.shared.b32 [%0], %1;"
                             ::"r"(to + n * 16), "r"(pack(d[4 * n] + bias[0], d[4 * n + 1] + bias[0])) : "memory");
                asm volatile("st.shared.b32 [%0], %1;"
                             ::"r"(to + n * 16 + 8 * PITCH),
                               "r"(pack(d[4 * n + 2] + bias[1], d[4 * n + 3] + bias[1])) : "memory");
            }
            __syncwarp();
            if (lane == 0) arrive_barrier(out_full);
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
        if (warp < MMA_WARPS + EPILOGUE_WARPS) {
            u32 phase = 0;
            for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
                // A lane has eight pixels of a line, a warp every EPILOGUE_WARPS-th row.
                const Origin origin = origin_of(p, tile / p.tiles_m, LINES);
                const int y = origin.y + lane * 8 / WIDTH, x = origin.x + lane * 8 % WIDTH;
                const int row0 = tile % p.tiles_m * ROWS;
                const int rows = y < p.height && x < p.width ? min(p.rows - row0, ROWS) : 0;
                const i64 positions = (i64)p.depth * p.height * p.width;
                u16* to = static_cast<u16*>(p.out) + ((i64)origin.image * p.rows + row0) * positions +
                    ((i64)origin.z * p.height + y) * p.width + x;
                wait_barrier(out_full, phase);
                phase ^= 1;
#pragma unroll 1
                for (int first = warp - MMA_WARPS; first < rows; first += EPILOGUE_WARPS * ROWS_AT_ONCE) {
                    u32 v[ROWS_AT_ONCE][4];
#pragma unroll
                    for (int i = 0; i < ROWS_AT_ONCE; i++) {
                        const int row = min(first + i * EPILOGUE_WARPS, ROWS - 1);
                        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                                     : "=r"(v[i][0]), "=r"(v[i][1]), "=r"(v[i][2]), "=r"(v[i][3])
                                     : "r"(out + row * PITCH + lane * 16));
                    }
#pragma unroll
                    for (int i = 0; i < ROWS_AT_ONCE; i++) {
                        const int row = first + i * EPILOGUE_WARPS;
                        if (row < rows)
                            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                                         ::"l"(to + row * positions), "r"(v[i][0]), "r"(v[i][1]), "r"(v[i][2]),
                                           "r"(v[i][3]) : "memory");
                    }
                }
                __syncwarp();
                if (lane == 0) arrive_barrier(out_empty);
            }
        } else if (lane == 0) {
            pipeline.phase = 1;
            for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
                const Origin origin = origin_of(p, tile / p.tiles_m, LINES);
                const int row0 = tile % p.tiles_m * ROWS;
                const TapRange taps = depth_taps(p, tile / p.tiles_m);
                const int first_line = origin.y * p.stride_y + p.first_y;
                // A step must take this thread less time than the products, so it has no divisions.
                for (int channel = 0; channel < p.channels; channel += DEPTH)
                    for (int kz = taps.first, tap = kz * p.kernel_height * p.kernel_width; kz < taps.end; kz++) {
                        const int plane = plane_of(p, origin.z, kz);
                        for (int ky = 0; ky < p.kernel_height; ky++)
                            for (int kx = 0; kx < p.kernel_width; kx++, tap++) {
                                wait_barrier(pipeline.empty(), pipeline.phase);
                                const u32 to = stages + pipeline.stage * STAGE_BYTES, barrier = pipeline.full();
                                expect_tx(barrier, STAGE_BYTES);
#pragma unroll
                                for (int panel = 0; panel < ROWS / 64; panel++)
                                    load_box(to + panel * PANEL_BYTES_A, p.a, row0 + panel * 64, channel, tap,
                                        barrier);
                                load_box(to + BYTES_A, p.columns, origin.x, channel, first_line + ky * p.step_y,
                                    columns_plane(p, plane, kx), origin.image, barrier);
                                pipeline.advance();
                            }
                    }
            }
        }
    }
}
#else
#define THREADS ((MMA_WARPS + 1) * 32)
// Panels of columns of a tile. Each has one tap and DEPTH channels.
#define PANELS (COLS / DEPTH)
#define BOXES_OF_LANE ((PANELS * LINES + 31) / 32)

// Box of columns of a tile: a line of a panel.
struct ColumnsBox {
    int panel, line, channel, tap_z, tap_x;
    // Line of the image for position 0.
    int y;
};
INLINE ColumnsBox columns_box(const Params& p, int first_panel, int index, int panels_of_tap) {
    const int panel = index / LINES, line = index % LINES;
    const int tap = (first_panel + panel) / panels_of_tap, channel = (first_panel + panel) % panels_of_tap * DEPTH;
    const int tap_line = tap / p.kernel_width;
    return {panel, line, channel, tap_line / p.kernel_height, tap % p.kernel_width,
        p.first_y + tap_line % p.kernel_height * p.step_y + line * p.stride_y};
}

// Origin of the block after this one.
INLINE Origin next_origin(const Params& p, Origin origin, int lines) {
    origin.x += WIDTH;
    if (origin.x < p.blocks_x * WIDTH) return origin;
    origin.x = 0, origin.y += lines;
    if (origin.y < p.blocks_y * lines) return origin;
    origin.y = 0, origin.z++;
    if (origin.z < p.depth) return origin;
    origin.z = 0, origin.image++;
    return origin;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_weight_grad(const __grid_constant__ Params p) {
    PDL_WAIT();
    // Stages, barriers.
    extern __shared__ __align__(1024) char memory[];
    const u32 stages = static_cast<u32>(__cvta_generic_to_shared(memory));
    Pipeline pipeline = {stages, stages + STAGES * STAGE_BYTES, 0, 0};
    if (threadIdx.x == 0) {
        init_stages(pipeline.barriers);
        fence_barrier_init();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int split = blockIdx.x / p.tiles, tile = blockIdx.x % p.tiles;
    const int row0 = tile % p.tiles_m * ROWS, first_panel = tile / p.tiles_m * PANELS;
    const int panels_of_tap = (p.channels + DEPTH - 1) / DEPTH;
    const int taps = p.kernel_depth * p.kernel_height * p.kernel_width;
    const int first = (i64)p.blocks * split / p.splits, end = (i64)p.blocks * (split + 1) / p.splits;

    if (warp < MMA_WARPS) {
        const int group = warp / 4;
        const u32 group_a = ROWS == 128 ? group * 64 * LINE_BYTES : 0;
        const int group_col = ROWS == 128 ? 0 : group * GROUP_COLS;
        float d[GROUP_COLS / 2];
        multiply_stages(pipeline, end - first, threadIdx.x % 128 == 0, [&](u32 from, bool add) {
            const u32 a = descriptor_low_word(from + group_a, 16);
            const u32 b = descriptor_low_word(from + BYTES_A + group_col * LINE_BYTES, 16);
#pragma unroll
            for (int k = 0; k < PIXELS / 16; k++) {
                const int line = k * 16 / WIDTH, part = k * 16 % WIDTH * 2;
#pragma unroll
                for (int half = 0; half < GROUP_COLS / 128; half++)
                    wgmma<false, false>(d + half * 64,
                        make_descriptor<LINE_HIGH_WORD>(a + (line * (ROWS * LINE_BYTES) + part) / 16),
                        make_descriptor<LINE_HIGH_WORD>(
                            b + (line * (COLS * LINE_BYTES) + half * (128 * LINE_BYTES) + part) / 16),
                        add || k > 0);
            }
        });
        fence_sums<GROUP_COLS / 2>(d);
        const int row = row0 + (ROWS == 128 ? warp : warp % 4) * 16 + lane / 4;
        float* partial = static_cast<float*>(p.out) + (i64)split * p.rows * taps * p.channels;
#pragma unroll
        for (int n = 0; n < GROUP_COLS / 8; n++) {
            const int col = group_col + n * 8 + lane % 4 * 2, panel = first_panel + col / DEPTH;
            const int tap = panel / panels_of_tap, channel = panel % panels_of_tap * DEPTH + col % DEPTH;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (tap >= taps || row + i * 8 >= p.rows) continue;
                float* to = partial + ((i64)(row + i * 8) * taps + tap) * p.channels + channel;
                if (p.channels % 2 == 0 && channel < p.channels) {
                    *reinterpret_cast<float2*>(to) = make_float2(d[4 * n + 2 * i], d[4 * n + 2 * i + 1]);
                } else {
                    if (channel < p.channels) to[0] = d[4 * n + 2 * i];
                    if (channel + 1 < p.channels) to[1] = d[4 * n + 2 * i + 1];
                }
            }
        }
    } else {
        // A lane loads at most two boxes of columns of each block: a line of a panel.
        pipeline.phase = 1;
        const int panels = min(PANELS, panels_of_tap * taps - first_panel);
        ColumnsBox boxes[BOXES_OF_LANE];
#pragma unroll
        for (int i = 0; i < BOXES_OF_LANE; i++) boxes[i] = columns_box(p, first_panel, lane + i * 32, panels_of_tap);
        Origin origin = origin_of(p, first, LINES);
        for (int block = first; block < end; block++) {
            wait_barrier(pipeline.empty(), pipeline.phase);
            const u32 to = stages + pipeline.stage * STAGE_BYTES, barrier = pipeline.full();
            if (lane == 0) {
                expect_tx(barrier, BYTES_A + panels * (DEPTH * PIXELS * 2));
                load_box(to, p.a, origin.x, row0, origin.y, origin.z, origin.image, barrier);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < BOXES_OF_LANE; i++) {
                const ColumnsBox& box = boxes[i];
                if (box.panel < panels)
                    load_box(to + BYTES_A + (box.line * COLS + box.panel * DEPTH) * LINE_BYTES, p.columns, origin.x,
                        box.channel, origin.y * p.stride_y + box.y,
                        columns_plane(p, plane_of(p, origin.z, box.tap_z), box.tap_x), origin.image, barrier);
            }
            origin = next_origin(p, origin, LINES);
            pipeline.advance();
        }
    }
}
#endif
