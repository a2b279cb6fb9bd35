// Attention backward in one pass over blocks of keys, for long sequences on Hopper: five products instead of the
// seven of attention_bwd.cu. A block holds KEYS keys, and iterates over the tiles of queries that attend to them. It
// keeps the gradients of keys and values in registers, and adds its part of the gradient of the queries to f32 sums
// in scratch memory. The blocks of a head take turns at each tile, in an order that depends on the call's sizes only:
// the sums have the same bits in every run.
//
// There are three kernels. `attention_bwd_rows` (PASS 3) computes the values of each query and clears the turns,
// `attention_bwd_blocks` (PASS 4) computes the gradients, and `attention_bwd_sums` (PASS 5) converts the sums to 16
// bits.
//
// Definitions: those of attention_common.cuh, for STAGES tiles of queries, and
// - UNITS: warpgroups of a block that multiply. Each has 64 keys. One more warpgroup loads and stores.
// - UNIT_REGISTERS, HELPER_REGISTERS: registers of a thread of those that multiply, and of the others.

#define KEYS (UNITS * 64)
#define QUERIES 64
#define KEY_BYTES (KEYS * 128)
#define QUERY_BYTES (QUERIES * 128)
#define SUM_FLOATS (QUERIES * HEAD)
#define SUM_BYTES (SUM_FLOATS * 4)
#define STATS_BYTES (2 * QUERIES * 4)
// Tiles of score gradients in shared memory, and tiles of sums.
#define BUFFERS 2
static_assert(HOPPER && HEAD == 64 && COLS == QUERIES && ROWS16 == 1, "tiles have one panel");

// Scratch memory: the number of blocks that have begun, and the turn of each tile of queries. Then for each tile the
// log-sum-exp (in the unit of `score_offset`) and the sum of grad · out of its queries. Then the sums of each tile,
// in the order of the threads that compute them.
struct Scratch {
    u32 *begun, *turns;
    float *stats, *sums;
};
INLINE int query_tiles(const Params& p) { return (p.queries + QUERIES - 1) / QUERIES; }
INLINE Scratch scratch_of(const Params& p) {
    const u32 tiles = p.batch * p.heads * query_tiles(p);
    u32* begun = reinterpret_cast<u32*>(p.stats);
    float* stats = p.stats + (1 + tiles + 31) / 32 * 32;
    return {begun, begun + 1, stats, stats + (i64)tiles * (2 * QUERIES)};
}

// Blocks of keys that visit a tile of queries, `last` included. There are none if `last` is less than `first`.
struct BlockRange {
    int first, last;
};
INLINE BlockRange visiting_blocks(const Params& p, int tile) {
    // Like `assign_work`, counts queries after the last.
    const int query = tile * QUERIES;
    const int first_key = max(query - p.left, 0), last_key = min(query + QUERIES - 1 + p.right, p.keys - 1);
    if (last_key < first_key) return {0, -1};
    return {first_key / KEYS, last_key / KEYS};
}

// Returns where the sums over 64 rows of the gradients of a head are written; heads of queries precede those of keys
// and values.
INLINE float* row_sums(const Params& p, int rows, int batch, int rows64, int head) {
    return p.sums + ((i64)(batch * ((rows + 63) / 64) + rows64) * (p.heads + 2 * p.kv_heads) + head) * HEAD;
}

INLINE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

INLINE void stmatrix_x4(u32 at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
INLINE void stmatrix_x4_trans(u32 at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

#if PASS == 3
extern "C" __global__ void __launch_bounds__(THREADS) attention_bwd_rows(const __grid_constant__ Params p) {
    PDL_WAIT();
    // Eight threads share a row.
    constexpr int ROWS_AT_ONCE = THREADS / 8;
    const Scratch scratch = scratch_of(p);
    const int tiles = query_tiles(p), head_index = blockIdx.x / tiles, tile = blockIdx.x - head_index * tiles;
    const int batch = head_index / p.heads, head = head_index - batch * p.heads;
    if (threadIdx.x == 0) {
        scratch.turns[blockIdx.x] = 0;
        if (blockIdx.x == 0) *scratch.begun = 0;
    }
    float* stats = scratch.stats + (i64)blockIdx.x * (2 * QUERIES);
    const float scale = score_scale(p);
    const u16 *out = head_of(p.out, batch, head), *grad = head_of(p.grad, batch, head);
    const int part = threadIdx.x % 8;
    u32 a[QUERIES / ROWS_AT_ONCE][4], b[QUERIES / ROWS_AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < QUERIES / ROWS_AT_ONCE; i++) {
        const int query = min(tile * QUERIES + ROWS_AT_ONCE * i + (int)threadIdx.x / 8, p.queries - 1);
        asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3])
                     : "l"(out + (i64)query * p.out.row + part * 8));
        asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[i][0]), "=r"(b[i][1]), "=r"(b[i][2]), "=r"(b[i][3])
                     : "l"(grad + (i64)query * p.grad.row + part * 8));
    }
