// Gradients of attention of f32 rows, by exact f32 products without tensor cores.
//
// A block has the keys and values of 64 positions of a head. It iterates over the tiles of 64 queries that attend to
// them, from the last tile to the first. Each tile takes five products: the scores, the gradients of the weights, and
// the tile's parts of dv, dk and dq. Half of the threads ("group" 0) compute the scores and dv, the others ("group" 1)
// the gradients of the weights and dk. Each group computes dq for half of the queries.
//
// dq is added up in global memory, without atomics. All blocks add to a tile in the order of their keys, so gradients
// have the same bits in every run. A counter for each tile of queries ("turn") says how many blocks have added their
// part. A block takes its work by a ticket, and waits only for blocks with lower tickets, which have started. Lower
// tickets are ahead in the common order of tiles, so waits are short.
//
// PASS 0 writes delta, the sum of grad · out of each query, and resets turns and tickets. PASS 1 follows.
//
// Definitions:
// - HEAD: size of a head, a multiple of 4, at most 128. DEPTH: 32, 64 or 128, the size of a head in tiles.
// - GROUP: threads of a group, 64, or 128 for a DEPTH of 128. BLOCKS: blocks on a multiprocessor.
//
// A line of a tile consists of 16-byte parts, swizzled by bits 2 to 4 of the line's number. Eight neighbouring parts of
// a line, or equal parts of eight lines that lie four apart, are in different banks.

typedef unsigned int u32;
typedef long long i64;
#define INLINE __device__ __forceinline__

#define TILE 64
#define THREADS (2 * GROUP)
// Columns of a thread in products of 64 and of DEPTH columns.
#define SCORE_COLS (TILE * TILE / 8 / GROUP)
#define DEPTH_COLS (TILE * DEPTH / 8 / GROUP)
#define LOG2E 1.4426950408889634f

// Heads of rows of HEAD elements; strides in elements, multiples of 4.
struct Heads {
    float* data;
    i64 batch, head;
    int row, unused;
};

struct Params {
    Heads q, k, v, out, grad, dq, dk, dv;
    // [batch][heads][queries]: log-sum-exp of each query's scores, and the sum of grad · out.
    const float* lse;
    float* delta;
    // [batch][heads][tiles of queries]: blocks that have added to a tile of dq; then the next ticket.
    u32* turns;
    int batch, heads, kv_heads, queries, keys;
    // Query i attends to keys i - left to i + right.
    int left, right;
    float scale;
};

INLINE float* head_of(const Heads& h, int batch, int head) { return h.data + batch * h.batch + head * h.head; }

