// Attention forward, like FlashAttention-2. A block holds ROWS queries of one head and iterates over the keys
// that they attend to, in tiles of COLS. Each query has a running maximum and sum. Keys are loaded one tile
// ahead of values, so that the product with the next keys overlaps the exponentials.

struct Softmax {
    float largest[ROWS16][2], sum[ROWS16][2];
};

// Slack of the running maximum, as an exponent of two. The maximum is updated only if a score exceeds it by
// more, so that rescaling earlier sums is rare.
#define SLACK 8.0f

// Converts scores to weights; `rescale` is the factor for all earlier sums. Reports whether any factor of
// this warp is not 1.
INLINE bool weigh(Sums<COLS>& s, Softmax& state, float (&rescale)[ROWS16][2], float scale, bool edge,
                  const Params& p, const Extra& extra, int row, int key) {
    mask_scores(s, extra, p);
    bool moved = false;
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (edge) hide(s, m, half, row, key, p.left, p.right, p.keys - 1);
            float largest = state.largest[m][half];
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
                largest = fmaxf(largest, fmaxf(s.v[m][n][2 * half], s.v[m][n][2 * half + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
            // A query that has attended to no key yet has no maximum to subtract.
            float before = state.largest[m][half];
            bool move = (largest - before) * scale > SLACK;
            largest = move ? largest : before;
            moved |= move;
            float off = largest == NEVER ? 0.0f : largest * scale;
            rescale[m][half] = move ? exp2_fast(before * scale - off) : 1.0f;
            state.largest[m][half] = largest;
            float sum[2] = {0, 0};
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float weight = exp2_fast(s.v[m][n][2 * half + i] * scale - off);
                    s.v[m][n][2 * half + i] = is_kept(extra, m, n, 2 * half + i) ? weight : 0.0f;
                    sum[i] += weight;
                }
            state.sum[m][half] = state.sum[m][half] * rescale[m][half] + (sum[0] + sum[1]);
        }
    return __any_sync(0xffffffff, moved);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_fwd(const __grid_constant__ Params p) {
    PDL_WAIT();
    extern __shared__ char memory[];
    const u32 q_tile = shared_base(memory), k_tiles = q_tile + TILE_BYTES(ROWS),
              v_tiles = k_tiles + STAGES * TILE_BYTES(COLS);
    const Work work = work_of(blockIdx.x, p.heads, p.batch, (p.queries + ROWS - 1) / ROWS, p.group, true);
    const int kv_head = work.head / (p.heads / p.kv_heads);
    const Rows q_rows = rows_of(p.q_map, p.q, work.batch, work.head, p.queries);
    const Rows k_rows = rows_of(p.k_map, p.k, work.batch, kv_head, p.keys);
    const Rows v_rows = rows_of(p.v_map, p.v, work.batch, kv_head, p.keys);
#if MASK
    const Item* mask = mask_of(p, work.batch, work.head);
#endif
#if DROP
    const uint4 random = *p.random;
    const u32 line = (work.batch * p.heads + work.head) * p.queries;
#endif

    const int q0 = work.tile * ROWS;
    const Span span = span_of(q0, p.queries, p.keys, p.left, p.right);
    const int first = span.first, count = span.count;
    const int row = q0 + warp_row();

    auto fetch = [&](int t) {
        if (LOADS && t <= count) {
            loads_begin(t, (t == 0 ? ROWS : COLS) + (t < count ? COLS : 0));
            if (t == 0) load<ROWS>(q_tile, q_rows, q0, t);
            if (t < count) load<COLS>(k_tiles + (t % STAGES) * TILE_BYTES(COLS), k_rows, (first + t) * COLS, t);
            if (t > 0) load<COLS>(v_tiles + ((t - 1) % STAGES) * TILE_BYTES(COLS), v_rows, (first + t - 1) * COLS, t);
        }
        loads_end();
    };
    loads_prepare();
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) fetch(t);

    Sums<DEPTH> out;
    Halves<COLS> weights;
    Softmax state;
    float rescale[ROWS16][2];
    clear(out);
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) state.largest[m][half] = NEVER, state.sum[m][half] = 0;
    const float scale = scale_of(p);
    auto extra_of = [&](int row, int key) {
        Extra extra;
#if MASK
        read_mask(extra, mask, row, key, p.mask_query, p.mask_key, p.queries, p.keys);
#endif
#if DROP
        draw(extra, random, p.threshold, line + row, key);
#endif
        return extra;
    };
#if KEEP
    Kept q;
    loads_wait(0);
    keep<ROWS>(q, q_tile, warp_row());
#define SCORES(s, k) rows_by_rows<COLS, COLS>(s, q, k)
#else
#define SCORES(s, k) rows_by_rows<ROWS, COLS, COLS>(s, q_tile, warp_row(), k)
#endif

    // Overlaps the next scores with the product of the previous weights and values. The first iteration has
    // no previous weights and the last no next scores; constants select them at compile time.
    auto turn = [&](int t, const bool start) WRITTEN_OUT {
        const int key = (first + t) * COLS;
        const bool edge = key + COLS > p.keys || key + COLS - 1 > row + p.right || key < row + 16 * ROWS16 - 1 - p.left;
        Sums<COLS> s;
        products_begin();
        SCORES(s, k_tiles + (t % STAGES) * TILE_BYTES(COLS));
        products_commit();
        if (!start) by_columns<COLS, COLS>(out, weights, v_tiles + ((t + STAGES - 1) % STAGES) * TILE_BYTES(COLS));
        products_commit();
        const Extra extra = extra_of(row, key);
        products_wait<1>();
        settle(s);
        const bool moved = weigh(s, state, rescale, scale, edge, p, extra, row, key);
        settle(s);
        products_wait<0>();
        settle(out);
        if (!start && moved) {
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int n = 0; n < DEPTH / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) out.v[m][n][i] *= rescale[m][i / 2];
        }
        round_to(weights, s);
    };
    auto last_turn = [&](int t) WRITTEN_OUT {
        products_begin();
        by_columns<COLS, COLS>(out, weights, v_tiles + ((t + STAGES - 1) % STAGES) * TILE_BYTES(COLS));
        products_commit();
        products_wait<0>();
        settle(out);
    };
    auto arrive = [&](int t) {
        loads_wait(t);
        fetch(t + STAGES - 1);
    };
#if ROWS == UNIT_ROWS
    // All warps have the same range of tiles.
    arrive(0);
    if (count > 0) {
        turn(0, true);
#pragma unroll TURNS
        for (int t = 1; t < count; t++) {
            arrive(t);
            turn(t, false);
        }
        arrive(count);
        last_turn(count);
    }
#else
    for (int t = 0; t <= count; t++) {
        arrive(t);
        if (t > span.begin && t < span.end) turn(t, false);
        else if (t == span.begin && t < span.end) turn(t, true);
        else if (t == span.end && t > span.begin) last_turn(t);
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
            rescale[m][half] = sum > 0 ? KEPT(p) / sum : 0.0f;
            int query = row + 16 * m + 8 * half + (lane >> 2);
            if ((lane & 3) == 0 && query < p.queries) {
                float lse = sum > 0 ? state.largest[m][half] * (MASK >= 2 ? LN2 : p.scale) + log2_fast(sum) * LN2
                    : 0.0f;
                p.lse[(i64)(work.batch * p.heads + work.head) * p.queries + query] = lse;
            }
        }
#if !KEEP
    // Other warps of the unit may still read the queries.
    __syncthreads();
#endif
    store<ROWS>(out, rescale, q_tile, warp_row(), head_of(p.out, work.batch, work.head), p.out.row, row, p.queries);
}