#pragma unroll
    for (int i = 0; i < QUERIES / ROWS_AT_ONCE; i++) {
        const int row = ROWS_AT_ONCE * i + threadIdx.x / 8, query = tile * QUERIES + row;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            sum += low_half(a[i][j]) * low_half(b[i][j]) + high_half(a[i][j]) * high_half(b[i][j]);
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
        const bool inside = query < p.queries;
        if (part == 0) {
            // TMA loads queries after the last as zeros, which add nothing.
            stats[row] = inside ? score_offset(p.lse[(i64)head_index * p.queries + query], LOG2E) : 0.0f;
            stats[QUERIES + row] = inside ? sum : 0.0f;
        }
    }
}
#elif PASS == 4
// The work of a block: a block of keys, and the tiles of queries that attend to it, once for each head of queries
// that shares the keys.
struct Work {
    int batch, kv_head, block, first, tiles, count;
    bool ascends;
};
// Assigns work to the block that has begun as number `id`.
//
// The blocks of a group of heads begin with the last keys, which have the fewest tiles in causal attention, and
// iterate over tiles in ascending order. Each block then finds its tiles just left by the one before it, even if both
// begin at once. The last groups begin with the first keys and iterate in descending order: the device stays busy to
// the end if the longest work begins first.
INLINE Work assign_work(const Params& p, u32 id) {
    const u32 blocks = (p.keys + KEYS - 1) / KEYS, heads = p.kv_heads * p.batch, group = id / (p.group * blocks);
    const u32 id_in_group = id - group * (p.group * blocks), group_heads = min(p.group, heads - group * p.group);
    const u32 place = id_in_group / group_heads, head_index = group * p.group + (id_in_group - place * group_heads);
    const u32 batch = head_index / p.kv_heads;
    Work work;
    work.batch = batch, work.kv_head = head_index - batch * p.kv_heads;
    work.ascends = group < (u32)p.ascending_groups;
    work.block = work.ascends ? blocks - 1 - place : place;
    const int key = work.block * KEYS, last = min(key + KEYS, p.keys) - 1;
    work.first = max(key - p.right, 0) / QUERIES;
    work.tiles = max(min(last + p.left, p.queries - 1) / QUERIES + 1 - work.first, 0);
    work.count = work.tiles * (p.heads / p.kv_heads);
    return work;
}
// The tile of a block's iteration, and its head.
struct TileWalk {
    int tile, head, left;
    INLINE void begin_head(const Work& work) {
        left = work.tiles;
        tile = work.ascends ? work.first : work.first + work.tiles - 1;
    }
    INLINE TileWalk(const Work& work, const Params& p) : head(work.kv_head * (p.heads / p.kv_heads)) {
        begin_head(work);
    }
    INLINE void advance(const Work& work) {
        tile += work.ascends ? 1 : -1;
        if (--left == 0) head++, begin_head(work);
    }
};

// Barriers of a block. A stage of queries is full when TMA has loaded it, and empty when all units have read it. A tile
// of score gradients is full when all units have written it, and a tile of sums when one unit has.
struct Barriers {
    u64 rows, full[STAGES], empty[STAGES], ds_full[BUFFERS], ds_empty[BUFFERS], sum_full[BUFFERS], sum_empty[BUFFERS];
};
// Position in a ring of SIZE buffers. A new barrier passes for a wait with parity 1.
template <int SIZE> struct Ring {
    int at = 0;
    u32 parity = 0;
    INLINE void advance() {
        if (++at == SIZE) at = 0, parity ^= 1;
    }
};