#if PASS == 0
extern "C" __global__ void __launch_bounds__(256) attention_f32_delta(const __grid_constant__ Params p) {
    PDL_WAIT();
    const int id = blockIdx.x * 256 + threadIdx.x, line = id / 8, part = id % 8;
    const int tiles = (p.queries + TILE - 1) / TILE, lines = p.batch * p.heads * p.queries;
    if (id <= p.batch * p.heads * tiles) p.turns[id] = 0;
    const int query = line % p.queries, head_index = line / p.queries;
    const int batch = head_index / p.heads, head = head_index % p.heads;
    float sum = 0;
    if (line < lines) {
        const float* out = head_of(p.out, batch, head) + (i64)query * p.out.row;
        const float* grad = head_of(p.grad, batch, head) + (i64)query * p.grad.row;
        // No block visits a tile of queries without keys.
        const bool has_no_keys = p.keys - 1 < query / TILE * TILE - p.left;
        float* dq = head_of(p.dq, batch, head) + (i64)query * p.dq.row;
#pragma unroll
        for (int i = part * 4; i < HEAD; i += 32) {
            const float4 a = *reinterpret_cast<const float4*>(out + i), b = *reinterpret_cast<const float4*>(grad + i);
            sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            if (has_no_keys) *reinterpret_cast<float4*>(dq + i) = make_float4(0, 0, 0, 0);
        }
    }
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    sum += __shfl_xor_sync(0xffffffff, sum, 4);
    if (line < lines && part == 0) p.delta[line] = sum;
}
#else
INLINE void copy_async(float* to, const float* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
INLINE void copy_async4(float* to, const float* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from), "r"(inside ? 4 : 0) : "memory");
}
INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Barriers of some of the threads. Those that arrive do not wait.
INLINE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
INLINE void barrier_arrive(int id, int threads) {
    __threadfence_block();
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
INLINE u32 load_acquire(const u32* from) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
INLINE void store_release(u32* to, u32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
// Reads what other blocks have written.
INLINE float4 load_coherent(const float* from) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from) : "memory");
    return v;
}
// Computes 2^x by the hardware's instruction, at most 2 ulp off.
INLINE float exp2_approx(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

INLINE const float4& quad_at(const float* at) { return *reinterpret_cast<const float4*>(at); }
INLINE float component(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Returns the index of part `part` (four elements) of a line, which has LINE elements.
template <int LINE> INLINE int part_index(int line, int part) { return line * LINE + ((part ^ (line >> 2 & 7)) << 2); }

// First row and column of a thread in a product of 64 rows by a group. A warp has 32 rows, by 4 x 8 threads. A thread
// has two quads of rows, 8 apart, and quads of columns, 32 apart. Pairs of threads have equal columns, and pairs of
// these equal rows: reads of shared memory then take two cycles instead of four.
struct Lane {
    int row, col;
    INLINE Lane(int thread, int cols) {
        const int lane = thread & 31, warp = thread >> 5;
        row = (warp & 1) * 32 + (lane & 1) * 16 + (lane >> 4) * 4;
        col = (warp >> 1) * (8 * cols) + (lane >> 1 & 7) * 4;
    }
};
INLINE int row_step(int i) { return i / 4 * 8 + i % 4; }
INLINE int col_step(int j) { return j / 4 * 32 + j % 4; }

template <int COLS> INLINE void clear(float (&c)[8][COLS]) {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < COLS; j++) c[i][j] = 0;
}

// c = a · bᵀ: a and b have the terms of a sum along their lines.
template <int COLS> INLINE void multiply_abt(float (&c)[8][COLS], const float* a, const float* b, Lane at) {
    clear(c);
    // More than one step at a time would take too many registers.
#pragma unroll 1
    for (int part = 0; part < HEAD / 4; part++) {
        float4 x[8], y[COLS];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = quad_at(a + part_index<DEPTH>(at.row + i / 4 * 8, part) + i % 4 * DEPTH);
#pragma unroll
        for (int j = 0; j < COLS; j++)
            y[j] = quad_at(b + part_index<DEPTH>(at.col + j / 4 * 32, part) + j % 4 * DEPTH);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < COLS; j++) c[i][j] = fmaf(component(x[i], k), component(y[j], k), c[i][j]);
    }
}

// c += aᵀ · b: a and b have the terms of a sum in different lines.
template <int COLS> INLINE void multiply_atb(float (&c)[8][COLS], const float* a, const float* b, Lane at) {
#pragma unroll 2
    for (int k0 = 0; k0 < TILE; k0 += 4) {
        const float* x0 = a + part_index<TILE>(k0, at.row >> 2);
        const float* x1 = a + part_index<TILE>(k0, (at.row >> 2) + 2);
        const float* y0 = b + part_index<DEPTH>(k0, at.col >> 2);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float4 x[2] = {quad_at(x0 + k * TILE), quad_at(x1 + k * TILE)};
            float4 y[COLS / 4];
#pragma unroll
            for (int j = 0; j < COLS / 4; j++) y[j] = quad_at(y0 + k * DEPTH + j * 32);
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < COLS; j++)
                    c[i][j] = fmaf(component(x[i / 4], i % 4), component(y[j / 4], j % 4), c[i][j]);
        }
    }
}

// c = a · b, for a quad of rows, and quads of columns 32 apart.
template <int COLS>
INLINE void multiply_ab(float (&c)[4][COLS], const float* a, const float* b, int row, int col) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < COLS; j++) c[i][j] = 0;
#pragma unroll 2
    for (int k0 = 0; k0 < TILE; k0 += 4) {
        const float* x0 = a + part_index<TILE>(row, k0 >> 2);
        const float* y0 = b + part_index<DEPTH>(k0, col >> 2);
        float4 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = quad_at(x0 + i * TILE);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float4 y[COLS / 4];
#pragma unroll
            for (int j = 0; j < COLS / 4; j++) y[j] = quad_at(y0 + k * DEPTH + j * 32);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < COLS; j++) c[i][j] = fmaf(component(x[i], k), component(y[j / 4], j % 4), c[i][j]);
        }
    }
}

