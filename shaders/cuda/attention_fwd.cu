// Attention forward, like FlashAttention-2. A block holds ROWS queries of one head and iterates over the keys
// that they attend to, in tiles of COLS. Each query has a running maximum and sum. Keys are loaded one tile
// ahead of values, so that the product with the next keys overlaps the exponentials.

struct SoftmaxState {
    float row_max[ROWS16][2], sum[ROWS16][2];
};

// Slack of the running maximum, as an exponent of two. The maximum is updated only if a score exceeds it by
// more, so that rescaling earlier sums is rare.
#define RESCALE_THRESHOLD 8.0f

// Converts scores to weights; `rescale` is the factor for all earlier sums. Reports whether any factor of
// this warp is not 1.
INLINE bool update_softmax(Accumulators<COLS>& s, SoftmaxState& state, float (&rescale)[ROWS16][2], float scale,
                           bool edge, const Params& p, const TileMasks& masks, int row, int key) {
    bool rescales = false;
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (edge) mask_window(s, m, half, row, key, p.left, p.right, p.keys - 1);
            float row_max = state.row_max[m][half];
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
                row_max = fmaxf(row_max, fmaxf(s.v[m][n][2 * half], s.v[m][n][2 * half + 1]));
            row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, 1));
            row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, 2));
            // A query that has attended to no key yet has no maximum to subtract.
            float before = state.row_max[m][half];
            bool move = (row_max - before) * scale > RESCALE_THRESHOLD;
            row_max = move ? row_max : before;
            rescales |= move;
            float offset = row_max == NEG_INFINITY ? 0.0f : score_offset(row_max, scale);
            rescale[m][half] = move ? exp2_fast(score_exponent(before, offset, scale)) : 1.0f;
            state.row_max[m][half] = row_max;
            float sum[2] = {0, 0};
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float weight = exp2_fast(score_exponent(s.v[m][n][2 * half + i], offset, scale));
                    s.v[m][n][2 * half + i] = is_kept(masks, m, n, 2 * half + i) ? weight : 0.0f;
                    sum[i] += weight;
                }
            state.sum[m][half] = state.sum[m][half] * rescale[m][half] + (sum[0] + sum[1]);
        }
    return __any_sync(0xffffffff, rescales);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_fwd(const __grid_constant__ Params p) {
    PDL_WAIT();
    extern __shared__ char memory[];
    const u32 q_tile = shared_base(memory), k_tiles = q_tile + TILE_BYTES(ROWS),
              v_tiles = k_tiles + STAGES * TILE_BYTES(COLS);
#if MASK_STAGES
    const u32 mask_tiles = v_tiles + STAGES * TILE_BYTES(COLS);
#endif
    const TileCoord work = assign_tile(blockIdx.x, p.heads, p.batch, (p.queries + ROWS - 1) / ROWS, p.group, true);
    const int kv_head = work.head / (p.heads / p.kv_heads);
    const TileSource q_rows = tile_source(p.q_map, p.q, work.batch, work.head, p.queries);
    const TileSource k_rows = tile_source(p.k_map, p.k, work.batch, kv_head, p.keys);
    const TileSource v_rows = tile_source(p.v_map, p.v, work.batch, kv_head, p.keys);
#if MASK && !MASK_STAGES
    const MaskElement* mask = head_mask(p, work.batch, work.head);
#endif
#if DROPOUT
    const uint4 random = *p.random;
    const u32 line = (work.batch * p.heads + work.head) * p.queries;
#endif

    const int q0 = work.tile * ROWS;
    const TileRange span = attended_tiles(q0, p.queries, p.keys, p.left, p.right);
    const int first = span.first, count = span.count;
    const int row = q0 + warp_row();

    auto prefetch_mask = [&](bool issues, int t) {
#if MASK_STAGES
        const int key = (first + t) * COLS;
        load_mask_tile(issues && t < count, mask_tiles, p, work.batch, work.head, q0, key, t);
#endif
    };
    auto prefetch = [&](int t) {
        if (ISSUES_LOADS && t <= count) {
            begin_stage_loads(t, (t == 0 ? ROWS : COLS) + (t < count ? COLS : 0), t < count ? MASK_TILE_BYTES : 0);
            if (t == 0) load_tile<ROWS>(q_tile, q_rows, q0, t);
            if (t < count) load_tile<COLS>(k_tiles + (t % STAGES) * TILE_BYTES(COLS), k_rows, (first + t) * COLS, t);
            if (MASK_STAGES != 1 || t == 0) prefetch_mask(true, t);
            if (t > 0)
                load_tile<COLS>(v_tiles + ((t - 1) % STAGES) * TILE_BYTES(COLS), v_rows, (first + t - 1) * COLS, t);
        }
        commit_stage_loads();
    };
    init_stages();
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) prefetch(t);

    Accumulators<DEPTH> out;
    AFragments<COLS> weights;
    SoftmaxState state;
    float rescale[ROWS16][2];
    clear(out);
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) state.row_max[m][half] = NEG_INFINITY, state.sum[m][half] = 0;
    const float scale = score_scale(p);
    auto load_tile_masks = [&](int row, int key, int t) {
        TileMasks masks;
#if MASK_STAGES
        read_mask_tile(masks, mask_stage(mask_tiles, t));
#elif MASK
        load_mask(masks, mask, row, key, p.mask_query, p.mask_key, p.queries, p.keys);
#endif
#if DROPOUT
        draw_dropout_bits(masks, random, p.threshold, line + row, key);
#endif
        return masks;
    };