// Makes this thread's writes to shared memory visible to wgmma and TMA.
INLINE void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders accesses to global memory of this thread and of TMA.
INLINE void fence_global_accesses() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Arrives once for each warp.
INLINE void arrive_warp(u32 barrier) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive_barrier(barrier);
}
INLINE void sync_unit(int unit) { asm volatile("bar.sync %0, 128;" ::"r"(1 + unit) : "memory"); }
template <int REGISTERS> INLINE void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> INLINE void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Adds (or assigns) a product of two MN-major operands: rows of shared memory are terms of the sum.
template <bool ADD> INLINE void wgmma_ss_mn_major(float (*d)[4], u64 a, u64 b) {
    asm volatile("{wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " R32 ", %32, %33, %34, 1, 1, 1, 1;}"
                 : F32 : "l"(a), "l"(b), "n"(ADD ? 1 : 0));
}
// Computes s = aᵀ · b of two tiles with the rows of a block's keys.
INLINE void mma_atb(Accumulators<QUERIES>& s, u32 a, u32 b) {
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
        const u64 a_descriptor = make_descriptor(descriptor_low_word(a, 16) + j * 128);
        const u64 b_descriptor = make_descriptor(descriptor_low_word(b, 16) + j * 128);
        if (j == 0) wgmma_ss_mn_major<false>(s.v[0], a_descriptor, b_descriptor);
        else wgmma_ss_mn_major<true>(s.v[0], a_descriptor, b_descriptor);
    }
}

// Clears a warp's weights of keys (rows) for queries (columns) that do not attend to them. The scores stay: the
// compiler serialises products if other instructions write registers of a product while another one runs.
INLINE void mask_weights(Accumulators<QUERIES>& s, int row, int query, const Params& p) {
    const int lane = threadIdx.x & 31, column = query + 2 * (lane & 3);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int key = row + 8 * half + (lane >> 2);
        const int low = key - p.right - column, high = key < p.keys ? key + p.left - column : -1;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                if (8 * n + k < low || 8 * n + k > high) s.v[0][n][2 * half + k] = 0.0f;
    }
}

