// Attention backward, in two kernels without atomics: the gradients of the queries, by tiles of queries over the keys that they see
// (and delta, the sum of grad · out of each query), then those of keys and values, by tiles of keys over the queries that
// see them. Weights are made again from the scores and the saved logarithm.

#if PASS == 1
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_bwd_queries(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    const u32 q_tile = shared_base(memory), g_tile = q_tile + TILE_BYTES(ROWS), k_tiles = g_tile + TILE_BYTES(ROWS);
    const u32 v_tiles = k_tiles + STAGES * TILE_BYTES(COLS);
    const Work work = work_of(p.heads, p.batch, (p.queries + ROWS - 1) / ROWS, p.group, true);
    const int kv_head = work.head / (p.heads / p.kv_heads);
    const u16* k_rows = head_of(p.k, work.batch, kv_head);
    const u16* v_rows = head_of(p.v, work.batch, kv_head);

    const int q0 = work.tile * ROWS, q1 = min(q0 + ROWS, p.queries) - 1;
    const int first = max(q0 - p.left, 0) / COLS;
    const int count = max((min(q1 + p.right + 1, p.keys) + COLS - 1) / COLS - first, 0);
    const int u0 = q0 + unit_row(), u1 = u0 + UNIT_ROWS - 1;
    const int begin = max(u0 - p.left, 0) / COLS - first;
    const int end = u0 > q1 ? begin : min((min(u1 + p.right + 1, p.keys) + COLS - 1) / COLS - first, count);
    const int row = q0 + warp_row(), lane = threadIdx.x & 31;

    auto fetch = [&](int t) {
        if (t < count) {
            load<COLS>(k_tiles + (t % STAGES) * TILE_BYTES(COLS), k_rows, p.k.row, (first + t) * COLS, p.keys);
            load<COLS>(v_tiles + (t % STAGES) * TILE_BYTES(COLS), v_rows, p.v.row, (first + t) * COLS, p.keys);
        }
        copies_commit();
    };
    load<ROWS>(q_tile, head_of(p.q, work.batch, work.head), p.q.row, q0, p.queries);
    load<ROWS>(g_tile, head_of(p.grad, work.batch, work.head), p.grad.row, q0, p.queries);
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) fetch(t);

    const i64 line = (i64)(work.batch * p.heads + work.head) * p.queries;
    float lse[ROWS16][2], delta[ROWS16][2];
    const u16* out_rows = head_of(p.out, work.batch, work.head);
    const u16* grad_rows = head_of(p.grad, work.batch, work.head);
    // Four threads have a row of the sums: they share its delta too.
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = row + 16 * m + 8 * half + (lane >> 2);
            bool inside = query < p.queries;
            float sum = 0;
            for (int part = lane & 3; inside && part < HEAD / 8; part += 4) {
                u32 a[4], b[4];
                asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "l"(out_rows + query * p.out.row + part * 8));
                asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "l"(grad_rows + query * p.grad.row + part * 8));
#pragma unroll
                for (int i = 0; i < 4; i++) sum += low_half(a[i]) * low_half(b[i]) + high_half(a[i]) * high_half(b[i]);
            }
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            delta[m][half] = sum;
            lse[m][half] = inside ? p.lse[line + query] * LOG2E : 0.0f;
            if (inside && (lane & 3) == 0) {
                p.stats[line + query] = lse[m][half];
                p.stats[(i64)p.batch * p.heads * p.queries + line + query] = sum;
            }
        }

    const float scale = p.scale * LOG2E;
    Sums<DEPTH> dq;
    clear(dq);
#if KEEP
    Kept q, g;
    copies_wait<STAGES - 2>();
    __syncthreads();
    keep<ROWS>(q, q_tile, warp_row());
    keep<ROWS>(g, g_tile, warp_row());