#if ROWS_IN_REGISTERS
    TileFragments q;
    wait_stage_loads(0);
    load_fragments<ROWS>(q, q_tile, warp_row());
#define COMPUTE_SCORES(s, k) mma_abt<COLS, COLS>(s, q, k)
#else
#define COMPUTE_SCORES(s, k) mma_abt<ROWS, COLS, COLS>(s, q_tile, warp_row(), k)
#endif

    // Overlaps the next scores with the product of the previous weights and values. The first iteration has
    // no previous weights and the last no next scores; constants select them at compile time.
    auto process_tile = [&](int t, const bool start) FORCE_INLINE {
        const int key = (first + t) * COLS;
        const bool edge = key + COLS > p.keys || key + COLS - 1 > row + p.right || key < row + 16 * ROWS16 - 1 - p.left;
        Accumulators<COLS> s;
        mma_fence();
        COMPUTE_SCORES(s, k_tiles + (t % STAGES) * TILE_BYTES(COLS));
        mma_commit();
        if (!start) mma_ab<COLS, COLS>(out, weights, v_tiles + ((t + STAGES - 1) % STAGES) * TILE_BYTES(COLS));
        mma_commit();
        const TileMasks masks = load_tile_masks(row, key, t);
        mma_wait<1>();
        fence_accumulators(s);
        apply_mask(s, masks, p);
#if MASK_STAGES == 1
        __syncthreads();
        prefetch_mask(ISSUES_LOADS, t + 1);
#endif
        const bool rescales = update_softmax(s, state, rescale, scale, edge, p, masks, row, key);
        fence_accumulators(s);
        mma_wait<0>();
        fence_accumulators(out);
        if (!start && rescales) {
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int n = 0; n < DEPTH / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) out.v[m][n][i] *= rescale[m][i / 2];
        }
        pack_fragments(weights, s);
    };
    auto process_last_tile = [&](int t) FORCE_INLINE {
        mma_fence();
        mma_ab<COLS, COLS>(out, weights, v_tiles + ((t + STAGES - 1) % STAGES) * TILE_BYTES(COLS));
        mma_commit();
        mma_wait<0>();
        fence_accumulators(out);
    };
    auto wait_and_prefetch = [&](int t) {
        wait_stage_loads(t);
        prefetch(t + STAGES - 1);
    };
#if ROWS == UNIT_ROWS
    // All warps have the same range of tiles.
    wait_and_prefetch(0);
    if (count > 0) {
        process_tile(0, true);
#pragma unroll UNROLLED_TILES
        for (int t = 1; t < count; t++) {
            wait_and_prefetch(t);
            process_tile(t, false);
        }
        wait_and_prefetch(count);
        process_last_tile(count);
    }
#else
    for (int t = 0; t <= count; t++) {
        wait_and_prefetch(t);
        if (t > span.begin && t < span.end) process_tile(t, false);
        else if (t == span.begin && t < span.end) process_tile(t, true);
        else if (t == span.end && t > span.begin) process_last_tile(t);
    }
#endif

    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state.sum[m][half];
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            // A query that attends to no key gets zeros.
            rescale[m][half] = sum > 0 ? DROPOUT_SCALE(p) / sum : 0.0f;
            int query = row + 16 * m + 8 * half + (lane >> 2);
            if ((lane & 3) == 0 && query < p.queries) {
                float lse = sum > 0 ? state.row_max[m][half] * (MASK >= 2 ? 1.0f : p.scale) + log2_fast(sum) * LN2
                    : 0.0f;
                p.lse[(i64)(work.batch * p.heads + work.head) * p.queries + query] = lse;
            }
        }
#if !ROWS_IN_REGISTERS
    // Other warps of the unit may still read the queries.
    __syncthreads();
#endif
    store_tile<ROWS>(out, rescale, q_tile, warp_row(), head_of(p.out, work.batch, work.head), p.out.row, row,
        p.queries);
}