// Stores a unit's 64 rows of a gradient through shared memory and, if requested, their sums.
INLINE void store_unit(const Accumulators<HEAD>& s, float scale, u32 tile, u16* to, int stride, int row, int end,
                       int unit, float (*partial)[HEAD], float* sums) {
    const float factor[1][2] = {{scale, scale}};
    const int lane = threadIdx.x & 31, thread = threadIdx.x & 127;
    store_tile<KEYS>(s, factor, tile, warp_row(), to, stride, row, end);
    if (sums) {
        float low = 0, high = 0;
#pragma unroll
        for (int r = 0; r < 16; r++) {
            u32 pair;
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair)
                         : "r"(tile_address<KEYS>(tile, warp_row() + r, lane >> 2) + (lane & 3) * 4) : "memory");
            low += low_half(pair), high += high_half(pair);
        }
        partial[thread >> 5][2 * lane] = low, partial[thread >> 5][2 * lane + 1] = high;
        sync_unit(unit);
        if (thread < HEAD)
            sums[thread] = (partial[0][thread] + partial[1][thread]) + (partial[2][thread] + partial[3][thread]);
        sync_unit(unit);
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_bwd_blocks(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    __shared__ Barriers barriers;
    __shared__ u32 ticket;
    __shared__ float partial_sums[UNITS][4][HEAD];
    static_assert(THREADS == 128 * (UNITS + 1), "all units and the helpers");
    const u32 k_tile = shared_base(memory), v_tile = k_tile + KEY_BYTES, q_tiles = v_tile + KEY_BYTES;
    const u32 g_tiles = q_tiles + STAGES * QUERY_BYTES, ds_tiles = g_tiles + STAGES * QUERY_BYTES;
    const u32 sum_tiles = ds_tiles + BUFFERS * KEY_BYTES, stats_tiles = sum_tiles + BUFFERS * SUM_BYTES;
    const u32 rows_barrier = shared_address(&barriers.rows);
    const u32 full = shared_address(barriers.full), empty = shared_address(barriers.empty);
    const u32 ds_full = shared_address(barriers.ds_full), ds_empty = shared_address(barriers.ds_empty);
    const u32 sum_full = shared_address(barriers.sum_full), sum_empty = shared_address(barriers.sum_empty);
    PDL_WAIT();
    const Scratch scratch = scratch_of(p);
    if (threadIdx.x == 0) {
        init_barrier(rows_barrier, 1);
#pragma unroll
        for (int i = 0; i < STAGES; i++) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, 4 * UNITS);
#pragma unroll
        for (int i = 0; i < BUFFERS; i++) {
            init_barrier(ds_full + 8 * i, 4 * UNITS);
            init_barrier(ds_empty + 8 * i, 4);
            init_barrier(sum_full + 8 * i, 4);
            init_barrier(sum_empty + 8 * i, 1);
        }
        fence_barrier_init();
        // A block waits for the turns of blocks with lower tickets only. Those have begun, so they will end.
        asm volatile("atom.global.relaxed.gpu.add.u32 %0, [%1], 1;" : "=r"(ticket) : "l"(scratch.begun) : "memory");
    }
    __syncthreads();
    const Work work = assign_work(p, ticket);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), unit = warp >> 2, lane = threadIdx.x & 31;
    const int k0 = work.block * KEYS;

    if (unit < UNITS) {
        // Rows of scores are keys and columns are queries.
        raise_registers<UNIT_REGISTERS>();
        const int row = k0 + warp_row();
        const float scale = score_scale(p);
        Accumulators<HEAD> dk, dv;
        clear(dk);
        clear(dv);
        TileWalk walk(work, p);
        Ring<STAGES> stage;
        Ring<BUFFERS> buffer;
        // Units compute the sums in turns. `others` counts the tiles until this unit's.
        int others = unit;
        wait_barrier(rows_barrier, 0);
#pragma unroll 1
        for (int t = 0; t < work.count; t++, walk.advance(work), stage.advance(), buffer.advance()) {
            const u32 q = q_tiles + stage.at * QUERY_BYTES, g = g_tiles + stage.at * QUERY_BYTES;
            const u32 line = stats_tiles + stage.at * STATS_BYTES + 2 * (lane & 3) * 4;
            const u32 ds_tile = ds_tiles + buffer.at * KEY_BYTES;
            const int query = walk.tile * QUERIES;
            wait_barrier(full + 8 * stage.at, stage.parity);
            Accumulators<QUERIES> s, dp;
            mma_fence();
            mma_abt<KEYS, QUERIES, QUERIES>(s, k_tile, warp_row(), q);
            mma_commit();
            mma_abt<KEYS, QUERIES, QUERIES>(dp, v_tile, warp_row(), g);
            mma_commit();
            mma_wait<1>();
            fence_accumulators(s);
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++) {
                float lse[2];
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(lse[0]), "=f"(lse[1]) : "r"(line + n * 32)
                             : "memory");
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[0][n][i] = softmax_weight(s.v[0][n][i], lse[i % 2], scale);
            }
            if (row + 15 > query + p.right || row < query + QUERIES - 1 - p.left || row + 15 >= p.keys)
                mask_weights(s, row, query, p);
            AFragments<QUERIES> weights, ds;
            pack_fragments(weights, s);
            fence_accumulators(s);
            mma_wait<0>();
            fence_accumulators(dp);
            mma_fence();
            mma_ab<QUERIES, QUERIES>(dv, weights, g);
            mma_commit();
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++) {
                float delta[2];
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(delta[0]), "=f"(delta[1])
                             : "r"(line + QUERIES * 4 + n * 32) : "memory");
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[0][n][i] *= dp.v[0][n][i] - delta[i % 2];
            }
            pack_fragments(ds, s);
            mma_fence();
            mma_ab<QUERIES, QUERIES>(dk, ds, q);
            mma_commit();
            wait_barrier(ds_empty + 8 * buffer.at, buffer.parity ^ 1);