// Starts to load rows from `first` on, by the threads of a group. Rows from `end` on become zero.
INLINE void load_tile(float* tile, const float* rows, int stride, int first, int end, int thread) {
    constexpr int PARTS = DEPTH / 4, STEP = GROUP / PARTS;
    const int part = thread % PARTS, row = thread / PARTS;
    const float* from = rows + (i64)(first + row) * stride + part * 4;
#pragma unroll
    for (int i = 0; i < TILE; i += STEP) {
        const bool inside = first + row + i < end && (HEAD == DEPTH || part * 4 < HEAD);
        copy_async(tile + part_index<DEPTH>(row + i, part), inside ? from + (i64)i * stride : rows, inside);
    }
}
// Starts to load 64 values of a line.
INLINE void load_line(float* to, const float* line, int first, int end, int thread) {
    if (thread < TILE) {
        const bool inside = first + thread < end;
        copy_async4(to + thread, line + (inside ? first + thread : 0), inside);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_f32_bwd(const __grid_constant__ Params p) {
    PDL_WAIT();
    // Tiles of keys, values, queries and gradients of the result, and two matrices with a line for each query: the
    // weights, and the gradients of scores.
    extern __shared__ __align__(1024) float memory[];
    float *k_tile = memory, *v_tile = k_tile + TILE * DEPTH, *q_tile = v_tile + TILE * DEPTH,
          *g_tile = q_tile + TILE * DEPTH, *weights = g_tile + TILE * DEPTH, *ds = weights + TILE * TILE;
    __shared__ float stats[2 * TILE];
    __shared__ u32 ticket;

    const int query_tiles = (p.queries + TILE - 1) / TILE;
    if (threadIdx.x == 0) ticket = atomicAdd(p.turns + p.batch * p.heads * query_tiles, 1u);
    __syncthreads();
    // All heads with one tile of keys, then with the next: blocks that add to the same tiles start at different times,
    // and in causal attention the longest blocks start first.
    const int heads = p.batch * p.kv_heads, key_tile = ticket / heads, head_index = ticket % heads;
    const int batch = head_index / p.kv_heads, kv_head = head_index % p.kv_heads;
    const int queries_per_kv_head = p.heads / p.kv_heads;

    // The queries that attend to some key of these, and their tiles.
    const int k0 = key_tile * TILE, last_key = min(k0 + TILE, p.keys) - 1;
    const int first_query = max(k0 - p.right, 0), last_query = min(last_key + p.left, p.queries - 1);
    const int first_tile = first_query / TILE, last_tile = last_query / TILE;
    const int tiles = first_query > last_query ? 0 : last_tile - first_tile + 1;

    // The shuffle tells the compiler that a warp is in one group.
    const int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0), thread = threadIdx.x % GROUP;
    const Lane scores_at(thread, SCORE_COLS), depth_at(thread, DEPTH_COLS);
    float* own_stats = stats + group * TILE;
    // Operands that this group loads for each tile of queries.
    const Heads& loaded = group ? p.q : p.grad;
    float* loaded_tile = group ? q_tile : g_tile;
    const float* lines = group ? p.delta : p.lse;

    const Heads& kept = group ? p.v : p.k;
    load_tile(group ? v_tile : k_tile, head_of(kept, batch, kv_head), kept.row, k0, p.keys, thread);
    int head = kv_head * queries_per_kv_head, tile = last_tile;
    auto load = [&](int head, int tile) {
        load_tile(loaded_tile, head_of(loaded, batch, head), loaded.row, tile * TILE, p.queries, thread);
        load_line(own_stats, lines + (i64)(batch * p.heads + head) * p.queries, tile * TILE, p.queries, thread);
    };
    if (tiles) load(head, tile);
    wait_for_copies();
    __syncthreads();

    // dv in group 0, dk in group 1.
    float sums[8][DEPTH_COLS];
    clear(sums);
    const float scale = p.scale * LOG2E;
    for (int remaining = tiles * queries_per_kv_head; remaining > 0; remaining--) {
        const int q0 = tile * TILE;
        float s[8][SCORE_COLS];
        multiply_abt(s, group ? g_tile : q_tile, group ? v_tile : k_tile, scores_at);
        float line[8];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 v = quad_at(own_stats + scores_at.row + row_step(i));
            line[i] = v.x, line[i + 1] = v.y, line[i + 2] = v.z, line[i + 3] = v.w;
        }
        if (group == 0) {
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < SCORE_COLS; j++) s[i][j] = exp2_approx(fmaf(s[i][j], scale, -line[i] * LOG2E));
            const bool all = k0 + TILE <= p.keys && k0 + TILE - 1 <= q0 + p.right && k0 >= q0 + TILE - 1 - p.left;
            if (!all) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int query = q0 + scores_at.row + row_step(i), key = k0 + scores_at.col;
                    const int low = query - p.left - key, high = min(query + p.right, p.keys - 1) - key;
#pragma unroll
                    for (int j = 0; j < SCORE_COLS; j++)
                        if (col_step(j) < low || col_step(j) > high) s[i][j] = 0;
                }
            }
        } else {
            barrier_sync(3, THREADS);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < SCORE_COLS; j += 4) {
                const int row = scores_at.row + row_step(i);
                const int at = part_index<TILE>(row, (scores_at.col + col_step(j)) >> 2);
                if (group) {
                    const float4 w = quad_at(weights + at);
#pragma unroll
                    for (int e = 0; e < 4; e++) s[i][j + e] = component(w, e) * (s[i][j + e] - line[i]);
                }
                *reinterpret_cast<float4*>((group ? ds : weights) + at) =
                    make_float4(s[i][j], s[i][j + 1], s[i][j + 2], s[i][j + 3]);
            }
        // Weights are complete for group 1, and gradients of scores for group 0.
        barrier_arrive(3 + group, THREADS);
        barrier_sync(1 + group, GROUP);
        multiply_atb(sums, group ? ds : weights, group ? q_tile : g_tile, depth_at);
        barrier_sync(1 + group, GROUP);
        if (group == 0) barrier_sync(4, THREADS);

        // The other group has read this group's tile too, for scores or the weights' gradients.
        const int at_head = head, at_tile = tile;
        if (tile-- == first_tile) tile = last_tile, head++;
        if (remaining > 1) load(head, tile);

        const int first_key_tile = max(q0 - p.left, 0) / TILE, turn = key_tile - first_key_tile;
        u32* turns = p.turns + (batch * p.heads + at_head) * query_tiles + at_tile;
        // This group's half of dq.
        float c[4][DEPTH_COLS];
        const int c_row = group * 32 + (thread >> 5 & 1) * 16 + (thread & 1) * 8 + (thread >> 4 & 1) * 4;
        const int c_col = (thread >> 6) * (8 * DEPTH_COLS) + (thread >> 1 & 7) * 4;
        multiply_ab(c, ds, k_tile, c_row, c_col);
        if (threadIdx.x == 0)
            while (load_acquire(turns) != turn) __nanosleep(20);
        __syncthreads();
        const int row = q0 + c_row;
        float* dq = head_of(p.dq, batch, at_head) + (i64)row * p.dq.row + c_col;
        constexpr int QUADS = DEPTH_COLS / 4;
        auto is_inside = [&](int i, int j) {
            return row + i < p.queries && (HEAD == DEPTH || c_col + 32 * j < HEAD);
        };
        float4 old[4][QUADS];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < QUADS; j++)
                old[i][j] = turn && is_inside(i, j) ? load_coherent(dq + (i64)i * p.dq.row + 32 * j)
                                                    : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < QUADS; j++) {
                float4& v = old[i][j];
                v.x = fmaf(c[i][4 * j], p.scale, v.x), v.y = fmaf(c[i][4 * j + 1], p.scale, v.y);
                v.z = fmaf(c[i][4 * j + 2], p.scale, v.z), v.w = fmaf(c[i][4 * j + 3], p.scale, v.w);
                if (is_inside(i, j)) *reinterpret_cast<float4*>(dq + (i64)i * p.dq.row + 32 * j) = v;
            }
        wait_for_copies();
        __syncthreads();
        // A thread of group 1, which will wait for the weights of the next tile anyway.
        if (threadIdx.x == GROUP) store_release(turns, turn + 1);
    }

    const Heads& result = group ? p.dk : p.dv;
    const float factor = group ? p.scale : 1.0f;
    float* to = head_of(result, batch, kv_head) + (i64)(k0 + depth_at.row) * result.row + depth_at.col;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < DEPTH_COLS; j += 4)
            if (k0 + depth_at.row + row_step(i) < p.keys && (HEAD == DEPTH || depth_at.col + col_step(j) < HEAD))
                *reinterpret_cast<float4*>(to + (i64)row_step(i) * result.row + col_step(j)) = make_float4(
                    sums[i][j] * factor, sums[i][j + 1] * factor, sums[i][j + 2] * factor, sums[i][j + 3] * factor);
}
#endif