#endif
    for (int t = 0; t < count; t++) {
        copies_wait<STAGES - 2>();
        arrived();
        fetch(t + STAGES - 1);
        if (t < begin || t >= end) continue;
        const u32 k = k_tiles + (t % STAGES) * TILE_BYTES(COLS), v = v_tiles + (t % STAGES) * TILE_BYTES(COLS);
        const int key = (first + t) * COLS;
        const bool edge = key + COLS > p.keys || key + COLS - 1 > row + p.right || key < row + 16 * ROWS16 - 1 - p.left;
        auto step = [&](const bool at_edge) WRITTEN_OUT {
        Sums<COLS> s, dp;
        products_begin();
#if KEEP
        rows_by_rows<COLS, COLS>(s, q, k);
        products_commit();
        rows_by_rows<COLS, COLS>(dp, g, v);
#else
        rows_by_rows<ROWS, COLS, COLS>(s, q_tile, warp_row(), k);
        products_commit();
        rows_by_rows<ROWS, COLS, COLS>(dp, g_tile, warp_row(), v);
#endif
        products_commit();
        products_wait<1>();
        settle(s);
        if (at_edge) {
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int query = row + 16 * m + 8 * half + (lane >> 2);
                    int low = query - p.left, high = min(query + p.right, p.keys - 1);
#pragma unroll
                    for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            int at = key + 8 * n + 2 * (lane & 3) + i;
                            if (at < low || at > high) s.v[m][n][2 * half + i] = NEVER;
                        }
                }
        }
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[m][n][i] = exp2_fast(s.v[m][n][i] * scale - lse[m][i / 2]);
        settle(s);
        products_wait<0>();
        settle(dp);
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[m][n][i] *= dp.v[m][n][i] - delta[m][i / 2];
        Halves<COLS> ds;
        round_to(ds, s);
        products_begin();
        by_columns<COLS, COLS>(dq, ds, k);
        products_commit();
        products_wait<0>();
        settle(dq);
        };
        if (edge) step(true);
        else step(false);
    }
    float factor[ROWS16][2];
#pragma unroll
    for (int m = 0; m < ROWS16; m++) factor[m][0] = factor[m][1] = p.scale;
    copies_wait<0>();
    __syncthreads();
    store<ROWS>(dq, factor, q_tile, warp_row(), head_of(p.dq, work.batch, work.head), p.dq.row, row, p.queries);
}
#else
// Here rows are keys and columns are queries: the products of weights and gradients then start from registers.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_bwd_keys(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    const u32 k_tile = shared_base(memory), v_tile = k_tile + TILE_BYTES(ROWS), q_tiles = v_tile + TILE_BYTES(ROWS);
    const u32 g_tiles = q_tiles + STAGES * TILE_BYTES(COLS), lines = g_tiles + STAGES * TILE_BYTES(COLS);
    const Work work = work_of(p.kv_heads, p.batch, (p.keys + ROWS - 1) / ROWS, p.group, false);
    const int shared_by = p.heads / p.kv_heads;

    // The tiles of queries that see some key of the block, for each head that shares the keys.
    const int k0 = work.tile * ROWS, k1 = min(k0 + ROWS, p.keys) - 1;
    const int first = max(k0 - p.right, 0) / COLS;
    const int tiles = max((min(k1 + p.left + 1, p.queries) + COLS - 1) / COLS - first, 0);
    const int count = tiles * shared_by;
    const int u0 = k0 + unit_row(), u1 = u0 + UNIT_ROWS - 1;
    const int begin = max(u0 - p.right, 0) / COLS - first;
    const int end = u0 > k1 ? begin : min((min(u1 + p.left + 1, p.queries) + COLS - 1) / COLS - first, tiles);
    const int row = k0 + warp_row(), lane = threadIdx.x & 31;

    // What is fetched next: tile `next_tile` of head `next_head`.
    int next_head = work.head * shared_by, next_tile = 0;
    auto fetch = [&](int t) {
        if (t < count) {
            int head = next_head, at = (first + next_tile) * COLS, stage = t % STAGES;
            if (++next_tile == tiles) next_tile = 0, next_head++;
            load<COLS>(q_tiles + stage * TILE_BYTES(COLS), head_of(p.q, work.batch, head), p.q.row, at, p.queries);
            load<COLS>(g_tiles + stage * TILE_BYTES(COLS), head_of(p.grad, work.batch, head), p.grad.row, at, p.queries);
            i64 line = (i64)(work.batch * p.heads + head) * p.queries;
            for (int i = threadIdx.x; i < 2 * COLS; i += THREADS) {
                bool inside = at + i % COLS < p.queries;
                const float* from = p.stats + (i < COLS ? 0 : (i64)p.batch * p.heads * p.queries);
                copy_async4(lines + (stage * 2 * COLS + i) * 4, from + (inside ? line + at + i % COLS : 0), inside);
            }
        }
        copies_commit();
    };
    load<ROWS>(k_tile, head_of(p.k, work.batch, work.head), p.k.row, k0, p.keys);
    load<ROWS>(v_tile, head_of(p.v, work.batch, work.head), p.v.row, k0, p.keys);
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) fetch(t);

    const float scale = p.scale * LOG2E;
    Sums<DEPTH> dk, dv;
    clear(dk);
    clear(dv);
