// Attention backward, in two kernels without atomics. The first computes the gradients of the queries, by
// tiles of queries over the keys that they attend to. It also computes delta, the sum of grad · out of each
// query. The second computes those of keys and values, by tiles of keys over the queries that attend to them.
// Both also write the sums of each block's rows, if requested. Weights are recomputed from the scores and the
// saved logarithm.

#if PASS == 1
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_bwd_queries(const __grid_constant__ Params p) {
    PDL_WAIT();
    extern __shared__ char memory[];
    const u32 q_tile = shared_base(memory), g_tile = q_tile + TILE_BYTES(ROWS), k_tiles = g_tile + TILE_BYTES(ROWS);
    const u32 v_tiles = k_tiles + STAGES * TILE_BYTES(COLS);
    __shared__ Work again;
    const Work work = work_of(blockIdx.x, p.heads, p.batch, (p.queries + ROWS - 1) / ROWS, p.group, true);
    put_down(again, work);
    const int kv_head = work.head / (p.heads / p.kv_heads);
    const Rows q_rows = rows_of(p.q_map, p.q, work.batch, work.head, p.queries);
    const Rows g_rows = rows_of(p.grad_map, p.grad, work.batch, work.head, p.queries);
    const Rows k_rows = rows_of(p.k_map, p.k, work.batch, kv_head, p.keys);
    const Rows v_rows = rows_of(p.v_map, p.v, work.batch, kv_head, p.keys);
#if MASK
    const Item* mask = mask_of(p, work.batch, work.head);
#endif
#if DROP
    const uint4 random = *p.random;
#endif

    const int q0 = work.tile * ROWS;
    const Span span = span_of(q0, p.queries, p.keys, p.left, p.right);
    const int first = span.first, count = span.count, begin = span.begin, end = span.end;
    const int row = q0 + warp_row(), lane = threadIdx.x & 31;

    auto fetch = [&](int t) {
        if (LOADS && t < count) {
            loads_begin(t, 2 * COLS + (t == 0 ? 2 * ROWS : 0));
            if (t == 0) {
                load<ROWS>(q_tile, q_rows, q0, t);
                load<ROWS>(g_tile, g_rows, q0, t);
            }
            load<COLS>(k_tiles + (t % STAGES) * TILE_BYTES(COLS), k_rows, (first + t) * COLS, t);
            load<COLS>(v_tiles + (t % STAGES) * TILE_BYTES(COLS), v_rows, (first + t) * COLS, t);
        }
        loads_end();
    };
    loads_prepare();
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) fetch(t);

    const i64 line = (i64)(work.batch * p.heads + work.head) * p.queries;
    float lse[ROWS16][2], delta[ROWS16][2];
    const u16* out_rows = head_of(p.out, work.batch, work.head);
    const u16* grad_rows = head_of(p.grad, work.batch, work.head);
    // Four threads share a row of the sums, and its delta too.
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = row + 16 * m + 8 * half + (lane >> 2);
            bool inside = query < p.queries;
            float sum = 0;
            for (int part = lane & 3; inside && part < HEAD / 8; part += 4) {
                u32 a[4], b[4];
                asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                             : "l"(out_rows + (i64)query * p.out.row + part * 8));
                asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                             : "l"(grad_rows + (i64)query * p.grad.row + part * 8));
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

    const float scale = scale_of(p);
    Sums<DEPTH> dq;
    clear(dq);
#if KEEP
    Kept q, g;
    loads_wait(0);
    keep<ROWS>(q, q_tile, warp_row());
    keep<ROWS>(g, g_tile, warp_row());