#pragma unroll
            for (int n = 0; n < QUERIES / 16; n++)
                stmatrix_x4(tile_address<KEYS>(ds_tile, warp_row() + (lane & 15), 2 * n + (lane >> 4)), ds.v[0][n]);
            fence_shared_writes();
            arrive_warp(ds_full + 8 * buffer.at);
            mma_wait<0>();
            fence_accumulators(dv);
            fence_accumulators(dk);
            arrive_warp(empty + 8 * stage.at);
            if (others-- > 0) continue;
            others = UNITS - 1;
            // The block's part of the gradient of the queries. Rows are elements of the head, columns are queries.
            Accumulators<QUERIES> dq;
            wait_barrier(ds_full + 8 * buffer.at, buffer.parity);
            mma_fence();
            mma_atb(dq, k_tile, ds_tile);
            mma_commit();
            mma_wait<0>();
            fence_accumulators(dq);
            arrive_warp(ds_empty + 8 * buffer.at);
            wait_barrier(sum_empty + 8 * buffer.at, buffer.parity ^ 1);
            const u32 to = sum_tiles + buffer.at * SUM_BYTES + (threadIdx.x & 127) * 16;
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                             ::"r"(to + n * (128 * 16)), "f"(dq.v[0][n][0]), "f"(dq.v[0][n][1]), "f"(dq.v[0][n][2]),
                             "f"(dq.v[0][n][3]) : "memory");
            fence_shared_writes();
            arrive_warp(sum_full + 8 * buffer.at);
        }
        // All warps of the unit have read the values.
        sync_unit(unit);
        const int rows64 = k0 / 64 + unit, head = p.heads + work.kv_head;
        const bool has_sums = p.sums && rows64 * 64 < p.keys;
        store_unit(dk, p.scale, v_tile, head_of(p.dk, work.batch, work.kv_head), p.dk.row, row, p.keys, unit,
            partial_sums[unit], has_sums ? row_sums(p, p.keys, work.batch, rows64, head) : nullptr);
        store_unit(dv, 1.0f, v_tile, head_of(p.dv, work.batch, work.kv_head), p.dv.row, row, p.keys, unit,
            partial_sums[unit], has_sums ? row_sums(p, p.keys, work.batch, rows64, head + p.kv_heads) : nullptr);
    } else {
        lower_registers<HELPER_REGISTERS>();
        const int helper = warp - 4 * UNITS, tiles = query_tiles(p);
        if (helper == 0 && lane == 0) {
            // Loads.
            expect_tx(rows_barrier, 2 * KEY_BYTES);
#pragma unroll
            for (int i = 0; i < UNITS; i++) {
                load_box(k_tile + i * (64 * 128), p.k_map, 0, k0 + 64 * i, work.kv_head, work.batch, rows_barrier);
                load_box(v_tile + i * (64 * 128), p.v_map, 0, k0 + 64 * i, work.kv_head, work.batch, rows_barrier);
            }
            TileWalk walk(work, p);
            Ring<STAGES> stage;
#pragma unroll 1
            for (int t = 0; t < work.count; t++, walk.advance(work), stage.advance()) {
                const u32 barrier = full + 8 * stage.at;
                const int query = walk.tile * QUERIES;
                const i64 at = (i64)(work.batch * p.heads + walk.head) * tiles + walk.tile;
                wait_barrier(empty + 8 * stage.at, stage.parity ^ 1);
                expect_tx(barrier, 2 * QUERY_BYTES + STATS_BYTES);
                load_box(q_tiles + stage.at * QUERY_BYTES, p.q_map, 0, query, walk.head, work.batch, barrier);
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                             ::"r"(stats_tiles + stage.at * STATS_BYTES), "l"(scratch.stats + at * (2 * QUERIES)),
                             "r"(STATS_BYTES), "r"(barrier) : "memory");
                load_box(g_tiles + stage.at * QUERY_BYTES, p.grad_map, 0, query, walk.head, work.batch, barrier);
            }
        } else if (helper >= 1 && helper <= BUFFERS && lane == 0) {
            // Adds the contents of one buffer, which has every BUFFERS-th tile, to the sums in scratch memory.
            const int buffer = helper - 1;
            const u32 from = sum_tiles + buffer * SUM_BYTES;
            TileWalk walk(work, p);
#pragma unroll 1
            for (int t = 0; t < work.count; t++, walk.advance(work)) {
                if (t % BUFFERS != buffer) continue;
                const BlockRange blocks = visiting_blocks(p, walk.tile);
                const u32 turn = work.ascends ? blocks.last - work.block : work.block - blocks.first;
                const i64 at = (i64)(work.batch * p.heads + walk.head) * tiles + walk.tile;
                float* to = scratch.sums + at * SUM_FLOATS;
                wait_barrier(sum_full + 8 * buffer, t / BUFFERS & 1);
                if (turn == 0) {
                    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                                 ::"l"(to), "r"(from), "r"(SUM_BYTES) : "memory");
                } else {
                    u32 now;
                    do {
                        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(scratch.turns + at)
                                     : "memory");
                    } while (now != turn);
                    fence_global_accesses();
                    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                                 ::"l"(to), "r"(from), "r"(SUM_BYTES) : "memory");
                }
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                arrive_barrier(sum_empty + 8 * buffer);
                // The turn passes on when the sums are in memory.
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                fence_global_accesses();
                asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(scratch.turns + at), "r"(turn + 1) : "memory");
            }
        }
    }
}
#elif PASS == 5
extern "C" __global__ void __launch_bounds__(THREADS) attention_bwd_sums(const __grid_constant__ Params p) {
    PDL_WAIT();
    static_assert(THREADS == 128, "as many as compute a tile's sums");
    __shared__ alignas(1024) u16 memory[SUM_FLOATS];
    __shared__ float partial[4][HEAD];
    const u32 tile_memory = shared_address(memory);
    const Scratch scratch = scratch_of(p);
    const int tiles = query_tiles(p), head_index = blockIdx.x / tiles, tile = blockIdx.x - head_index * tiles;
    const int batch = head_index / p.heads, head = head_index - batch * p.heads;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const BlockRange blocks = visiting_blocks(p, tile);
    const float* from = scratch.sums + (i64)blockIdx.x * SUM_FLOATS + threadIdx.x * 4;
    float sums[QUERIES / 8][4];
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n++) {
        sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
        if (blocks.first <= blocks.last)
            asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(sums[n][0]), "=f"(sums[n][1]), "=f"(sums[n][2]), "=f"(sums[n][3])
                         : "l"(from + n * (THREADS * 4)) : "memory");
    }
    // Rows of the matrices are elements of the head and columns are queries: the store transposes them.
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n += 2) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            r[i] = pack(sums[n + i / 2][i % 2 * 2] * p.scale, sums[n + i / 2][i % 2 * 2 + 1] * p.scale);
        stmatrix_x4_trans(tile_address<QUERIES>(tile_memory, 8 * n + (lane & 7) + (lane >> 4) * 8,
            2 * warp + (lane >> 3 & 1)), r);
    }
    __syncthreads();
    u16* to = head_of(p.dq, batch, head);
#pragma unroll
    for (int i = 0; i < QUERIES / 16; i++) {
        const int row = 16 * i + threadIdx.x / 8, part = threadIdx.x % 8, query = tile * QUERIES + row;
        u32 a, b, c, d;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                     : "r"(tile_address<QUERIES>(tile_memory, row, part)) : "memory");
        if (query < p.queries)
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                         ::"l"(to + (i64)query * p.dq.row + part * 8), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    }
    if (p.sums) {
        // The gradients of queries after the last are zeros.
        float low = 0, high = 0;
#pragma unroll
        for (int r = 0; r < 16; r++) {
            u32 pair;
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair)
                         : "r"(tile_address<QUERIES>(tile_memory, 16 * warp + r, lane >> 2) + (lane & 3) * 4)
                         : "memory");
            low += low_half(pair), high += high_half(pair);
        }
        partial[warp][2 * lane] = low, partial[warp][2 * lane + 1] = high;
        __syncthreads();
        if (threadIdx.x < HEAD)
            row_sums(p, p.queries, batch, tile, head)[threadIdx.x] = (partial[0][threadIdx.x]
                + partial[1][threadIdx.x]) + (partial[2][threadIdx.x] + partial[3][threadIdx.x]);
    }
}
#endif