#if KEEP
    Kept k, v;
    copies_wait<STAGES - 2>();
    __syncthreads();
    keep<ROWS>(k, k_tile, warp_row());
    keep<ROWS>(v, v_tile, warp_row());
#endif
    int turn = 0;
    for (int t = 0; t < count; t++) {
        copies_wait<STAGES - 2>();
        arrived();
        fetch(t + STAGES - 1);
        const int within = turn, stage = t % STAGES;
        if (++turn == tiles) turn = 0;
        if (within < begin || within >= end) continue;
        const u32 q = q_tiles + stage * TILE_BYTES(COLS), g = g_tiles + stage * TILE_BYTES(COLS);
        const int query = (first + within) * COLS;
        // Queries past the end are zeros, and add nothing.
        const bool edge = row + 16 * ROWS16 - 1 > query + p.right || row < query + COLS - 1 - p.left;
        auto step = [&](const bool at_edge) WRITTEN_OUT {
        Sums<COLS> s, dp;
        products_begin();
#if KEEP
        rows_by_rows<COLS, COLS>(s, k, q);
        products_commit();
        rows_by_rows<COLS, COLS>(dp, v, g);
#else
        rows_by_rows<ROWS, COLS, COLS>(s, k_tile, warp_row(), q);
        products_commit();
        rows_by_rows<ROWS, COLS, COLS>(dp, v_tile, warp_row(), g);
#endif
        products_commit();
        const u32 line = lines + (stage * 2 * COLS + 2 * (lane & 3)) * 4;
        products_wait<1>();
        settle(s);
        if (at_edge) {
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int key = row + 16 * m + 8 * half + (lane >> 2), low = key - p.right, high = key + p.left;
#pragma unroll
                    for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            int at = query + 8 * n + 2 * (lane & 3) + i;
                            if (at < low || at > high) s.v[m][n][2 * half + i] = NEVER;
                        }
                }
        }
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            float lse[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(lse[0]), "=f"(lse[1]) : "r"(line + n * 32) : "memory");
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[m][n][i] = exp2_fast(s.v[m][n][i] * scale - lse[i % 2]);
        }
        Halves<COLS> weights, ds;
        round_to(weights, s);
        settle(s);
        products_wait<0>();
        settle(dp);
        products_begin();
        by_columns<COLS, COLS>(dv, weights, g);
        products_commit();
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            float delta[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(delta[0]), "=f"(delta[1]) : "r"(line + COLS * 4 + n * 32) : "memory");
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[m][n][i] *= dp.v[m][n][i] - delta[i % 2];
        }
        round_to(ds, s);
        products_begin();
        by_columns<COLS, COLS>(dk, ds, q);
        products_commit();
        products_wait<0>();
        settle(dv);
        settle(dk);
        };
        if (edge) step(true);
        else step(false);
    }
    float factor[ROWS16][2];
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < ROWS16; m++) factor[m][0] = factor[m][1] = p.scale;
    store<ROWS>(dk, factor, k_tile, warp_row(), head_of(p.dk, work.batch, work.head), p.dk.row, row, p.keys);
#pragma unroll
    for (int m = 0; m < ROWS16; m++) factor[m][0] = factor[m][1] = 1.0f;
    store<ROWS>(dv, factor, v_tile, warp_row(), head_of(p.dv, work.batch, work.head), p.dv.row, row, p.keys);
}
#endif