#endif
    for (int t = 0; t < count; t++) {
        loads_wait(t);
        fetch(t + STAGES - 1);
        if (t < begin || t >= end) continue;
        const u32 k = k_tiles + (t % STAGES) * TILE_BYTES(COLS), v = v_tiles + (t % STAGES) * TILE_BYTES(COLS);
        const int key = (first + t) * COLS;
        const bool edge = key + COLS > p.keys || key + COLS - 1 > row + p.right || key < row + 16 * ROWS16 - 1 - p.left;
        // Called twice with constants: 3 % faster here, and slower in the other passes.
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
        Extra extra;
#if MASK
        read_mask(extra, mask, row, key, p.mask_query, p.mask_key, p.queries, p.keys);
#endif
#if DROP
        draw(extra, random, p.threshold, line + row, key);
#endif
        products_wait<1>();
        settle(s);
        mask_scores(s, extra, p);
        if (at_edge) hide(s, row, key, p.left, p.right, p.keys - 1);
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[m][n][i] = weight_of(s.v[m][n][i], lse[m][i / 2], scale);
        settle(s);
        products_wait<0>();
        settle(dp);
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s.v[m][n][i] *= (is_kept(extra, m, n, i) ? dp.v[m][n][i] * KEPT(p) : 0.0f) - delta[m][i / 2];
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
    copies_wait<0>();
    __syncthreads();
    const int start = again.tile * ROWS, own = start + warp_row();
    float factor[ROWS16][2];
#pragma unroll
    for (int m = 0; m < ROWS16; m++) factor[m][0] = factor[m][1] = p.scale;
    store<ROWS>(dq, factor, q_tile, warp_row(), head_of(p.dq, again.batch, again.head), p.dq.row, own, p.queries);
    if (p.sums)
        store_sums<ROWS>(q_tile, min(ROWS, p.queries - start), g_tile, sums_of(p, p.queries, again, again.head));
}
#else
// Here rows are keys and columns are queries: the products of weights and gradients then take registers as
// operands.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_bwd_keys(const __grid_constant__ Params p) {
    PDL_WAIT();
    extern __shared__ char memory[];
    const u32 k_tile = shared_base(memory), v_tile = k_tile + TILE_BYTES(ROWS), q_tiles = v_tile + TILE_BYTES(ROWS);
    const u32 g_tiles = q_tiles + STAGES * TILE_BYTES(COLS), lines = g_tiles + STAGES * TILE_BYTES(COLS);
    __shared__ Work again;
    const Work work = work_of(blockIdx.x, p.kv_heads, p.batch, (p.keys + ROWS - 1) / ROWS, p.group, false);
    put_down(again, work);
    const int shared_by = p.heads / p.kv_heads;

    // Tiles of queries that attend to some key of the block, for each head that shares the keys.
    const int k0 = work.tile * ROWS;
    const Span span = span_of(k0, p.keys, p.queries, p.right, p.left);
    const int first = span.first, tiles = span.count, begin = span.begin, end = span.end, count = tiles * shared_by;
    const int row = k0 + warp_row(), lane = threadIdx.x & 31;

#if DROP
    const uint4 random = *p.random;
#endif

    // The current tile of queries and its head; the next tile to load, `next_tile`, and the rows of its head.
    int turn = 0, of_head = work.head * shared_by, next_tile = 0;
    Rows q_rows = rows_of(p.q_map, p.q, work.batch, of_head, p.queries),
        g_rows = rows_of(p.grad_map, p.grad, work.batch, of_head, p.queries);
    const Rows k_rows = rows_of(p.k_map, p.k, work.batch, work.head, p.keys),
        v_rows = rows_of(p.v_map, p.v, work.batch, work.head, p.keys);
    i64 line = (i64)(work.batch * p.heads + of_head) * p.queries;
    auto fetch = [&](int t) {
        if (t < count) {
            const int at = (first + next_tile) * COLS, stage = t % STAGES;
            if (LOADS) {
                loads_begin(t, 2 * COLS + (t == 0 ? 2 * ROWS : 0));
                if (t == 0) {
                    load<ROWS>(k_tile, k_rows, k0, t);
                    load<ROWS>(v_tile, v_rows, k0, t);
                }
                load<COLS>(q_tiles + stage * TILE_BYTES(COLS), q_rows, at, t);
                load<COLS>(g_tiles + stage * TILE_BYTES(COLS), g_rows, at, t);
            }
#pragma unroll
            for (int turn = 0; turn < 2 * COLS; turn += THREADS) {
                const int i = turn + threadIdx.x;
                if (2 * COLS % THREADS != 0 && i >= 2 * COLS) break;
                bool inside = at + i % COLS < p.queries;
                const float* from = p.stats + (i < COLS ? 0 : (i64)p.batch * p.heads * p.queries);
                copy_async4(lines + (stage * 2 * COLS + i) * 4, from + (inside ? line + at + i % COLS : 0), inside);
            }
            if (++next_tile == tiles) {
                next_tile = 0;
                next_head(q_rows, p.q);
                next_head(g_rows, p.grad);
                line += p.queries;
            }
        }
        copies_commit();
    };
    loads_prepare();
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) fetch(t);

    const float scale = scale_of(p);
    Sums<DEPTH> dk, dv;
    clear(dk);
    clear(dv);
#if KEEP
    Kept k, v;
    loads_wait(0);
    keep<ROWS>(k, k_tile, warp_row());
    keep<ROWS>(v, v_tile, warp_row());
#endif
#pragma unroll TURNS
    for (int t = 0; t < count; t++) {
        // Waits for the copies of the rows' statistics.
        copies_wait<STAGES - 2>();
        loads_wait(t);
        fetch(t + STAGES - 1);
        const int within = turn, head = of_head, stage = t % STAGES;
        if (++turn == tiles) turn = 0, of_head++;
        if (within < begin || within >= end) continue;
        const u32 q = q_tiles + stage * TILE_BYTES(COLS), g = g_tiles + stage * TILE_BYTES(COLS);
        const int query = (first + within) * COLS;
        // Queries past the end are zeros, and add nothing.
        const bool edge = row + 16 * ROWS16 - 1 > query + p.right || row < query + COLS - 1 - p.left;
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
        Extra extra;
#if MASK
        read_mask(extra, mask_of(p, work.batch, head), row, query, p.mask_key, p.mask_query, p.keys, p.queries);
#endif
#if DROP
        draw(extra, random, p.threshold, (work.batch * p.heads + head) * p.queries + query, row);
#endif
        products_wait<1>();
        settle(s);
        mask_scores(s, extra, p);
        if (edge) hide(s, row, query, p.right, p.left, 0x7fffffff);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            float lse[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(lse[0]), "=f"(lse[1]) : "r"(line + n * 32)
                         : "memory");
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[m][n][i] = weight_of(s.v[m][n][i], lse[i % 2], scale);
        }
        Halves<COLS> weights, ds;
        round_to(weights, kept_of(s, extra));
        settle(s);
        products_wait<0>();
        settle(dp);
        products_begin();
        by_columns<COLS, COLS>(dv, weights, g);
        products_commit();
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            float delta[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(delta[0]), "=f"(delta[1])
                         : "r"(line + COLS * 4 + n * 32) : "memory");
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s.v[m][n][i] *= (is_kept(extra, m, n, i) ? dp.v[m][n][i] * KEPT(p) : 0.0f) - delta[i % 2];
        }
        round_to(ds, s);
        products_begin();
        by_columns<COLS, COLS>(dk, ds, q);
        products_commit();
        products_wait<0>();
        settle(dv);
        settle(dk);
    }
    copies_wait<0>();
    __syncthreads();
    const int start = again.tile * ROWS, own = start + warp_row();
    float factor[ROWS16][2];
#pragma unroll
    for (int m = 0; m < ROWS16; m++) factor[m][0] = factor[m][1] = p.scale;
    store<ROWS>(dk, factor, k_tile, warp_row(), head_of(p.dk, again.batch, again.head), p.dk.row, own, p.keys);
#pragma unroll
    for (int m = 0; m < ROWS16; m++) factor[m][0] = factor[m][1] = KEPT(p);
    store<ROWS>(dv, factor, v_tile, warp_row(), head_of(p.dv, again.batch, again.head), p.dv.row, own, p.keys);
    if (p.sums) {
        const int rows = min(ROWS, p.keys - start), head = p.heads + again.head;
        store_sums<ROWS>(k_tile, rows, q_tiles, sums_of(p, p.keys, again, head));
        store_sums<ROWS>(v_tile, rows, g_tiles, sums_of(p, p.keys, again, head + p.kv_heads));
    }
}
#endif
